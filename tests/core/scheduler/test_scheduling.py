"""Who is computed in a step, in what order, and who has to wait or give way."""

import pytest
from scheduling import Harness, check_blocks, expected_tokens, greedy, prompt

from corespan.core.scheduler.pause import PauseState
from corespan.protocol.outputs import EventType, FinishReason


def test_a_request_gets_its_tokens_and_leaves_nothing_behind() -> None:
    h = Harness()
    h.add("a", prompt(20))
    h.run()
    assert h.tokens("a") == expected_tokens(prompt(20))
    assert h.finish_reason("a") is FinishReason.LENGTH
    assert not h.scheduler.table.requests and not h.runner.batch
    assert h.scheduler.kv_cache_manager.usage == 0


def test_one_budget_serves_decodes_first_and_then_prompts_in_chunks() -> None:
    h = Harness(max_num_batched_tokens=16, max_num_seqs=8)
    h.add("a", prompt(10))
    h.step()
    h.add("b", prompt(40, 5))
    h.add("c", prompt(3, 9))
    assert [h.step().num_scheduled_tokens for _ in range(4)] == [
        {"a": 1, "b": 15},
        {"a": 1, "b": 15},
        {"a": 1, "b": 10, "c": 3},
        {"a": 1, "b": 1, "c": 1},
    ]
    h.run()
    assert h.tokens("b") == expected_tokens(prompt(40, 5))


def test_a_chunk_of_a_prompt_gives_no_output() -> None:
    h = Harness(max_num_batched_tokens=8, max_num_seqs=4)
    h.add("a", prompt(20))
    h.step()
    h.step()
    assert "a" not in h.outputs
    h.step()
    assert len(h.tokens("a")) == 1


def test_long_prefills_are_capped() -> None:
    h = Harness(long_prefill_token_threshold=6)
    h.add("a", prompt(15))
    h.add("b", prompt(4))
    assert h.step().num_scheduled_tokens == {"a": 6, "b": 4}
    assert h.step().num_scheduled_tokens == {"a": 6, "b": 1}
    assert h.step().num_scheduled_tokens == {"a": 3, "b": 1}


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_budget() -> None:
    h = Harness(max_num_batched_tokens=32, max_model_len=32, enable_chunked_prefill=False, max_num_seqs=8)
    h.add("a", prompt(20))
    h.add("b", prompt(20, 1))
    h.add("c", prompt(2, 2))
    assert h.step().num_scheduled_tokens == {"a": 20}
    assert h.step().num_scheduled_tokens == {"a": 1, "b": 20, "c": 2}


def test_no_more_than_max_num_seqs_run() -> None:
    h = Harness(max_num_seqs=2)
    for name in "abc":
        h.add(name, prompt(4), greedy(2))
    assert list(h.step().num_scheduled_tokens) == ["a", "b"]
    h.step()
    assert list(h.step().num_scheduled_tokens) == ["c"]


def test_fcfs_starts_requests_in_the_order_they_came() -> None:
    h = Harness(max_num_seqs=1)
    for index, name in enumerate("abcd"):
        h.add(name, prompt(4), greedy(1), priority=-index, arrival_time=-float(index))
    h.run()
    assert [list(step.num_scheduled_tokens) for step in h.steps[:4]] == [["a"], ["b"], ["c"], ["d"]]


def test_priority_starts_the_smallest_value_first_and_equals_in_order_of_arrival() -> None:
    h = Harness(max_num_seqs=1, policy="priority")
    for index, (name, priority) in enumerate([("a", 1), ("b", 0), ("c", 1), ("d", -2), ("e", 0)]):
        h.add(name, prompt(4), greedy(1), priority=priority, arrival_time=float(index))
    h.run()
    assert [list(step.num_scheduled_tokens)[0] for step in h.steps[:5]] == ["d", "b", "e", "a", "c"]


def test_a_block_filled_by_the_last_computed_token_is_cached() -> None:
    h = Harness()
    h.add("a", prompt(10), greedy(7))
    h.run()
    h.add("b", prompt(10) + h.tokens("a"), greedy(1))
    h.run()
    assert h.num_cached_tokens("b") == 16


def test_children_of_one_prompt_share_its_blocks_in_their_first_step() -> None:
    h = Harness()
    for index in range(4):
        h.add(f"c{index}", prompt(50), noise_seed=index)
    assert h.step().num_scheduled_tokens == {"c0": 50, "c1": 2, "c2": 2, "c3": 2}
    check_blocks(h.scheduler)
    h.run()
    for index in range(4):
        assert h.tokens(f"c{index}") == expected_tokens(prompt(50), noise_seed=index)
        assert h.num_cached_tokens(f"c{index}") == (48 if index else 0)


def test_only_computed_chunks_of_a_prompt_can_be_hit() -> None:
    h = Harness(max_num_batched_tokens=40, max_num_seqs=8)
    h.add("a", prompt(100), greedy(1))
    h.step()
    h.scheduler.finish_requests(["a"])
    h.add("b", prompt(100), greedy(3))
    h.run()
    assert h.num_cached_tokens("b") == 32
    assert h.tokens("b") == expected_tokens(prompt(100), count=3)


def test_a_different_salt_hits_nothing() -> None:
    h = Harness()
    for name, salt in (("a", None), ("b", "x"), ("c", "x"), ("d", "y")):
        h.add(name, prompt(40), greedy(1), cache_salt=salt)
        h.run()
    assert [h.num_cached_tokens(name) for name in "abcd"] == [0, 0, 32, 0]


def test_who_wants_prompt_logprobs_or_says_so_does_not_read_the_cache() -> None:
    h = Harness()
    for name, params in (
        ("a", greedy(1)),
        ("b", greedy(1, prompt_logprobs=1)),
        ("c", greedy(1, prompt_logprobs=0, skip_reading_prefix_cache=False)),
        ("d", greedy(1, skip_reading_prefix_cache=True)),
        ("e", greedy(1)),
    ):
        h.add(name, prompt(40), params)
        h.run()
    assert [h.num_cached_tokens(name) for name in "abcde"] == [0, 0, 0, 0, 32]


def test_events_and_prompt_figures_are_sent_once() -> None:
    h = Harness(num_blocks=9, block_size=4, enable_prefix_caching=False)
    for name in "ab":
        h.add(name, prompt(11), greedy(12))
    h.run()
    for name in "ab":
        assert sum(output.prefill_stats is not None for output in h.outputs[name]) == 1
    types = [event.type for output in h.outputs["b"] for event in output.events or ()]
    assert types == [EventType.QUEUED, EventType.SCHEDULED, EventType.PREEMPTED, EventType.SCHEDULED]
    times = [event.timestamp for output in h.outputs["b"] for event in output.events or ()]
    assert times == sorted(times)


def test_outputs_are_sorted_by_client_and_statistics_go_to_the_first() -> None:
    h = Harness()
    for name, client_index in (("a", 1), ("b", 0), ("c", 1)):
        h.add(name, prompt(20), client_index=client_index)
    step = h.schedule()
    frames = h.scheduler.update_from_output(step, h.runner.execute_model(step))
    assert {index: [o.request_id for o in frame.outputs] for index, frame in frames.items()} == {
        1: ["a", "c"],
        0: ["b"],
    }
    stats = [frames[0].scheduler_stats]
    assert stats[0] is not None and frames[1].scheduler_stats is None
    assert (stats[0].num_running_reqs, stats[0].num_waiting_reqs) == (3, 0)
    assert stats[0].kv_cache_usage == pytest.approx(4 / 99)  # one shared block, three of their own
    assert (stats[0].prefix_cache_stats.requests, stats[0].prefix_cache_stats.hits) == (3, 32)


def test_without_statistics_a_step_without_outputs_says_nothing() -> None:
    h = Harness(log_stats=False, max_num_batched_tokens=64)
    h.add("a", prompt(100))
    step = h.schedule()
    assert h.scheduler.update_from_output(step, h.runner.execute_model(step)) == {}


def test_paused_new_finishes_what_has_begun_and_begins_nothing() -> None:
    h = Harness(num_blocks=9, block_size=4, enable_prefix_caching=False)
    for name in "ab":
        h.add(name, prompt(11), greedy(12))
    while not h.scheduler.table.preempted:
        h.step()
    h.add("c", prompt(4))
    h.scheduler.pause_state = PauseState.PAUSED_NEW
    assert h.scheduler.get_num_unfinished_requests() == 2
    h.run()
    assert h.finish_reason("a") is h.finish_reason("b") is FinishReason.LENGTH
    assert h.finish_reason("c") is None
    assert h.scheduler.get_request_counts() == (0, 1)
    h.scheduler.pause_state = PauseState.UNPAUSED
    h.run()
    assert h.tokens("c") == expected_tokens(prompt(4))


def test_paused_all_freezes_everything() -> None:
    h = Harness()
    h.add("a", prompt(20))
    h.step()
    h.scheduler.pause_state = PauseState.PAUSED_ALL
    h.add("b", prompt(4))
    assert h.scheduler.get_num_unfinished_requests() == 0 and not h.scheduler.has_requests()
    assert not h.step().num_scheduled_tokens
    h.scheduler.pause_state = PauseState.UNPAUSED
    h.run()
    assert h.tokens("a") == expected_tokens(prompt(20))
    assert h.tokens("b") == expected_tokens(prompt(4))


def test_a_token_of_which_there_is_nothing_else_to_say_goes_into_the_columns_of_its_client() -> None:
    h = Harness()
    h.add("a", prompt(20), greedy(4), handle=7)
    h.add("b", prompt(20, 3), greedy(4), handle=7, client_index=1)
    h.add("rich", prompt(20, 5), greedy(4, logprobs=0), handle=8)
    h.add("numberless", prompt(20, 9), greedy(4), handle=0)
    columns: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    rich: list[list[str]] = []
    for _ in range(4):
        planned = h.schedule()
        frames = h.scheduler.update_from_output(planned, h.runner.execute_model(planned))
        rich.append([output.request_id for index in frames for output in frames[index].outputs])
        for index, frame in frames.items():
            columns[index] += zip(frame.handles, frame.token_ids, strict=True)
    assert columns[0] == [(7, token_id) for token_id in expected_tokens(prompt(20))[1:3]]
    assert columns[1] == [(7, token_id) for token_id in expected_tokens(prompt(20, 3))[1:3]]
    everyone = ["a", "rich", "numberless", "b"]
    assert rich == [everyone, ["rich", "numberless"], ["rich", "numberless"], everyone]
