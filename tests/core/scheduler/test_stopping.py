"""When a request ends, and what it says about it."""

from typing import Any

import numpy as np
import pytest
from scheduling import Harness, greedy

from corespan.core.scheduler.request import Request
from corespan.protocol.outputs import FinishReason
from corespan.protocol.params import SamplingParams
from corespan.protocol.repetition import RepetitionDetectionParams
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import ResolvedSampling, resolved

EOS = 9


def make_request(max_model_len: int = 100, output_token_ids: list[int] | None = None, **params: Any) -> Request:
    sampling = resolved(SamplingParams(temperature=0, **params), EOS)
    message = EngineCoreRequest("a", [1, 2, 3], sampling, output_token_ids=output_token_ids or [])
    request = Request.from_engine_core_request(message, None)
    request.limit_length(max_model_len)
    return request


def feed(request: Request, *token_ids: int) -> tuple[int, FinishReason | None, int | str | None]:
    """How many tokens it took, and how it ended."""
    for count, token_id in enumerate(token_ids, start=1):
        if request.append_output_token(token_id):
            return count, request.finish_reason, request.stop_reason
    return len(token_ids), None, None


def test_the_end_token_stops_without_a_stop_reason() -> None:
    assert feed(make_request(), 5, EOS, 6) == (2, FinishReason.STOP, None)


def test_ignore_eos_goes_on_but_a_stop_token_of_the_user_still_stops() -> None:
    assert feed(make_request(ignore_eos=True, max_tokens=3), EOS, EOS, EOS) == (3, FinishReason.LENGTH, None)
    request = make_request(ignore_eos=True, stop_token_ids=[EOS])
    assert feed(request, 5, EOS) == (2, FinishReason.STOP, EOS)


def test_a_stop_token_is_the_stop_reason_and_stays_in_the_output() -> None:
    request = make_request(stop_token_ids=[7, 8])
    assert feed(request, 5, 8) == (2, FinishReason.STOP, 8)
    assert request.output_token_ids == [5, 8]


def test_max_tokens_and_max_model_len_end_by_length() -> None:
    assert feed(make_request(max_tokens=2), 5, 5, 5) == (2, FinishReason.LENGTH, None)
    assert feed(make_request(max_tokens=None, max_model_len=7), *[5] * 9) == (4, FinishReason.LENGTH, None)


@pytest.mark.parametrize("last", [EOS, 8])
def test_an_end_token_on_the_last_allowed_position_counts_as_stop(last: int) -> None:
    assert feed(make_request(max_tokens=2, stop_token_ids=[8]), 5, last)[1] is FinishReason.STOP


def test_nothing_stops_before_min_tokens() -> None:
    request = make_request(max_tokens=6, min_tokens=3, stop_token_ids=[8])
    assert feed(request, EOS, 8, EOS) == (3, FinishReason.STOP, None)
    assert feed(make_request(max_tokens=4, min_tokens=4), EOS, EOS, EOS, 5) == (4, FinishReason.LENGTH, None)


REPEATED = (FinishReason.REPETITION, "repetition_detected")


@pytest.mark.parametrize(
    ("largest", "smallest", "count", "output", "taken"),
    [
        (1, 0, 3, [5, 6, 6, 5, 5, 5, 5], 6),
        (2, 1, 2, [5, 6, 5, 7, 5, 7, 8], 6),
        (3, 3, 2, [6, 6, 6, 6, 6, 6, 6], 6),
        (3, 2, 3, [4, 1, 5, 7, 1, 5, 7, 1, 5, 7, 1], 10),
        (50, 1, 2, [4, 1, 5, 7, 6, 1, 5, 7, 6, 1], 9),
    ],
)
def test_a_pattern_that_comes_often_enough_ends_the_request(
    largest: int, smallest: int, count: int, output: list[int], taken: int
) -> None:
    request = make_request(max_tokens=50, repetition_detection=RepetitionDetectionParams(largest, smallest, count))
    assert feed(request, *output) == (taken, *REPEATED)
    assert request.output_token_ids == output[:taken]


@pytest.mark.parametrize(
    ("detection", "output"),
    [
        (RepetitionDetectionParams(2, 1, 3), [6, 6, 5, 6, 5, 7, 6, 6]),
        (RepetitionDetectionParams(2, 2, 2), [6, 6, 6, 5, 6, 6, 5]),
        (RepetitionDetectionParams(3, 3, 2), [1, 2, 3, 3, 1, 2]),
        (RepetitionDetectionParams(2, 1, 4), [3, 3, 3]),
        (RepetitionDetectionParams(0, 0, 0), [6] * 30),
        (RepetitionDetectionParams(), [6] * 30),
        (None, [6] * 30),
    ],
)
def test_what_is_no_such_pattern_goes_on(detection: RepetitionDetectionParams | None, output: list[int]) -> None:
    request = make_request(max_tokens=50, repetition_detection=detection)
    assert feed(request, *output) == (len(output), None, None)


def test_the_prompt_is_no_part_of_a_repetition_and_what_an_earlier_core_sampled_is() -> None:
    detection = RepetitionDetectionParams(1, 1, 3)
    assert feed(make_request(repetition_detection=detection), 3, 3, 4) == (3, None, None)
    request = make_request(repetition_detection=detection, output_token_ids=[4, 4])
    assert feed(request, 4) == (1, *REPEATED)


def test_a_repetition_is_looked_for_last_and_never_before_min_tokens() -> None:
    detection = RepetitionDetectionParams(1, 1, 2)
    stopping = make_request(stop_token_ids=[8], min_tokens=2, repetition_detection=detection)
    assert feed(stopping, 8, 8) == (2, FinishReason.STOP, 8)
    assert feed(make_request(max_tokens=2, repetition_detection=detection), 5, 5)[1] is FinishReason.LENGTH
    assert feed(make_request(min_tokens=4, repetition_detection=detection), 5, 5, 5, 5) == (4, *REPEATED)


def test_tokens_of_an_earlier_core_count_toward_both_limits() -> None:
    assert feed(make_request(max_tokens=4, output_token_ids=[5, 5]), 5, 5, 5) == (2, FinishReason.LENGTH, None)
    assert feed(make_request(min_tokens=3, output_token_ids=[5, 5]), EOS) == (1, FinishReason.STOP, None)
    assert feed(make_request(min_tokens=4, output_token_ids=[5, 5]), EOS) == (1, None, None)


def test_prompt_embeddings_stand_in_for_token_ids() -> None:
    embeds = np.zeros((5, 2), dtype=np.float32)
    request = Request.from_engine_core_request(
        EngineCoreRequest("a", [], ResolvedSampling(), prompt_embeds=embeds), None
    )
    assert request.num_prompt_tokens == 5
    with pytest.raises(ValueError, match="2 token ids but embeddings for 5"):
        Request.from_engine_core_request(EngineCoreRequest("a", [1, 2], ResolvedSampling(), prompt_embeds=embeds), None)


def test_trace_headers_go_back_with_the_output_that_ends_a_request() -> None:
    h = Harness()
    headers = {"traceparent": "00-1"}
    h.add("traced", [1, 2, 3], greedy(3), trace_headers=headers)
    h.add("plain", [1, 2, 3], greedy(2))
    h.add("too_large", [1] * 400, greedy(200), trace_headers=headers, output_token_ids=[5] * 112)
    h.run()
    assert [output.trace_headers for output in h.outputs["traced"]] == [None, None, headers]
    assert [output.trace_headers for output in h.outputs["plain"]] == [None, None]
    assert [output.trace_headers for output in h.outputs["too_large"]] == [headers]
