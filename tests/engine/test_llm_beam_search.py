"""Beam search against transformers' in float32."""

from collections.abc import Iterator
from typing import Any

import pytest

from corespan import LLM, BeamSearchParams, EngineDeadError, SamplingParams
from corespan.protocol.errors import EngineGenerateError

PROMPTS = ["The capital of France is", "Once upon a time"]


@pytest.fixture(scope="module", params=[False, True], ids=["inproc", "sync_mp"])
def llm(request: pytest.FixtureRequest, tiny_llama_dir: str) -> Iterator[LLM]:
    from clients import SMALL_ENGINE, multiprocessing_flag

    with multiprocessing_flag(request.param):
        llm = LLM(tiny_llama_dir, **SMALL_ENGINE)
    yield llm
    llm.shutdown()


@pytest.mark.parametrize("beam_width", [1, 3, 5])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beams_equal_transformers(llm: LLM, reference: Any, beam_width: int, length_penalty: float) -> None:
    params = BeamSearchParams(beam_width, max_tokens=10, length_penalty=length_penalty, ignore_eos=True)

    outputs = llm.beam_search(PROMPTS, params)

    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        expected = reference.generate(
            ids,
            num_beams=beam_width,
            num_return_sequences=beam_width,
            max_new_tokens=10,
            do_sample=False,
            length_penalty=length_penalty,
            eos_token_id=None,
        )
        assert [beam.tokens[len(ids) :] for beam in output.sequences] == expected
        assert {beam.finish_reason for beam in output.sequences} == {"length"}


@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0])
def test_beams_that_end_early_compete_as_in_transformers(
    llm: LLM, make_llm: Any, reference: Any, length_penalty: float
) -> None:
    """An end token that the model likes: the token that greedy text has in third place."""
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    end = reference.greedy(ids, 4, eos_token_id=None)[2]
    ending = make_llm(override_generation_config={"eos_token_id": [1, end]})

    (output,) = ending.beam_search(
        PROMPTS[:1],
        BeamSearchParams(4, max_tokens=12, length_penalty=length_penalty, include_stop_str_in_output=True),
    )

    expected = reference.generate(
        ids,
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=12,
        do_sample=False,
        length_penalty=length_penalty,
        eos_token_id=[1, end],
    )
    found = [beam.tokens[len(ids) :] for beam in output.sequences]
    assert found == [_without_padding(tokens, like) for tokens, like in zip(expected, found, strict=True)]
    ended = [beam.stop_reason for beam in output.sequences if beam.finish_reason == "stop"]
    assert ended == [tokens[-1] for tokens in found if tokens[-1] in (1, end)]
    assert ended or length_penalty > 0  # a penalty below 1 favours short answers


def test_sequences_carry_text_logprobs_and_their_sum(llm: LLM) -> None:
    (output,) = llm.beam_search(PROMPTS[:1], BeamSearchParams(2, max_tokens=5))

    for beam in output.sequences:
        new_tokens = beam.tokens[-5:]
        assert beam.cum_logprob == pytest.approx(
            sum(entry[token].logprob for entry, token in zip(beam.logprobs, new_tokens, strict=True))
        )
        assert beam.text == llm.get_tokenizer().decode(beam.tokens, skip_special_tokens=False)
    assert output.sequences[0].cum_logprob >= output.sequences[1].cum_logprob


def test_a_concurrency_limit_changes_nothing(llm: LLM) -> None:
    params = BeamSearchParams(3, max_tokens=6)

    together = llm.beam_search(PROMPTS, params)
    one_by_one = llm.beam_search(PROMPTS, params, concurrency_limit=1)

    assert [[beam.tokens for beam in output.sequences] for output in one_by_one] == [
        [beam.tokens for beam in output.sequences] for output in together
    ]


def test_a_beam_width_past_the_logprobs_limit_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="max_logprobs|logprobs"):
        llm.beam_search(PROMPTS, BeamSearchParams(11, max_tokens=3))

    assert not llm.llm_engine.has_unfinished_requests()


def _without_padding(tokens: list[int], like: list[int]) -> list[int]:
    """transformers pads shorter sequences with the end token."""
    return tokens[: len(like)] if set(tokens[len(like) :]) <= {1} else tokens


@pytest.mark.parametrize(
    ("prompts", "error", "reason"),
    [
        (["word " * 200_000], ValueError, "characters, which are .* tokens at least"),
        (["word " * 3000], ValueError, "max_model_len 512"),
        ([[5] * 512], ValueError, "max_model_len 512"),
        ([[]], ValueError, "empty"),
        ([[10**6]], ValueError, "token id 1000000"),
        ([None], TypeError, "a prompt is a str"),
        (5, TypeError, "prompts must be"),
        (["\ud800"], ValueError, "surrogate"),
    ],
)
def test_prompts_that_cannot_be_searched_are_refused_and_leave_nothing(
    llm: LLM, prompts: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        llm.beam_search(prompts, BeamSearchParams(2, max_tokens=3))
    with pytest.raises(TypeError, match="params must be a BeamSearchParams"):
        llm.beam_search(PROMPTS, SamplingParams())  # type: ignore[arg-type]

    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("limit", [0, -1, 1.5, "2", True])
def test_a_concurrency_limit_that_is_none_is_refused(llm: LLM, limit: Any) -> None:
    with pytest.raises(ValueError, match="^concurrency_limit must be None or an integer of at least 1, got "):
        llm.beam_search(PROMPTS, BeamSearchParams(2, max_tokens=3), concurrency_limit=limit)


def test_one_prompt_need_not_be_in_a_list(llm: LLM) -> None:
    params = BeamSearchParams(2, max_tokens=3)
    (listed,) = llm.beam_search(PROMPTS[:1], params)
    for prompt in (PROMPTS[0], llm.get_tokenizer().encode(PROMPTS[0])):
        (single,) = llm.beam_search(prompt, params)
        assert [beam.tokens for beam in single.sequences] == [beam.tokens for beam in listed.sequences]


def test_as_many_beams_as_sequences_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "4")
    assert BeamSearchParams(4, max_tokens=3).beam_width == 4
    with pytest.raises(ValueError, match=r"^beam_width must be an integer in \[1, 4\], got 5"):
        BeamSearchParams(5, max_tokens=3)


@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_core_that_goes_ends_the_search_with_its_error(
    make_llm: Any, monkeypatch: pytest.MonkeyPatch, multiprocess: bool
) -> None:
    llm = make_llm(multiprocess=multiprocess)
    step = llm.llm_engine.step

    def shut_down_first() -> Any:
        llm.shutdown()
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", shut_down_first)
    with pytest.raises(EngineDeadError):
        llm.beam_search(PROMPTS, BeamSearchParams(2, max_tokens=3))


def test_a_step_that_is_aborted_ends_the_search(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.llm_engine.step
    llm.llm_engine.engine_core.pause_scheduler("keep", False)  # so that no request is done before it is aborted

    def paused_first() -> Any:
        llm.pause_generation("abort")
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", paused_first)
    with pytest.raises(EngineGenerateError, match="a step of the beam search was aborted"):
        llm.beam_search(PROMPTS, BeamSearchParams(2, max_tokens=3))
    llm.resume_generation()
