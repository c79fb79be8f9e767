"""Drafts by n-gram lookup: what is proposed, what is kept, and how often it is tried."""

import numpy as np
import pytest

from corespan.core.scheduler.request import Request
from corespan.core.speculation.ngram import NgramProposer
from corespan.core.speculation.verification import kept_lines, lines_ahead
from corespan.engine.speculation import parse_speculative_config
from corespan.protocol.config import SpeculativeConfig
from corespan.protocol.errors import VLLMValidationError
from corespan.protocol.params import SamplingParams
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import resolved
from corespan.protocol.structured_outputs import StructuredOutputsParams

CONFIG = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)


def request_of(token_ids: list[int], **params: object) -> Request:
    message = EngineCoreRequest("a", token_ids, resolved(SamplingParams(**{"max_tokens": 100, **params})))
    request = Request.from_engine_core_request(message, None)
    request.limit_length(512)
    return request


def test_what_followed_the_longest_and_latest_match_is_proposed() -> None:
    proposer = NgramProposer(CONFIG)
    assert list(proposer.propose(request_of([1, 2, 3, 4, 5, 1, 2]), 10)) == [3, 4, 5, 1]
    assert list(proposer.propose(request_of([1, 2, 7, 1, 2, 8, 9, 1, 2]), 2)) == [8, 9]
    assert list(proposer.propose(request_of([5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2]), 1)) == [7]
    assert list(proposer.propose(request_of([1, 2, 3, 4]), 10)) == []
    assert list(proposer.propose(request_of([1]), 10)) == []


def test_the_index_grows_with_the_request() -> None:
    proposer, request = NgramProposer(CONFIG), request_of([1, 2, 3])
    assert list(proposer.propose(request, 4)) == []
    for token_id in (9, 1, 2):
        request.append_output_token(token_id)
    assert list(proposer.propose(request, 4)) == [3, 9, 1, 2]


def test_nothing_is_drafted_beyond_the_last_token() -> None:
    request = request_of([1, 2, 3, 4, 1, 2], max_tokens=3)
    assert list(NgramProposer(CONFIG).propose(request, 10)) == [3, 4]
    assert list(NgramProposer(CONFIG).propose(request_of([1, 2, 3, 4, 1, 2], max_tokens=1), 10)) == []


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 1},
        {"min_tokens": 2},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"structured_outputs": StructuredOutputsParams(regex="a*")},
    ],
)
def test_requests_whose_draws_depend_on_more_than_the_logits_draft_nothing(params: dict[str, object]) -> None:
    assert list(NgramProposer(CONFIG).propose(request_of([1, 2, 3, 1, 2], **params), 10)) == []


def test_drafts_that_do_not_hold_become_seldom_and_short() -> None:
    proposer, request = NgramProposer(CONFIG), request_of([1, 2, 3, 4, 5, 6, 1, 2])
    lengths = []
    for _ in range(40):
        draft = proposer.propose(request, 10)
        lengths.append(len(draft))
        if draft:
            proposer.record(request, len(draft), 0)
    assert lengths[0] == 4 and sum(map(bool, lengths)) <= 6 and lengths[1] == 0
    proposer.record(request, 1, 1)
    stats = proposer.take_stats()
    assert stats is not None and stats.num_accepted_tokens_per_pos == [1, 0, 0, 0]
    assert proposer.take_stats() is None


def test_after_a_draft_that_did_not_hold_guesses_must_come_true_in_a_row() -> None:
    copied = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    proposer, request = NgramProposer(CONFIG), request_of([1, 2, *copied, 1, 2])
    draft = proposer.propose(request, 10)
    proposer.record(request, len(draft), 0)
    lengths = []
    for token_id in copied[:3]:
        lengths.append(len(proposer.propose(request, 10)))
        request.append_output_token(token_id)
    assert lengths[0] == 0 and all(lengths[1:])  # one hit is enough after one failure
    proposer.record(request, lengths[-1], 0)
    silent = 0
    for token_id in copied[3:]:
        if proposer.propose(request, 10):
            break
        silent += 1
        request.append_output_token(token_id)
    assert silent == 2  # then it takes three, of which one was the look-up's that failed


def test_lines_are_kept_while_draft_and_draw_agree() -> None:
    rows = np.array([0, 3, 3, 3, 1, 2, 2])
    ahead = lines_ahead(rows)
    assert ahead.tolist() == [0, 0, 1, 2, 0, 0, 1]
    drafts = {3: [7, 8], 2: [5]}
    assert kept_lines(rows, ahead, np.array([1, 7, 9, 3, 4, 5, 6]), drafts).tolist() == [0, 1, 2, 4, 5, 6]
    assert kept_lines(rows, ahead, np.array([1, 0, 8, 3, 4, 0, 6]), drafts).tolist() == [0, 1, 4, 5]


def test_the_options_entries_are_checked_by_name() -> None:
    assert parse_speculative_config(None) is None
    config = parse_speculative_config({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4})
    assert config == SpeculativeConfig(num_speculative_tokens=2, prompt_lookup_min=4, prompt_lookup_max=4)
    for given, name in (
        ({"method": "eagle"}, "speculative_config.method"),
        ({"num_speculative_tokens": 0}, "speculative_config.num_speculative_tokens"),
        ({"num_speculative_tokens": 99}, "speculative_config.num_speculative_tokens"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "speculative_config.prompt_lookup_min"),
        ({"model": "x"}, "speculative_config"),
    ):
        with pytest.raises(VLLMValidationError, match=name):
            parse_speculative_config(given)
