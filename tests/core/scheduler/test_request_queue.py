"""The queue gives requests in the policy's order, whatever was removed or came back meanwhile."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from corespan.core.scheduler.request import Request
from corespan.core.scheduler.request_queue import RequestQueue, order_key
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import ResolvedSampling


def make_request(order: int, priority: int = 0, arrival_time: float = 0.0) -> Request:
    message = EngineCoreRequest(f"r{order}", [1], ResolvedSampling(), priority=priority, arrival_time=arrival_time)
    request = Request.from_engine_core_request(message, None)
    request.arrival_order = order
    return request


def drain(queue: RequestQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_fcfs_ignores_priority() -> None:
    queue = RequestQueue(order_key("fcfs"))
    for request in (make_request(0, priority=5), make_request(1, priority=1), make_request(2, priority=3)):
        queue.add(request)
    assert drain(queue) == ["r0", "r1", "r2"]


def test_priority_goes_by_priority_then_arrival_then_order() -> None:
    queue = RequestQueue(order_key("priority"))
    for request in (
        make_request(0, priority=1, arrival_time=1.0),
        make_request(1, priority=1, arrival_time=0.5),
        make_request(2, priority=-3, arrival_time=9.0),
        make_request(3, priority=1, arrival_time=1.0),
    ):
        queue.add(request)
    assert [request.request_id for request in queue] == ["r2", "r1", "r0", "r3"]
    assert drain(queue) == ["r2", "r1", "r0", "r3"]


def test_one_that_comes_back_finds_its_old_place() -> None:
    queue = RequestQueue(order_key("fcfs"))
    requests = [make_request(order) for order in range(3)]
    for request in requests:
        queue.add(request)
    first = queue.pop()
    queue.add(first)
    assert drain(queue) == ["r0", "r1", "r2"]


def test_an_empty_queue_has_no_next() -> None:
    queue = RequestQueue(order_key("fcfs"))
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_a_removed_request_may_be_added_again() -> None:
    queue = RequestQueue(order_key("fcfs"))
    request = make_request(0)
    queue.add(request)
    assert queue.remove(request)
    assert not queue.remove(request)
    queue.add(request)
    assert drain(queue) == ["r0"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aapr"), st.integers(0, 400), st.integers(-1, 1)), max_size=400))
def test_it_behaves_like_a_sorted_list(operations: list[tuple[str, int, int]]) -> None:
    key = order_key("priority")
    queue = RequestQueue(key)
    model: list[Request] = []
    for order, (operation, number, priority) in enumerate(operations):
        if operation == "a":
            request = make_request(order, priority)
            queue.add(request)
            model.append(request)
        elif operation == "p" and model:
            model.sort(key=key)
            assert queue.pop() is model.pop(0)
        elif operation == "r" and model:
            assert queue.remove(model.pop(number % len(model)))
        assert len(queue) == len(model)
        assert queue.peek() is (min(model, key=key) if model else None)
