"""Several asyncio clients, in several processes, share one core: each gets its own outputs, and ends alone."""

import asyncio
import multiprocessing
import os
import signal

import pytest
from bridge import DEADLINE, FAKE_EXECUTOR, collect_async, fake_config, request, tokens_of

from corespan.client import make_async_client
from corespan.client.connection import ClientAddresses
from corespan.protocol.errors import EngineDeadError


def new_client(**options):
    return make_async_client(fake_config(step_seconds=0.001), FAKE_EXECUTOR, False, **options)


def run_second_client(connection):
    """In a process of its own: has a request running for ever so long, and says so."""

    async def run():
        addresses = connection.recv()
        client = new_client(client_addresses=addresses, client_count=2, client_index=1)
        fine = request("theirs", seed=3)
        await client.add_request_async(fine)
        assert await collect_async(client, "theirs") == {"theirs": tokens_of(fine)}
        await client.call_utility("pause_scheduler", "keep", False)
        await client.add_request_async(request("unfinished", max_tokens=250))
        connection.send((await client.call_utility("get_request_counts"), client.vllm_config.cache_config))
        await client.get_output_async()

    asyncio.run(run())


async def test_a_client_that_is_killed_takes_only_its_own_requests_along():
    client = new_client(client_count=2)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_second_client, args=(theirs,), daemon=True)
    process.start()
    ours.send(client.client_addresses(1))
    counts, cache_config = await asyncio.to_thread(ours.recv)
    assert list(counts) == [0, 1]
    assert cache_config == client.vllm_config.cache_config
    mine = request("mine", max_tokens=20)
    await client.add_request_async(mine)
    assert list(await client.call_utility("get_request_counts")) == [0, 2]
    os.kill(process.pid, signal.SIGKILL)
    process.join(DEADLINE)
    while list(await client.call_utility("get_request_counts")) != [0, 1]:
        await asyncio.sleep(0)
    await client.call_utility("resume_scheduler")
    assert await collect_async(client, "mine") == {"mine": tokens_of(mine)}
    client.shutdown()


async def test_each_client_gets_its_own_outputs_and_answers():
    first = new_client(client_count=3)
    others = [
        new_client(client_addresses=first.client_addresses(index), client_count=3, client_index=index)
        for index in (1, 2)
    ]
    clients = [first, *others]
    requests = [request(f"r{index}", max_tokens=20 + index, seed=index) for index in range(3)]
    for client, new in zip(clients, requests, strict=True):
        await client.add_request_async(new)
    answers = await asyncio.gather(
        *(client.call_utility("collective_rpc", "echo", None, [index]) for index, client in enumerate(clients))
    )
    assert answers == [[[0]], [[1]], [[2]]]
    collected = await asyncio.gather(
        *(collect_async(client, new.request_id) for client, new in zip(clients, requests, strict=True))
    )
    assert collected == [{new.request_id: tokens_of(new)} for new in requests]
    for client in others:
        client.shutdown()
    assert await first.call_utility("is_sleeping") is False
    first.shutdown()


async def test_the_core_s_death_reaches_every_client():
    first = new_client(client_count=2)
    second = new_client(client_addresses=first.client_addresses(1), client_count=2, client_index=1)
    waiting = [asyncio.create_task(client.get_output_async()) for client in (first, second)]
    (pid,) = await first.call_utility("collective_rpc", "pid")
    os.kill(pid, signal.SIGKILL)
    for task in waiting:
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, DEADLINE)
    assert first.engine_dead and second.engine_dead
    second.shutdown()
    first.shutdown()


@pytest.mark.parametrize("options", [{"client_index": 1}, {"client_index": 2}, {"client_index": -1}])
def test_addresses_and_index_must_fit(options):
    with pytest.raises(ValueError, match=f"client_index is {options['client_index']}"):
        new_client(client_count=2, **options)


def test_a_shared_core_and_restarts_are_refused_together():
    config = fake_config(parallel={"engine_restart": 3})
    addresses = ClientAddresses(socket_dir="/nowhere", output_token=b"", client_index=1)
    for options in ({}, {"client_addresses": addresses, "client_index": 1}):
        with pytest.raises(ValueError, match="engine_restart is 3, client_count 2"):
            make_async_client(config, FAKE_EXECUTOR, False, client_count=2, **options)


def run_first_client(connection):
    """In a process of its own: owns the core."""
    client = new_client(client_count=2)
    connection.send(client.client_addresses(1))
    connection.recv()


async def test_when_the_client_that_started_it_is_killed_the_core_goes_and_the_others_are_told():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_first_client, args=(theirs,), daemon=True)
    process.start()
    addresses = await asyncio.to_thread(ours.recv)
    second = new_client(client_addresses=addresses, client_count=2, client_index=1)
    fine = request("fine")
    await second.add_request_async(fine)
    assert await collect_async(second, "fine") == {"fine": tokens_of(fine)}
    waiting = asyncio.create_task(second.get_output_async())
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="has ended"):
        await asyncio.wait_for(waiting, DEADLINE)
    process.join(DEADLINE)
    second.shutdown()
    assert not os.path.exists(addresses.socket_dir)
