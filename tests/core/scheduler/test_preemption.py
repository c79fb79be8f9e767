"""Who gives its blocks back when they run out, what it finds when it returns, and what keeps it from coming to that."""

from scheduling import Harness, check_blocks, expected_tokens, greedy, prompt

from corespan.core.scheduler.request import RequestStatus
from corespan.core.scheduler.step_plan import StepPlan


def test_fcfs_preempts_the_last_and_it_comes_back_before_new_ones() -> None:
    h = Harness(num_blocks=9, block_size=4, enable_prefix_caching=False)
    for name in "ab":
        h.add(name, prompt(11), greedy(12))
    while not h.scheduler.table.preempted:
        h.step()
    assert [request.request_id for request in h.scheduler.table.preempted] == ["b"]
    assert h.scheduler.table.requests["b"].status is RequestStatus.PREEMPTED
    h.add("c", prompt(2), greedy(2))
    h.run()
    first_seen = {name: next(i for i, s in enumerate(h.steps) if name in s.num_scheduled_tokens) for name in "abc"}
    back = next(i for i, s in enumerate(h.steps) if "b" in s.removed)
    resumed = next(i for i, s in enumerate(h.steps) if i > back and "b" in s.entered)
    assert resumed <= first_seen["c"]
    for name in "ab":
        assert h.tokens(name) == expected_tokens(prompt(11), count=12)


def test_priority_preempts_the_least_important_even_if_it_is_planned_already() -> None:
    h = Harness(num_blocks=9, block_size=4, policy="priority", max_num_seqs=2, enable_prefix_caching=False)
    h.add("low", prompt(10), greedy(12), priority=5)
    h.step()
    h.add("high", prompt(12), greedy(12), priority=1)
    h.add("new", prompt(2), greedy(1), priority=3)
    while not h.scheduler.table.preempted:
        step = h.step()
        check_blocks(h.scheduler)
    assert [request.request_id for request in h.scheduler.table.preempted] == ["low"]
    assert step.num_scheduled_tokens == {"high": 1}
    assert step.removed == {"low"} and not step.entered
    h.run()
    assert h.tokens("low") == expected_tokens(prompt(10), count=12)
    assert h.tokens("high") == expected_tokens(prompt(12), count=12)


def test_what_a_preempted_request_was_planned_to_compute_is_not_found_in_the_cache() -> None:
    h = Harness(num_blocks=14, block_size=4, policy="priority", long_prefill_token_threshold=4)
    h.add("low", prompt(38), greedy(4), priority=5)
    h.step()
    h.add("high", prompt(8, 13), greedy(7), priority=1)
    while not h.scheduler.table.preempted:
        h.step()
    assert h.num_computed["low"] == 28
    while "low" not in (entered := h.step().entered):
        pass
    assert entered["low"].num_computed_tokens == 28
    h.run()
    assert h.tokens("low") == expected_tokens(prompt(38), count=4)
    assert h.tokens("high") == expected_tokens(prompt(8, 13), count=7)


def test_a_preempted_request_finds_what_it_had_computed() -> None:
    h = Harness()
    h.add("a", prompt(40), greedy(12))
    for _ in range(10):
        h.step()
    h.scheduler._preempt(h.scheduler.table.requests["a"])
    (new,) = h.step().entered.values()
    assert (len(new.token_ids), new.num_computed_tokens) == (50, 48)
    h.run()
    assert h.tokens("a") == expected_tokens(prompt(40), count=12)


def test_a_request_taken_out_of_a_plan_gives_its_tokens_back() -> None:
    h = Harness()
    request = h.request("a", prompt(4))
    plan = StepPlan(budget=10, max_num_seqs=1)
    plan.add(request, 4)
    plan.new_blocks[request.row] = [1]
    assert (plan.budget, request.num_computed_tokens, plan.num_tokens.tolist()) == (6, 4, [4])
    plan.drop(request)
    plan.drop(request)
    assert (plan.budget, request.num_computed_tokens, plan.num_tokens.tolist(), plan.new_blocks) == (10, 0, [0], {})


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
    assert [(name, new.num_computed_tokens) for name, new in step.entered.items()] == [("a", 0), ("b", 0), ("c", 0)]
    h.run()
    for index, name in enumerate("abc"):
        assert h.tokens(name) == expected_tokens(prompt(20, index), count=10)
