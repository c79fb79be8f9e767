"""Who is computed in a step, in what order, and who has to wait or give way."""

import pytest
from scheduling import Harness, check_blocks, expected_tokens, greedy

from corespan.core.scheduler.pause import PauseState
from corespan.core.scheduler.request import RequestStatus
from corespan.core.scheduler.step_plan import StepPlan
from corespan.protocol.outputs import EventType, FinishReason


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 50 for i in range(length)]


def test_a_request_gets_its_tokens_and_leaves_nothing_behind() -> None:
    h = Harness()
    h.add("a", prompt(20))
    h.run()
    assert h.tokens("a") == expected_tokens(prompt(20))
    assert h.finish_reason("a") is FinishReason.LENGTH
    assert not h.scheduler.requests and not h.runner.batch
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


def test_fcfs_preempts_the_last_and_it_comes_back_before_new_ones() -> None:
    h = Harness(num_blocks=9, block_size=4, enable_prefix_caching=False)
    for name in "ab":
        h.add(name, prompt(11), greedy(12))
    while not h.scheduler.preempted:
        h.step()
    assert [request.request_id for request in h.scheduler.preempted] == ["b"]
    assert h.scheduler.requests["b"].status is RequestStatus.PREEMPTED
    h.add("c", prompt(2), greedy(2))
    h.run()
    first_seen = {name: next(i for i, s in enumerate(h.steps) if name in s.num_scheduled_tokens) for name in "abc"}
    back = next(i for i, s in enumerate(h.steps) if "b" in s.removed_req_ids)
    resumed = next(i for i, s in enumerate(h.steps) if i > back and any(n.req_id == "b" for n in s.scheduled_new_reqs))
    assert resumed <= first_seen["c"]
    for name in "ab":
        assert h.tokens(name) == expected_tokens(prompt(11), count=12)


def test_priority_preempts_the_least_important_even_if_it_is_planned_already() -> None:
    h = Harness(num_blocks=9, block_size=4, policy="priority", max_num_seqs=2, enable_prefix_caching=False)
    h.add("low", prompt(10), greedy(12), priority=5)
    h.step()
    h.add("high", prompt(12), greedy(12), priority=1)
    h.add("new", prompt(2), greedy(1), priority=3)
    while not h.scheduler.preempted:
        step = h.step()
        check_blocks(h.scheduler)
    assert [request.request_id for request in h.scheduler.preempted] == ["low"]
    assert step.num_scheduled_tokens == {"high": 1}
    assert step.removed_req_ids == {"low"} and not step.scheduled_new_reqs
    h.run()
    assert h.tokens("low") == expected_tokens(prompt(10), count=12)
    assert h.tokens("high") == expected_tokens(prompt(12), count=12)


def test_what_a_preempted_request_was_planned_to_compute_is_not_found_in_the_cache() -> None:
    h = Harness(num_blocks=14, block_size=4, policy="priority", long_prefill_token_threshold=4)
    h.add("low", prompt(38), greedy(4), priority=5)
    h.step()
    h.add("high", prompt(8, 13), greedy(7), priority=1)
    while not h.scheduler.preempted:
        h.step()
    assert h.runner.num_computed["low"] == 28
    while not any(new.req_id == "low" for new in h.step().scheduled_new_reqs):
        pass
    assert h.steps[-1].scheduled_new_reqs[0].num_computed_tokens == 28
    h.run()
    assert h.tokens("low") == expected_tokens(prompt(38), count=4)
    assert h.tokens("high") == expected_tokens(prompt(8, 13), count=7)


def test_a_preempted_request_finds_what_it_had_computed() -> None:
    h = Harness()
    h.add("a", prompt(40), greedy(12))
    for _ in range(10):
        h.step()
    h.scheduler._preempt(h.scheduler.running[0])
    (new,) = h.step().scheduled_new_reqs
    assert (len(new.token_ids), new.num_computed_tokens) == (50, 48)
    h.run()
    assert h.tokens("a") == expected_tokens(prompt(40), count=12)


def test_a_block_filled_by_the_last_computed_token_is_cached() -> None:
    h = Harness()
    h.add("a", prompt(10), greedy(7))
    h.run()
    h.add("b", prompt(10) + h.tokens("a"), greedy(1))
    h.run()
    assert h.num_cached_tokens("b") == 16


def test_a_request_taken_out_of_a_plan_gives_its_tokens_back() -> None:
    h = Harness()
    request = h.request("a", prompt(4))
    plan = StepPlan(budget=10)
    plan.running.append(request)
    plan.num_tokens["a"], plan.new_blocks["a"] = 4, [1]
    plan.budget -= 4
    plan.drop(request)
    plan.drop(request)
    assert (plan.budget, plan.requests(), plan.num_tokens, plan.new_blocks) == (10, [], {}, {})


def test_a_newcomer_leaves_a_block_for_everyone_who_runs() -> None:
    h = Harness(num_blocks=6, block_size=4)
    h.add("a", prompt(7), greedy(6))
    h.step()
    h.add("b", prompt(11, 7), greedy(1))
    assert list(h.step().num_scheduled_tokens) == ["a"]  # three blocks are free and "b" needs just three
    h.run()
    assert h.num_preemptions() == 0
    assert h.tokens("b") == expected_tokens(prompt(11, 7), count=1)


def test_a_prompt_in_chunks_holds_its_blocks_from_the_start() -> None:
    h = Harness(num_blocks=11, block_size=4, max_num_batched_tokens=8, max_num_seqs=4)
    h.add("long", prompt(30), greedy(4))
    h.step()
    assert h.scheduler.kv_cache_manager.num_free_blocks == 2
    h.add("short", prompt(9, 3), greedy(4))
    h.run()
    assert h.num_preemptions() == 0
    assert h.tokens("long") == expected_tokens(prompt(30), count=4)


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


def test_abort_frees_blocks_at_once_and_ignores_unknown_ids() -> None:
    h = Harness()
    h.add("a", prompt(40), client_index=2)
    h.add("b", prompt(40, 3))
    h.step()
    used = h.scheduler.kv_cache_manager.num_free_blocks
    assert h.scheduler.finish_requests(["a", "ghost"]) == [("a", 2)]
    assert h.scheduler.kv_cache_manager.num_free_blocks == used + 3
    assert h.scheduler.finish_requests(["a"]) == []
    assert h.scheduler.finish_requests(None) == [("b", 0)]
    assert h.scheduler.has_requests()  # the runner has still to be told
    assert h.step().removed_req_ids == {"a", "b"}
    assert not h.scheduler.has_requests() and not h.runner.batch
    assert h.finish_reason("a") is None


def test_an_aborted_request_that_never_ran_is_not_mentioned_to_the_runner() -> None:
    h = Harness()
    h.add("a", prompt(4))
    h.scheduler.finish_requests(["a"])
    assert not h.scheduler.has_requests()


def test_an_id_may_be_used_again_right_after_an_abort() -> None:
    h = Harness()
    h.add("a", prompt(20))
    h.step()
    h.scheduler.finish_requests(["a"])
    h.outputs.clear()
    h.add("a", prompt(30, 7))
    h.run()
    assert h.tokens("a") == expected_tokens(prompt(30, 7))


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    h = Harness()
    h.add("a", prompt(20))
    with pytest.raises(ValueError, match="'a' is in use"):
        h.add("a", prompt(30, 7))
    h.run()
    assert h.tokens("a") == expected_tokens(prompt(20))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Harness().add("a", [])


def test_a_restarted_request_goes_on_behind_its_tokens() -> None:
    whole = expected_tokens(prompt(20), noise_seed=4, count=12)
    h = Harness()
    h.add("a", prompt(20), greedy(12), noise_seed=4, output_token_ids=whole[:5])
    h.run()
    assert h.tokens("a") == whole[5:]
    assert h.finish_reason("a") is FinishReason.LENGTH


def test_a_restarted_request_that_had_all_its_tokens_just_ends() -> None:
    h = Harness()
    h.add("a", prompt(20), greedy(5), output_token_ids=[1, 2, 3, 4, 5])
    h.run()
    assert h.tokens("a") == []
    assert h.finish_reason("a") is FinishReason.LENGTH
    assert h.steps[0].total_num_scheduled_tokens == 0


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


def test_outputs_are_sorted_by_client_and_statistics_go_to_one_of_them() -> None:
    h = Harness()
    for name, client_index in (("a", 1), ("b", 0), ("c", 1)):
        h.add(name, prompt(20), client_index=client_index)
    step = h.scheduler.schedule()
    frames = h.scheduler.update_from_output(step, h.runner.execute_model(step))
    assert {index: [o.request_id for o in frame.outputs] for index, frame in frames.items()} == {
        1: ["a", "c"],
        0: ["b"],
    }
    stats = [frame.scheduler_stats for frame in frames.values() if frame.scheduler_stats is not None]
    assert len(stats) == 1
    assert (stats[0].num_running_reqs, stats[0].num_waiting_reqs) == (3, 0)
    assert stats[0].kv_cache_usage == pytest.approx(4 / 99)  # one shared block, three of their own
    assert (stats[0].prefix_cache_stats.requests, stats[0].prefix_cache_stats.hits) == (3, 32)


def test_without_statistics_a_step_without_outputs_says_nothing() -> None:
    h = Harness(log_stats=False, max_num_batched_tokens=64)
    h.add("a", prompt(100))
    step = h.scheduler.schedule()
    assert h.scheduler.update_from_output(step, h.runner.execute_model(step)) == {}


def test_paused_new_finishes_what_has_begun_and_begins_nothing() -> None:
    h = Harness(num_blocks=9, block_size=4, enable_prefix_caching=False)
    for name in "ab":
        h.add(name, prompt(11), greedy(12))
    while not h.scheduler.preempted:
        h.step()
    h.add("c", prompt(4))
    h.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert h.scheduler.get_num_unfinished_requests() == 2
    h.run()
    assert h.finish_reason("a") is h.finish_reason("b") is FinishReason.LENGTH
    assert h.finish_reason("c") is None
    assert h.scheduler.get_request_counts() == (0, 1)
    h.scheduler.set_pause_state(PauseState.UNPAUSED)
    h.run()
    assert h.tokens("c") == expected_tokens(prompt(4))


def test_paused_all_freezes_everything() -> None:
    h = Harness()
    h.add("a", prompt(20))
    h.step()
    h.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    h.add("b", prompt(4))
    assert h.scheduler.get_num_unfinished_requests() == 0 and not h.scheduler.has_requests()
    assert h.step().total_num_scheduled_tokens == 0
    h.scheduler.set_pause_state(PauseState.UNPAUSED)
    h.run()
    assert h.tokens("a") == expected_tokens(prompt(20))
    assert h.tokens("b") == expected_tokens(prompt(4))


def test_resetting_the_cache_with_running_requests_makes_them_compute_everything_again() -> None:
    h = Harness()
    for index, name in enumerate("abc"):
        h.add(name, prompt(20, index), greedy(10))
    h.step()
    h.step()
    assert not h.scheduler.reset_prefix_cache()
    assert h.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert h.scheduler.kv_cache_manager.usage == 0
    h.runner.stored.clear()
    step = h.step()
    assert [(new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs] == [("a", 0), ("b", 0), ("c", 0)]
    h.run()
    for index, name in enumerate("abc"):
        assert h.tokens(name) == expected_tokens(prompt(20, index), count=10)


def test_a_failing_request_ends_alone() -> None:
    h = Harness()
    h.add("bad", prompt(20))
    h.add("good", prompt(20, 3))
    h.runner.fail_next.add("bad")
    h.run()
    assert h.finish_reason("bad") is FinishReason.ERROR
    assert h.outputs["bad"][-1].stop_reason == "made to fail"
    assert h.tokens("bad") == []
    assert h.tokens("good") == expected_tokens(prompt(20, 3))


def test_whoever_shared_blocks_with_a_failing_request_computes_them_anew() -> None:
    h = Harness()
    h.add("bad", prompt(40))
    for index in range(3):
        h.add(f"c{index}", prompt(60), noise_seed=index)  # c1 and c2 also share a block that c0 fills from junk
    h.runner.fail_next.add("bad")
    h.step()
    assert all(h.tokens(f"c{index}") == [] for index in range(3))
    check_blocks(h.scheduler)
    h.run()
    assert h.finish_reason("bad") is FinishReason.ERROR
    for index in range(3):
        assert h.tokens(f"c{index}") == expected_tokens(prompt(60), noise_seed=index)


def test_an_abort_between_a_failure_and_those_who_share_leaves_no_junk_in_the_cache() -> None:
    h = Harness()
    h.add("bad", prompt(60))
    h.add("aborted", prompt(70))
    h.runner.fail_next.add("bad")
    step = h.scheduler.schedule()
    output = h.runner.execute_model(step)
    h.scheduler.finish_requests(["bad", "aborted"])
    h.take(step, output)
    for name, num_cached in (("first", 0), ("second", 64)):
        h.add(name, prompt(70))
        h.run()
        assert h.num_cached_tokens(name) == num_cached
        assert h.tokens(name) == expected_tokens(prompt(70))
