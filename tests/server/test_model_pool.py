"""Several models behind one server: who is loaded when, who waits, sleeps and goes, and what a failed load touches."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from deadlines import DEADLINE

from corespan.protocol.errors import EngineDeadError
from corespan.server.http.errors import ApiError
from corespan.server.model_pool import ModelPool


class FakeModel:
    """What the pool knows of a `ServedModel`."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.names, self.root, self.created, self.max_model_len = name, [name], name, 0, 16
        self.engine = self
        self.errored = False
        self._log = log

    async def sleep(self, level: int, mode: str) -> None:
        self._check("z")

    async def wake_up(self) -> None:
        self._check("!")

    def close(self) -> None:
        self._log.append(f"-{self.name}")

    def _check(self, sign: str) -> None:
        if self.errored:
            raise EngineDeadError("killed")
        self._log.append(f"{sign}{self.name}")


class Loader:
    """Loads fake models; `log` tells comings (+), goings (-), sleeps (z) and wakings (!). A name in `gates` waits for
    its event.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.faults: dict[str, Exception] = {}
        self.gates: dict[str, threading.Event] = {}

    def __call__(self, name: str) -> Any:
        if name in self.gates:
            assert self.gates[name].wait(DEADLINE)
        if name in self.faults:
            raise self.faults[name]
        self.log.append(f"+{name}")
        return FakeModel(name, self.log)

    def pool(self, max_loaded: int = 1, keep_alive: dict[str, float] | None = None, max_asleep: int = 0) -> ModelPool:
        return ModelPool(["a", "b", "c"], self, max_loaded, keep_alive, max_asleep)


async def use(pool: ModelPool, name: str | None) -> str:
    async with pool.use(name) as model:
        return model.name


async def hold(pool: ModelPool, name: str) -> tuple[asyncio.Event, "asyncio.Task[None]"]:
    """A request that has the model, until the event is set."""
    held, release = asyncio.Event(), asyncio.Event()

    async def request() -> None:
        async with pool.use(name):
            held.set()
            await release.wait()

    task = asyncio.create_task(request())
    await held.wait()
    return release, task


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE):
            await test()

    asyncio.run(limited())


def states(pool: ModelPool) -> list[str]:
    return [entry["state"] for entry in pool.listing()]


def test_loads_on_demand_and_the_least_recently_used_goes() -> None:
    async def test() -> None:
        loader = Loader()
        pool = loader.pool(max_loaded=2)
        assert states(pool) == ["unloaded"] * 3
        assert [await use(pool, name) for name in (None, "b", "a", "c", "a", "b")] == ["a", "b", "a", "c", "a", "b"]
        assert loader.log == ["+a", "+b", "-b", "+c", "-c", "+b"]
        assert states(pool) == ["loaded", "loaded", "unloaded"]
        await pool.close()
        assert sorted(loader.log[-2:]) == ["-a", "-b"] and states(pool) == ["unloaded"] * 3

    run(test)


def test_requests_queue_for_one_load_while_others_go_on() -> None:
    async def test() -> None:
        loader = Loader()
        pool = loader.pool(max_loaded=2)
        await use(pool, "a")
        loader.gates["b"] = threading.Event()
        waiting = [asyncio.create_task(use(pool, "b")) for _ in range(3)]
        while states(pool) != ["loaded", "loading", "unloaded"]:
            await asyncio.sleep(0)
        assert await use(pool, "a") == "a"
        loader.gates["b"].set()
        assert await asyncio.gather(*waiting) == ["b"] * 3
        assert loader.log == ["+a", "+b"]

    run(test)


def test_a_model_in_use_is_waited_for_and_cannot_keep_others_out() -> None:
    async def test() -> None:
        loader = Loader()
        pool = loader.pool()
        release, holding = await hold(pool, "a")
        other = asyncio.create_task(use(pool, "b"))
        while states(pool)[0] != "unloaded":  # it takes no new requests any more
            await asyncio.sleep(0)
        again = asyncio.create_task(use(pool, "a"))
        assert loader.log == ["+a"]
        release.set()
        assert await asyncio.gather(holding, other, again) == [None, "b", "a"]
        assert loader.log == ["+a", "-a", "+b", "-b", "+a"]

    run(test)


@pytest.mark.parametrize(("fault", "status"), [(ValueError("/secret/path"), 500), (MemoryError(), 503)])
def test_a_failed_load_is_told_to_who_asked_and_tried_again(fault: Exception, status: int) -> None:
    async def test() -> None:
        loader = Loader()
        pool = loader.pool(max_loaded=2)
        release, holding = await hold(pool, "a")
        loader.faults["b"] = fault
        with pytest.raises(ApiError) as failed:
            await use(pool, "b")
        assert failed.value.status == status and "'b'" in str(failed.value) and "/secret" not in str(failed.value)
        assert states(pool) == ["loaded", "unloaded", "unloaded"]
        del loader.faults["b"]
        assert await use(pool, "b") == "b"
        release.set()
        await holding
        assert loader.log == ["+a", "+b"]

    run(test)


def test_who_leaves_while_it_loads_disturbs_nobody() -> None:
    async def test() -> None:
        loader = Loader()
        pool = loader.pool()
        loader.gates["a"] = threading.Event()
        gone, staying = (asyncio.create_task(use(pool, "a")) for _ in range(2))
        while states(pool)[0] != "loading":
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        loader.gates["a"].set()
        assert await staying == "a"
        assert await use(pool, "b") == "b"
        assert loader.log == ["+a", "-a", "+b"]

    run(test)


def test_closing_while_it_loads_leaves_no_engine() -> None:
    async def test() -> None:
        loader = Loader()
        pool = loader.pool()
        entered = threading.Event()
        gate = loader.gates["a"] = threading.Event()
        gate.wait = lambda timeout=None: entered.set() or threading.Event.wait(gate, timeout)  # type: ignore[method-assign, func-returns-value]
        waiting = asyncio.create_task(use(pool, "a"))
        await asyncio.to_thread(entered.wait, 30)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0)
        gate.set()
        await closing
        assert (await asyncio.gather(waiting, return_exceptions=True))[0] is not None
        assert loader.log == ["+a", "-a"]

    run(test)


def test_keep_alive_counts_from_the_last_request() -> None:
    async def test() -> None:
        loader = Loader()
        pool = loader.pool(max_loaded=2, keep_alive={"a": 0.0})
        await use(pool, "b")
        release, holding = await hold(pool, "a")
        release.set()
        await holding
        while "-a" not in loader.log:
            await asyncio.sleep(0)
        assert loader.log == ["+b", "+a", "-a"]
        assert states(pool) == ["unloaded", "loaded", "unloaded"]

    run(test)


def test_a_dead_engine_is_replaced_at_the_next_request() -> None:
    async def test() -> None:
        loader = Loader()
        pool = loader.pool()
        async with pool.use("a") as model:
            model.errored = True  # type: ignore[attr-defined]
        assert pool.failure() is None
        assert await use(pool, "a") == "a"
        assert loader.log == ["+a", "-a", "+a"]

    run(test)


def test_a_name_that_is_not_served() -> None:
    async def test() -> None:
        with pytest.raises(ApiError, match="'d' does not exist; served here: 'a', 'b', 'c'"):
            await use(Loader().pool(), "d")

    run(test)


def test_the_least_recently_used_sleeps_and_the_longest_asleep_goes() -> None:
    async def test() -> None:
        loader = Loader()
        pool = loader.pool(max_asleep=1)
        for name, log, state in (
            ("a", ["+a"], ["loaded", "unloaded", "unloaded"]),
            ("b", ["za", "+b"], ["asleep", "loaded", "unloaded"]),
            ("a", ["zb", "!a"], ["loaded", "asleep", "unloaded"]),
            ("c", ["za", "-b", "+c"], ["asleep", "unloaded", "loaded"]),
        ):
            before = len(loader.log)
            assert await use(pool, name) == name
            assert sorted(loader.log[before:]) == sorted(log) and states(pool) == state
        await pool.close()
        assert sorted(loader.log[-2:]) == ["-a", "-c"] and states(pool) == ["unloaded"] * 3

    run(test)


def test_a_model_that_dies_in_its_sleep_is_loaded_anew() -> None:
    async def test() -> None:
        loader = Loader()
        pool = loader.pool(max_asleep=2)
        async with pool.use("a") as model:
            pass
        await use(pool, "b")
        model.errored = True  # type: ignore[attr-defined]
        assert await use(pool, "a") == "a"
        assert loader.log == ["+a", "za", "+b", "zb", "-a", "+a"]

    run(test)


def test_keep_alive_puts_to_sleep() -> None:
    async def test() -> None:
        loader = Loader()
        pool = loader.pool(keep_alive={"a": 0.0}, max_asleep=1)
        await use(pool, "a")
        while states(pool)[0] != "asleep":
            await asyncio.sleep(0)
        assert await use(pool, "a") == "a"
        assert loader.log == ["+a", "za", "!a"]

    run(test)
