"""The asyncio client in and across event loops."""

import asyncio
import threading

import pytest
from bridge import DEADLINE, FAKE_EXECUTOR, collect_async, fake_config, request, tokens_of

from corespan.client import make_async_client
from corespan.protocol.errors import EngineDeadError


@pytest.fixture
def client():
    client = make_async_client(fake_config(), FAKE_EXECUTOR, False)
    yield client
    client.shutdown()


async def generate(client, new):
    await client.add_request_async(new)
    return (await collect_async(client, new.request_id))[new.request_id]


def test_a_second_event_loop_takes_over_from_one_that_has_ended(client):
    for seed in (1, 2):
        new = request(f"r{seed}", seed=seed)
        assert asyncio.run(generate(client, new)) == tokens_of(new)


def test_a_call_left_behind_by_an_ended_loop_is_forgotten(client):
    async def leave_a_call_behind():
        asyncio.ensure_future(client.call_utility("is_sleeping"))
        asyncio.ensure_future(client.get_output_async())
        await asyncio.sleep(0)

    asyncio.run(leave_a_call_behind())
    new = request("next")
    assert asyncio.run(generate(client, new)) == tokens_of(new)


def test_two_event_loops_at_once_are_refused(client):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(generate(client, request("first")), loop).result(DEADLINE)
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(generate(client, request("second")))
    loop.call_soon_threadsafe(loop.stop)
    thread.join(DEADLINE)
    loop.close()


async def test_many_calls_at_once_each_get_their_answer(client):
    answers = await asyncio.gather(
        *(client.call_utility("collective_rpc", "echo", None, [index]) for index in range(200))
    )
    assert answers == [[[index]] for index in range(200)]


async def test_a_cancelled_call_and_a_cancelled_waiter_leave_no_trace(client):
    call = asyncio.ensure_future(client.call_utility("is_sleeping"))
    waiter = asyncio.ensure_future(client.get_output_async())
    await asyncio.sleep(0)
    call.cancel()
    waiter.cancel()
    new = request("next")
    assert await generate(client, new) == tokens_of(new)
    assert client._receiver._answers == {}


async def test_a_shutdown_in_another_thread_wakes_every_waiter(client):
    await client.call_utility("pause_scheduler", "keep", False)
    waiter = asyncio.ensure_future(client.get_output_async())
    await asyncio.sleep(0)
    await asyncio.to_thread(client.shutdown)
    with pytest.raises(EngineDeadError, match="shut down"):
        await asyncio.wait_for(waiter, DEADLINE)


async def test_a_shutdown_in_the_loop_wakes_every_waiter(client):
    waiter = asyncio.ensure_future(client.get_output_async())
    await asyncio.sleep(0)
    client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await asyncio.wait_for(waiter, DEADLINE)
    with pytest.raises(EngineDeadError, match="shut down"):
        await client.add_request_async(request("late"))
    client.shutdown()


async def test_a_shutdown_leaves_the_sockets_to_a_busy_loop_until_it_has_let_go_of_them(client, monkeypatch):
    """Closed before, their descriptors could be another's already when the loop takes its readers away."""
    monkeypatch.setattr("corespan.client.async_client.DETACH_WAIT", 0.0)
    await client.call_utility("is_sleeping")
    connection = client._connection
    descriptors = connection.descriptors
    stopping = threading.Thread(target=client.shutdown)
    stopping.start()
    stopping.join(DEADLINE)  # holds the loop up
    assert not stopping.is_alive()
    assert not connection.released
    while not connection.released:
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    assert not any(loop.remove_reader(descriptor) for descriptor in descriptors)
