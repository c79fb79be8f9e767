"""What a client does not read is kept, as much as it asked for, and holds up neither the core nor other clients."""

import asyncio
import multiprocessing
import os
import signal

import psutil
from bridge import DEADLINE, FAKE_EXECUTOR, collect_async, fake_config, request, tokens_of

from corespan.client import make_async_client

NUM_UNREAD, UNREAD_TOKENS = 16, 250
TOLERANCE = 32 << 20  # bytes by which a process may grow meanwhile, which is 8 KiB for each token that nobody reads


def unread_requests():
    return [request(f"unread {index}", max_tokens=UNREAD_TOKENS, seed=index) for index in range(NUM_UNREAD)]


def rss(pid):
    return psutil.Process(pid).memory_info().rss


async def all_come_whole(client, requests):
    """Whether all these requests finish with the tokens they should have."""
    tokens = await collect_async(client, *(new.request_id for new in requests))
    return tokens == {new.request_id: tokens_of(new) for new in requests}


def run_stopped_client(connection):
    """In a process of its own: asks for a lot, says so, and reads only when told to."""

    async def run():
        addresses = connection.recv()
        client = make_async_client(fake_config(), FAKE_EXECUTOR, False, addresses, 2, 1)
        await client.call_utility("pause_scheduler", "keep", False)
        for new in unread_requests():
            await client.add_request_async(new)
        await client.call_utility("is_sleeping")
        connection.send("asked")
        connection.recv()
        connection.send(await all_come_whole(client, unread_requests()))

    asyncio.run(run())


async def test_a_client_whose_process_is_stopped_holds_nobody_up_and_gets_everything_later():
    client = make_async_client(fake_config(), FAKE_EXECUTOR, False, client_count=2)
    (core,) = await client.call_utility("collective_rpc", "pid")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_stopped_client, args=(theirs,), daemon=True)
    process.start()
    ours.send(client.client_addresses(1))
    assert await asyncio.to_thread(ours.recv) == "asked"
    os.kill(process.pid, signal.SIGSTOP)
    before = rss(core)
    await client.call_utility("resume_scheduler")
    mine = [request(f"mine {index}", max_tokens=200, seed=index) for index in range(8)]
    for new in mine:
        await client.add_request_async(new)
    assert await asyncio.wait_for(all_come_whole(client, mine), DEADLINE)
    while list(await client.call_utility("get_request_counts")) != [0, 0]:
        await asyncio.sleep(0)
    assert rss(core) - before < TOLERANCE
    os.kill(process.pid, signal.SIGCONT)
    ours.send("read")
    assert await asyncio.to_thread(ours.recv) is True
    process.join(DEADLINE)
    client.shutdown()


def test_a_client_that_never_asks_for_outputs_gets_them_all_when_it_does(make_mp_bridge):
    bridge = make_mp_bridge()
    before = rss(os.getpid())
    for new in unread_requests():
        bridge.add(new)
    while list(bridge.call("get_request_counts")) != [0, 0]:
        pass
    assert rss(os.getpid()) - before < TOLERANCE
    tokens, _ = bridge.collect(*(new.request_id for new in unread_requests()))
    assert tokens == {new.request_id: tokens_of(new) for new in unread_requests()}
