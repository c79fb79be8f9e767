"""A prompt that comes in pieces: each piece is answered, and the session stays open between them."""

import pytest
from scheduling import Harness, check_blocks, expected_tokens, greedy, prompt

from corespan.core.kv_cache.groups import FullAttention, LayerKind, SlidingWindow
from corespan.core.scheduler.request import RequestStatus
from corespan.protocol.outputs import FinishReason


def add_piece(h: Harness, piece: list[int], max_tokens: int = 4, last: bool = False) -> None:
    h.add("s", piece, greedy(max_tokens), resumable=not last)


def expected_session(pieces: list[list[int]], max_tokens: int = 4) -> list[list[int]]:
    """The answer to each piece; the last token of an answer is not part of what follows."""
    context: list[int] = []
    answers = []
    for piece in pieces:
        context = context + piece
        answers.append(expected_tokens(context, count=max_tokens))
        context = context + answers[-1][:-1]
    return answers


def answers(h: Harness) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for output in h.outputs["s"]:
        found[-1].extend(output.new_token_ids)
        if output.finish_reason is not None:
            found.append([])
    return found[:-1]


@pytest.mark.parametrize("kv_groups", [(FullAttention(),), (SlidingWindow(5), FullAttention())])
@pytest.mark.parametrize("caching", [True, False])
def test_each_piece_is_answered_behind_all_that_came_before(caching: bool, kv_groups: tuple[LayerKind, ...]) -> None:
    h = Harness(enable_prefix_caching=caching, kv_groups=kv_groups)
    pieces = [prompt(20), prompt(7, 30), prompt(33, 11)]
    for piece in pieces:
        add_piece(h, piece)
        h.run()
        check_blocks(h.scheduler)
        assert h.scheduler.table.requests["s"].status is RequestStatus.WAITING_FOR_STREAMING_REQ
        assert h.scheduler.kv_cache_manager.usage == 0
    assert answers(h) == expected_session(pieces)
    add_piece(h, [0], last=True)
    assert not h.scheduler.table.requests
    h.run()


def test_pieces_that_come_early_wait_their_turn() -> None:
    h = Harness()
    pieces = [prompt(20), prompt(7, 30), prompt(33, 11)]
    for piece in pieces:
        add_piece(h, piece)
    add_piece(h, [0], last=True)
    h.run()
    assert answers(h) == expected_session(pieces)
    assert not h.scheduler.table.requests


def test_what_came_before_is_found_in_the_prefix_cache() -> None:
    h = Harness()
    add_piece(h, prompt(40))
    h.run()
    add_piece(h, prompt(10, 5))
    step = h.step()
    assert step.num_scheduled_tokens == {"s": 40 + 3 + 10 - 32}


def test_an_idle_session_keeps_the_engine_idle_and_can_be_aborted() -> None:
    h = Harness()
    add_piece(h, prompt(20))
    h.run()
    assert not h.scheduler.has_requests()
    assert h.scheduler.finish_requests(["s"]) == [("s", 0)]
    assert not h.scheduler.table.requests


def test_a_session_aborted_while_it_runs_takes_its_pieces_along() -> None:
    h = Harness()
    add_piece(h, prompt(20))
    h.step()
    add_piece(h, prompt(5))
    h.scheduler.finish_requests(["s"])
    h.run()
    assert len(answers(h)) == 0
    assert h.scheduler.kv_cache_manager.usage == 0


def test_a_session_that_outgrows_max_model_len_ends_by_length() -> None:
    h = Harness(max_model_len=64)
    for piece in (prompt(40), prompt(30, 7)):
        add_piece(h, piece)
    h.run()
    assert h.finish_reason("s") is FinishReason.LENGTH
    assert h.outputs["s"][-1].new_token_ids == []
    assert not h.scheduler.table.requests


def test_pieces_survive_preemption_of_their_session() -> None:
    h = Harness(num_blocks=12, block_size=4, enable_prefix_caching=False)
    h.add("other", prompt(9, 3), greedy(16))
    pieces = [prompt(9), prompt(5, 20)]
    for piece in pieces:
        add_piece(h, piece, max_tokens=14)
    h.run()
    assert h.num_preemptions() > 0
    assert answers(h) == expected_session(pieces, max_tokens=14)
    assert h.tokens("other") == expected_tokens(prompt(9, 3), count=16)
