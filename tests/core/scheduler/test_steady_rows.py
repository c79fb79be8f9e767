"""Requests in steady decode are planned and taken in as arrays, and nobody sees a difference."""

import pytest
from scheduling import Harness, expected_tokens, greedy

from corespan.core.scheduler.steady_rows import MAX_END_TOKENS
from corespan.protocol.outputs import FinishReason


def prompt(length: int, step: int = 1) -> list[int]:
    return [(step * i) % 50 for i in range(length)]


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_tokens_and_progress_are_up_to_date_whenever_they_are_read(block_size: int) -> None:
    h = Harness(block_size=block_size)
    request = h.add("a", prompt(5), greedy(14))
    every_step = expected_tokens(prompt(5), count=14)
    for count in range(1, 14):
        h.step()
        if count % 5 == 0:  # not at every step: some of the time they are left behind
            assert request.output_token_ids == every_step[:count]
            assert request.num_computed_tokens == request.num_tokens - 1
    h.run()
    assert h.tokens("a") == every_step


def test_an_undisturbed_step_looks_at_no_request_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(block_size=16)
    for name, length in (("a", 3), ("b", 5)):
        h.add(name, prompt(length), greedy(9))
    for _ in range(2):
        h.step()
    for method in ("append_output_token", "_settle"):
        monkeypatch.setattr(f"corespan.core.scheduler.request.Request.{method}", None)
    for _ in range(4):
        h.step()
    monkeypatch.undo()
    h.run()
    assert h.tokens("a") == expected_tokens(prompt(3), count=9)


@pytest.mark.parametrize("num_others", [0, MAX_END_TOKENS])
@pytest.mark.parametrize("min_tokens", [0, 12])
def test_an_end_token_ends_a_request_wherever_it_comes(num_others: int, min_tokens: int) -> None:
    tokens = expected_tokens(prompt(6), count=20)
    others = [token for token in range(100, 200) if token not in tokens][:num_others]
    for stop in sorted(set(tokens)):
        h = Harness(block_size=4)
        h.add("a", prompt(6), greedy(20, stop_token_ids=[stop, *others], min_tokens=min_tokens))
        h.run()
        ends = [place for place, token in enumerate(tokens, start=1) if token == stop and place >= min_tokens]
        assert h.tokens("a") == tokens[: ends[0] if ends else 20]
        assert h.finish_reason("a") is (FinishReason.STOP if ends else FinishReason.LENGTH)


def test_a_budget_too_small_for_all_goes_to_those_that_started_first() -> None:
    h = Harness(max_num_batched_tokens=12, max_num_seqs=12)
    for number in range(4):
        h.add(str(number), prompt(3, number), greedy(9))
    h.step()
    h.step()
    h.scheduler._max_num_batched_tokens = 3
    assert h.step().num_scheduled_tokens == {"0": 1, "1": 1, "2": 1}
    h.scheduler._max_num_batched_tokens = 12
    h.run()
    assert [h.tokens(str(n)) for n in range(4)] == [expected_tokens(prompt(3, n), count=9) for n in range(4)]


def test_a_request_preempted_in_the_step_that_passed_it_gives_its_token_back() -> None:
    h = Harness(block_size=4, num_blocks=6, policy="priority")
    h.add("low", prompt(5), greedy(12), priority=1)
    h.add("high", prompt(6, 3), greedy(12))
    while not h.num_preemptions() and h.scheduler.has_requests():
        step = h.step()
        if h.scheduler.table.preempted:
            assert step.num_scheduled_tokens == {"high": 1}
            break
    else:
        raise AssertionError("nobody was preempted")
    h.run()
    assert h.tokens("low") == expected_tokens(prompt(5), count=12)
    assert h.tokens("high") == expected_tokens(prompt(6, 3), count=12)


def test_columns_are_each_clients_own() -> None:
    h = Harness()
    for client in (0, 1):
        for number in range(3):
            h.add(f"{number}", prompt(4, 2 * number + client), greedy(6), client_index=client, handle=number + 1)
    h.step()
    for _ in range(3):
        planned = h.schedule()
        frames = h.scheduler.update_from_output(planned, h.runner.execute_model(planned))
        assert {client: frame.handles for client, frame in frames.items()} == {0: [1, 2, 3], 1: [1, 2, 3]}
