"""Requests that are aborted, refused, restarted or fail: what they leave behind, and what becomes of the others."""

import pytest
from scheduling import Harness, check_blocks, expected_tokens, greedy, prompt

from corespan.protocol.outputs import FinishReason


def test_abort_frees_blocks_at_once_and_ignores_unknown_ids() -> None:
    h = Harness()
    h.add("a", prompt(40), client_index=2)
    h.add("b", prompt(40, 3))
    h.step()
    used = h.scheduler.kv_cache_manager.num_free_blocks
    assert h.scheduler.finish_requests(["2:a", "ghost"]) == [("2:a", 2)]
    assert h.scheduler.kv_cache_manager.num_free_blocks == used + 3
    assert h.scheduler.finish_requests(["2:a"]) == []
    assert h.scheduler.finish_requests(None) == [("b", 0)]
    assert h.scheduler.has_requests()  # the runner has still to be told
    assert h.step().removed == {"2:a", "b"}
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
    assert not h.steps[0].num_scheduled_tokens


def test_a_failing_request_ends_alone() -> None:
    h = Harness()
    h.add("bad", prompt(20))
    h.add("good", prompt(20, 3))
    h.fail_next("bad")
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
    h.fail_next("bad")
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
    h.fail_next("bad")
    step = h.schedule()
    output = h.runner.execute_model(step)
    h.scheduler.finish_requests(["bad", "aborted"])
    h.take(step, output)
    for name, num_cached in (("first", 0), ("second", 64)):
        h.add(name, prompt(70))
        h.run()
        assert h.num_cached_tokens(name) == num_cached
        assert h.tokens(name) == expected_tokens(prompt(70))
