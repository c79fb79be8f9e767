"""Several models on one machine: loaded when first asked for, at most so many at a time. The least recently used one
goes to sleep: its process stays, without weights and cache, and reads them again when it is asked for. Of those that
sleep, too, only so many stay.

A model that must make room is no longer given to new requests, which queue for its next turn; those that hold it finish
first. So a busy model cannot keep the others out.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..protocol.errors import EngineDeadError
from .http.errors import ApiError, model_not_found, unavailable
from .models import ModelHost, ServedModel, model_entry

logger = logging.getLogger("corespan.server")

LoadModel = Callable[[str], ServedModel]
SLEEP_LEVEL = 2  # without weights, too


class _Turn:
    """One time that a model is loaded: from the first request that waits for it to the last that holds it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.users = 0
        self.idle = asyncio.Event()
        self.last_used = time.monotonic()
        self.loading: asyncio.Task[ServedModel]
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def model(self) -> ServedModel | None:
        """Once it is loaded."""
        loaded = self.loading.done() and not self.loading.cancelled() and self.loading.exception() is None
        return self.loading.result() if loaded else None

    @property
    def is_dead(self) -> bool:
        return self.model is not None and self.model.engine.errored


class ModelPool(ModelHost):
    """`load` starts the engine of a name, in a thread. `keep_alive`: seconds that a model of that name stays loaded
    without a request; others stay until their room is needed. `max_asleep`: how many sleep rather than go, at most.
    Used from one event loop.
    """

    def __init__(
        self,
        names: Sequence[str],
        load: LoadModel,
        max_loaded: int,
        keep_alive: Mapping[str, float] | None = None,
        max_asleep: int = 0,
    ) -> None:
        self.names = list(names)
        self.max_loaded = max_loaded
        self.max_asleep = max_asleep
        self.keep_alive = dict(keep_alive or {})
        self._load = load
        self._created = int(time.time())
        self._current: dict[str, _Turn] = {}  # what new requests join
        self._resident: list[_Turn] = []  # what takes up memory, retiring ones included
        self._asleep: dict[str, ServedModel] = {}  # in the order in which they went to sleep
        self._changing = asyncio.Lock()  # one model comes or goes at a time
        self._coming: str | None = None  # the one that others make room for
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        name = name or self.names[0]
        if name not in self.names:
            raise model_not_found(name, self.names)
        turn = self._current.get(name)
        if turn is None or turn.is_dead:
            turn = self._begin(name)
        turn.users += 1
        turn.idle.clear()
        if turn.expiry is not None:
            turn.expiry.cancel()
        try:
            yield await asyncio.shield(turn.loading)
        finally:
            turn.users -= 1
            turn.last_used = time.monotonic()
            if not turn.users:
                turn.idle.set()
                self._expire_later(turn)

    def listing(self) -> list[dict[str, Any]]:
        return [self._entry(name) for name in self.names]

    def loaded(self) -> list[ServedModel]:
        return [turn.model for turn in self._resident if turn.model is not None]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in [*self.loaded(), *self._asleep.values()]:
            await asyncio.to_thread(model.close)
        self._resident.clear()
        self._asleep.clear()
        self._current.clear()

    def _entry(self, name: str) -> dict[str, Any]:
        turn = self._current.get(name)
        model = turn.model if turn is not None else None
        if model is not None:
            return model_entry(name, model) | {"state": "loaded"}
        state = "loading" if turn is not None else "asleep" if name in self._asleep else "unloaded"
        entry = {"id": name, "object": "model", "created": self._created, "owned_by": "corespan"}
        return entry | {"root": name, "parent": None, "state": state}

    def _begin(self, name: str) -> _Turn:
        turn = self._current[name] = _Turn(name)
        turn.loading = self._start(self._take_turn(turn))
        return turn

    async def _take_turn(self, turn: _Turn) -> ServedModel:
        """Loads once there is room. Raises ApiError (503) where that fails; the next request tries anew."""
        async with self._changing:
            self._coming = turn.name
            try:
                for dead in [other for other in self._resident if other.is_dead]:
                    await self._retire(dead)
                while len(self._resident) >= self.max_loaded:
                    await self._retire(min(self._resident, key=lambda other: (other.users > 0, other.last_used)))
                model = await self._woken(turn.name)
                if model is None:
                    logger.info("Loading %s", turn.name)
                    model = await _in_thread_to_its_end(self._load, turn.name)
            except BaseException as error:
                self._leave(turn)
                if isinstance(error, Exception):
                    logger.error("Model %s cannot be loaded: %s", turn.name, error, exc_info=not _is_plain(error))
                    raise _load_failure(turn.name, error) from error
                raise
            finally:
                self._coming = None
            self._resident.append(turn)
            return model

    async def _retire(self, turn: _Turn) -> None:
        """Ends the turn when its last request has."""
        self._leave(turn)
        if turn.users:
            await turn.idle.wait()
        if turn.model is not None:
            await self._put_away(turn.name, turn.model)
        self._resident.remove(turn)

    async def _put_away(self, name: str, model: ServedModel) -> None:
        """To sleep, where it can and there is a place, which the one that has slept longest makes."""
        if self.max_asleep and not model.engine.errored:
            try:
                logger.info("%s goes to sleep", name)
                await model.engine.sleep(SLEEP_LEVEL, "wait")
                self._asleep[name] = model
                asleep = [each for each in self._asleep if each != self._coming]
                if len(asleep) <= self.max_asleep:
                    return
                name = asleep[0]
                model = self._asleep.pop(name)
            except EngineDeadError as error:
                logger.error("%s died when it was to sleep: %s", name, error)
        logger.info("Unloading %s", name)
        await asyncio.to_thread(model.close)

    async def _woken(self, name: str) -> ServedModel | None:
        """The model of that name, if it slept and can still be woken."""
        model = self._asleep.pop(name, None)
        if model is None:
            return None
        try:
            logger.info("Waking %s", name)
            await model.engine.wake_up()
            return model
        except BaseException as error:
            await asyncio.to_thread(model.close)
            if isinstance(error, EngineDeadError):
                logger.error("%s died in its sleep: %s", name, error)
                return None
            raise

    def _leave(self, turn: _Turn) -> None:
        if self._current.get(turn.name) is turn:
            del self._current[turn.name]

    def _expire_later(self, turn: _Turn) -> None:
        seconds = self.keep_alive.get(turn.name)
        if seconds is not None and turn.model is not None:
            loop = asyncio.get_running_loop()
            turn.expiry = loop.call_later(seconds, lambda: self._start(self._expire(turn)))

    async def _expire(self, turn: _Turn) -> None:
        async with self._changing:
            if not turn.users and turn in self._resident:
                await self._retire(turn)

    def _start(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits; there may be nobody left


async def _in_thread_to_its_end(load: LoadModel, name: str) -> ServedModel:
    """A load cannot be interrupted: cancelled meanwhile, this closes what it brought."""
    loading = asyncio.ensure_future(asyncio.to_thread(load, name))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        model = await loading
        await asyncio.to_thread(model.close)
        raise


def _is_plain(error: Exception) -> bool:
    """Whether its text says all there is to know."""
    return isinstance(error, (ValueError, OSError))


def _load_failure(name: str, error: Exception) -> ApiError:
    if isinstance(error, MemoryError):
        return unavailable(f"there is no memory to load the model {name!r} at the moment")
    return ApiError(f"the model {name!r} cannot be loaded; the server's log says why", 500, param="model")
