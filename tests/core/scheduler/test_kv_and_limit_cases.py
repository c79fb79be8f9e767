"""What users of such engines reported about limits, preemption and the prefix cache, at the scheduler."""

import pytest
from scheduling import Harness, check_blocks, expected_tokens, greedy

from corespan.protocol.outputs import FinishReason


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 3 * i) % 50 for i in range(length)]


@pytest.mark.parametrize("max_tokens", [1, 10, None])
def test_a_prompt_one_short_of_max_model_len_gets_exactly_one_token(max_tokens: int | None) -> None:
    h = Harness(max_model_len=32)
    h.add("a", prompt(31), greedy(max_tokens))
    h.run()
    assert h.tokens("a") == expected_tokens(prompt(31), count=1)
    assert h.finish_reason("a") is FinishReason.LENGTH


@pytest.mark.parametrize("length", [32, 33])
def test_a_prompt_that_leaves_no_room_is_refused_and_the_next_one_runs(length: int) -> None:
    h = Harness(max_model_len=32)
    with pytest.raises(ValueError, match=f"{length} tokens.*32.*at most 31"):
        h.add("a", prompt(length))
    h.add("b", prompt(5))
    h.run()
    assert h.tokens("b") == expected_tokens(prompt(5))


def test_min_tokens_does_not_lead_past_max_model_len() -> None:
    h = Harness(max_model_len=32)
    h.add("a", prompt(20), greedy(max_tokens=None, min_tokens=100))
    h.run()
    assert len(h.tokens("a")) == 12
    assert h.finish_reason("a") is FinishReason.LENGTH


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempted_requests_come_back_complete(caching: bool, policy: str) -> None:
    h = Harness(num_blocks=24, max_model_len=160, policy=policy, enable_prefix_caching=caching)
    lengths = [15, 16, 17, 31, 32, 33, 15, 32]
    for index, length in enumerate(lengths):
        h.add(f"r{index}", prompt(length, index), greedy(100), priority=index % 3, noise_seed=index)
    while h.scheduler.table.requests:
        h.step()
        check_blocks(h.scheduler)
    assert h.num_preemptions() > 0
    for index, length in enumerate(lengths):
        assert h.tokens(f"r{index}") == expected_tokens(prompt(length, index), noise_seed=index, count=100)
        assert h.finish_reason(f"r{index}") is FinishReason.LENGTH


@pytest.mark.parametrize(("caching", "most"), [(True, 1.15), (False, 1.35)])
def test_preemption_does_little_work_twice(caching: bool, most: float) -> None:
    h = Harness(num_blocks=100, max_num_seqs=32, max_model_len=1024, enable_prefix_caching=caching)
    needed = 0
    for index in range(40):
        length, count = 20 + 61 * index % 300, 50 + 37 * index % 200
        needed += length + count - 1
        h.add(f"r{index}", prompt(length, index), greedy(count), noise_seed=index)
    h.run(max_steps=10_000)
    assert h.num_preemptions() > 0
    assert sum(h.num_computed.values()) < most * needed


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_fully_cached_prompt_of_whole_blocks_computes_its_last_block(length: int) -> None:
    h = Harness()
    h.add("first", prompt(length))
    h.run()
    h.add("again", prompt(length))
    h.run()
    assert h.num_cached_tokens("again") == length - 16
    assert h.tokens("again") == h.tokens("first") == expected_tokens(prompt(length))
    assert all(num > 0 for step in h.steps for num in step.num_scheduled_tokens.values())


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_prompt_of_whole_blocks_twice_in_one_batch_is_computed_once(length: int) -> None:
    h = Harness()
    h.add("a", prompt(length))
    h.add("b", prompt(length))
    assert h.step().num_scheduled_tokens == {"a": length, "b": 16}
    h.run()
    assert h.num_cached_tokens("b") == length - 16
    assert h.tokens("a") == h.tokens("b") == expected_tokens(prompt(length))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_that_outgrows_the_whole_cache_ends_with_an_error_and_the_others_finish(policy: str) -> None:
    h = Harness(num_blocks=9, policy=policy)
    h.add("big", prompt(100), greedy(220), priority=-1)
    for index in range(3):
        h.add(f"small{index}", prompt(10, index), greedy(20))
    h.run()
    assert h.finish_reason("big") is FinishReason.ERROR
    assert "128" in str(h.outputs["big"][-1].stop_reason)
    assert h.tokens("big") == expected_tokens(prompt(100), count=29)
    for index in range(3):
        assert h.tokens(f"small{index}") == expected_tokens(prompt(10, index), count=20)


def test_a_prompt_larger_than_the_whole_cache_does_not_block_the_queue() -> None:
    h = Harness(num_blocks=9)
    h.add("big", prompt(200))
    h.add("small", prompt(10))
    h.run()
    assert h.finish_reason("big") is FinishReason.ERROR
    assert h.tokens("small") == expected_tokens(prompt(10))


def test_a_preempted_request_that_can_never_come_back_does_not_block_the_queue() -> None:
    h = Harness(num_blocks=5, block_size=4, policy="priority", enable_prefix_caching=False)
    h.add("big", prompt(12), greedy(10), priority=5)
    for _ in range(4):
        h.step()
    h.add("small", prompt(3, 7), greedy(9), priority=0)
    h.run()
    assert h.finish_reason("big") is FinishReason.ERROR
    assert h.tokens("big") == expected_tokens(prompt(12), count=5)
    assert h.tokens("small") == expected_tokens(prompt(3, 7), count=9)


def test_after_sleep_nothing_of_the_old_content_is_found() -> None:
    h = Harness()
    h.add("before", prompt(40))
    h.run()
    assert h.scheduler.reset_prefix_cache()
    h.runner.stored.clear()
    h.add("after", prompt(40))
    h.run()
    assert h.num_cached_tokens("after") == 0
    assert h.tokens("after") == h.tokens("before")
