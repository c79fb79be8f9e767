"""Arguments of former versions and misspelt ones: the error says what to write instead."""

import pytest

from corespan import LLM, SamplingParams


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("guided_json", r"StructuredOutputsParams\(json="),
        ("guided_decoding", "structured_outputs="),
        ("best_of", "use n"),
        ("use_beam_search", "LLM.beam_search"),
        ("max_token", "max_tokens"),
    ],
)
def test_sampling_params_name_the_field_to_use(field: str, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        SamplingParams(**{field: 1})
    with pytest.raises(TypeError, match=told):
        SamplingParams.from_optional(**{field: 1})


def test_unlike_anything_is_refused_all_the_same() -> None:
    with pytest.raises(TypeError, match="xyzzy"):
        SamplingParams(xyzzy=1)  # type: ignore[call-arg]


def test_engine_argument_is_suggested() -> None:
    with pytest.raises(TypeError, match="did you mean 'gpu_memory_utilization'"):
        LLM("nowhere", gpu_memory_utilisation=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize("messages", [[{"role": "user", "content": "hi"}], [[{"role": "user", "content": "hi"}]]])
def test_messages_given_to_generate_are_sent_to_chat(messages: object) -> None:
    from corespan.engine.text.prompts import parse_prompt, to_prompt_list

    with pytest.raises(TypeError, match=r"LLM\.chat"):
        parse_prompt(to_prompt_list(messages)[0])
