"""Text that comes in pieces over the three clients: the pieces join to the whole, and stop where the whole would."""

from typing import Any

import pytest

from corespan import RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams

DELTA = RequestOutputKind.DELTA
PROMPT = "Once upon a time"
AWKWARD = "é 日本 👩‍👧 e\u0301!"


def streamed(runner: Any, params: SamplingParams, kind: RequestOutputKind) -> tuple[str, list[int], RequestOutput]:
    """(text, token ids, last output) as a reader of that kind of output has them in the end."""
    params = params.clone()
    params.output_kind = kind
    outputs = runner.stream(PROMPT, params)
    answers = [output.outputs[0] for output in outputs]
    if kind is not DELTA:
        return answers[-1].text, list(answers[-1].token_ids), outputs[-1]
    return "".join(answer.text for answer in answers), [t for answer in answers for t in answer.token_ids], outputs[-1]


def check_all_kinds(runner: Any, params: SamplingParams, text: str, reason: str | None) -> None:
    results = [streamed(runner, params, kind) for kind in RequestOutputKind]
    assert [result[0] for result in results] == [text] * 3
    assert results[0][1] == results[1][1] == results[2][1]
    assert [result[2].outputs[0].stop_reason for result in results] == [reason] * 3


@pytest.mark.parametrize("seed", range(4))
def test_random_text_is_the_same_in_pieces_and_whole(runner: Any, seed: int) -> None:
    """Of a random model it holds bytes that are no text, halves of characters and special tokens."""
    fields: dict[str, Any] = {"seed": seed, "temperature": 1.5, "max_tokens": 40, "ignore_eos": True}
    fields["skip_special_tokens"] = seed % 2 == 0
    (whole,) = runner.generate(PROMPT, SamplingParams(**fields))
    text = whole.outputs[0].text
    check_all_kinds(runner, SamplingParams(**fields), text, None)
    for start in (0, len(text) // 2, len(text) - 3):
        stop = text[start : start + 3]
        include = start > 0
        end = text.index(stop) + (len(stop) if include else 0)
        params = SamplingParams(**fields, stop=[stop, "never comes"], include_stop_str_in_output=include)
        check_all_kinds(runner, params, text[:end], stop)


def test_a_stop_string_is_found_wherever_characters_and_tokens_are_split(runner: Any) -> None:
    forced = StructuredOutputsParams(choice=[AWKWARD])
    unstopped = SamplingParams(seed=1, max_tokens=60, structured_outputs=forced, output_kind=DELTA)
    pieces = [output.outputs[0].text for output in runner.stream(PROMPT, unstopped)]
    assert "".join(pieces) == AWKWARD and not any("\ufffd" in piece for piece in pieces)
    for start in range(len(AWKWARD) - 1):
        stop = AWKWARD[start : start + 2]
        params = SamplingParams(seed=1, max_tokens=60, stop=[stop], structured_outputs=forced)
        text, _, last = streamed(runner, params, DELTA)
        assert text == AWKWARD[: AWKWARD.index(stop)]
        assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", stop)
    assert runner.is_idle()


def test_a_stop_string_that_ends_before_min_tokens_is_passed_over(runner: Any) -> None:
    forced = StructuredOutputsParams(choice=["ab" * 10])
    fields: dict[str, Any] = {"seed": 1, "max_tokens": 60, "structured_outputs": forced}
    (whole,) = runner.generate(PROMPT, SamplingParams(**fields, logprobs=0))
    pieces = [entry[token].decoded_token for entry, token in zip(*_of(whole), strict=True)]
    for min_tokens in range(1, 6):
        before = len("".join(pieces[:min_tokens]))
        begin = ("ab" * 10).index("ba", before - 1)  # it may begin before, not end there
        check_all_kinds(runner, SamplingParams(**fields, stop=["ba"], min_tokens=min_tokens), ("ab" * 10)[:begin], "ba")


def _of(output: RequestOutput) -> tuple[Any, list[int]]:
    return output.outputs[0].logprobs, list(output.outputs[0].token_ids)


def test_a_stream_interval_changes_the_pieces_and_not_the_text(make_runner: Any, runner: Any) -> None:
    coarse = make_runner(stream_interval=4)
    params = SamplingParams(seed=7, temperature=1.5, max_tokens=30, ignore_eos=True)
    (whole,) = runner.generate(PROMPT, params)

    check_all_kinds(coarse, params, whole.outputs[0].text, None)

    params.output_kind = DELTA
    sizes = [len(output.outputs[0].token_ids) for output in coarse.stream(PROMPT, params)]
    assert sum(sizes) == 30 and sizes[0] == 1 and min(sizes[1:-1]) >= 4
