"""How many different LoRA adapters run at once, and that nobody waits for ever."""

from typing import Any

import pytest
from scheduling import Harness, expected_tokens, greedy, prompt

from corespan.core.scheduler.request import Request
from corespan.protocol.lora import LoadedAdapter, LoRARequest


def adapter(name: str) -> LoadedAdapter:
    return LoadedAdapter(LoRARequest(name, 1 + ord(name[0]), "/" + name), f"digest of {name}")


def add(h: Harness, request_id: str, max_tokens: int = 8, **fields: Any) -> Request:
    """A request whose adapter is named by the first letter of its id; "-": none."""
    own = None if request_id[0] == "-" else adapter(request_id[0])
    return h.add(request_id, prompt(5, ord(request_id[0])), greedy(max_tokens), adapter=own, **fields)


def running(h: Harness) -> list[str]:
    return [request.request_id for request in h.scheduler.table.running.values()]


def test_one_adapter_too_many_waits_and_others_overtake_it() -> None:
    h = Harness(max_loras=2)
    for request_id in ("a1", "b1", "c1", "a2", "-1", "d1"):
        add(h, request_id, max_tokens=4 if request_id == "b1" else 12)
    h.step()
    assert running(h) == ["a1", "b1", "a2", "-1"]
    stats = h.scheduler.make_stats()
    assert (stats.running_lora_adapters, stats.waiting_lora_adapters) == (["a", "b"], ["c", "d"])
    assert stats.num_waiting_reqs == 2 and h.scheduler.get_num_unfinished_requests() == 6
    while "b1" in running(h):
        h.step()
    h.step()
    assert running(h) == ["a1", "a2", "-1", "c1"], "it keeps its place"
    h.run()
    assert h.tokens("d1") == expected_tokens(prompt(5, ord("d")), count=12)


def test_no_more_than_a_batch_of_requests_overtake() -> None:
    h = Harness(max_loras=1, max_num_seqs=2)
    add(h, "a0", max_tokens=3)
    h.step()
    add(h, "b")
    for number in range(1, 20):
        add(h, f"a{number}", max_tokens=3)
    order: list[str] = []
    while h.scheduler.has_requests():
        h.step()
        order += [each for each in running(h) if each not in order]
    assert order.index("b") == 3, "two have overtaken it: as many as run at once"
    assert order[4:] == [f"a{number}" for number in range(3, 20)]


def test_requests_without_an_adapter_need_no_slot() -> None:
    h = Harness(max_loras=1)
    for request_id in ("a", "b", "-1", "-2"):
        add(h, request_id)
    h.step()
    assert running(h) == ["a", "-1", "-2"]


def test_a_request_that_is_set_aside_can_be_aborted() -> None:
    h = Harness(max_loras=1)
    for request_id in ("a", "b", "c"):
        add(h, request_id)
    h.step()
    h.scheduler.finish_requests(["b"])
    h.run()
    assert h.tokens("c") and "b" not in h.outputs
    assert not h.scheduler.table.requests


def test_preempted_requests_keep_to_the_limit_too() -> None:
    h = Harness(num_blocks=9, max_loras=2, block_size=4, max_num_seqs=4)
    for request_id in ("a", "b", "c", "-"):
        add(h, request_id, max_tokens=14)
    while h.scheduler.has_requests():
        h.step()
        assert len({each[0] for each in running(h)} - {"-"}) <= 2
    for request_id in ("a", "b", "c", "-"):
        assert h.tokens(request_id) == expected_tokens(prompt(5, ord(request_id)), count=14)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_blocks_are_shared_by_requests_of_one_adapter_alone(policy: str) -> None:
    h = Harness(max_loras=3, policy=policy)
    tokens = prompt(40)
    for request_id, own in (("a1", "a"), ("a2", "a"), ("b", "b")):
        h.add(request_id, tokens, adapter=adapter(own))
        h.run()
    h.add("-", tokens)
    h.run()
    assert h.num_computed["a1"] == h.num_computed["b"] == h.num_computed["-"]
    assert h.num_computed["a1"] - h.num_computed["a2"] == 32
