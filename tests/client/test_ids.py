"""Whose a request's id is: each client has ids of its own, and an abort reaches only what came before it."""

import pytest
from bridge import FAKE_EXECUTOR, collect_async, fake_config, request, tokens_of

from corespan.client import make_async_client
from corespan.core.scheduler.request import core_request_id


def test_a_late_abort_leaves_a_later_request_of_the_same_id_alone(make_bridge):
    bridge = make_bridge()
    for seed in range(3):
        again = request("again", seed=seed)
        assert bridge.generate(again)["again"] == tokens_of(again)
        bridge.abort("again", "never")


def test_an_abort_between_two_requests_of_one_id_ends_the_first_alone(make_bridge):
    bridge = make_bridge()
    bridge.call("pause_scheduler", "keep", False)
    first, second = request("again", max_tokens=20, seed=1), request("again", max_tokens=20, seed=2)
    bridge.add(first)
    bridge.abort("again")
    bridge.add(second)
    bridge.call("resume_scheduler")
    assert bridge.collect("again")[0]["again"] == tokens_of(second)


@pytest.fixture
def clients():
    config = fake_config(step_seconds=0.001)
    first = make_async_client(config, FAKE_EXECUTOR, False, client_count=2)
    addresses = first.client_addresses(1)
    second = make_async_client(config, FAKE_EXECUTOR, False, addresses, client_count=2, client_index=1)
    yield first, second
    second.shutdown()
    first.shutdown()


async def test_two_clients_use_one_id_at_a_time_and_each_gets_its_own_answer(clients):
    requests = [request("same", max_tokens=30 + index, seed=index) for index in range(2)]
    await clients[0].call_utility("pause_scheduler", "keep", False)
    for client, new in zip(clients, requests, strict=True):
        await client.add_request_async(new)
        assert sum(await client.call_utility("get_request_counts")) == 1 + requests.index(new)
    await clients[0].call_utility("resume_scheduler")
    for client, new in zip(clients, requests, strict=True):
        assert await collect_async(client, "same") == {"same": tokens_of(new)}


async def test_a_client_aborts_its_own_request_and_not_another_clients_of_the_same_id(clients):
    for owner, other in (clients, clients[::-1]):
        mine = request("same", max_tokens=40)
        await owner.call_utility("pause_scheduler", "keep", False)
        await owner.add_request_async(mine)
        assert sum(await owner.call_utility("get_request_counts")) == 1
        await other.abort_requests_async(["same", "0:same", "1:same"])
        await other.add_request_async(request("same"))
        await other.abort_requests_async(["same"])
        assert sum(await other.call_utility("get_request_counts")) == 1
        await owner.call_utility("resume_scheduler")
        assert await collect_async(owner, "same") == {"same": tokens_of(mine)}


def test_no_two_clients_requests_share_a_name_in_the_core():
    ids = ["a", "0:a", "1:a", ":a", "1:", ""]
    names = {core_request_id(client_index, each) for client_index in range(3) for each in ids}
    assert len(names) == 3 * len(ids)
