"""Carries outputs from the output processor to an asyncio consumer."""

import asyncio

from ...protocol.params import RequestOutputKind
from .pooling_output import PoolingOutput, PoolingRequestOutput
from .request_output import RequestOutput

EngineOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]
"""What an engine hands out of a request that generates, or pools."""

MAX_UNANSWERED_PIECES = 16
"""How far a prompt that comes in pieces may run ahead of the answers."""


class RequestOutputCollector:
    """One slot between the output processor and a consumer: outputs not fetched yet merge, so none is ever lost.

    Used from one event loop. `request_id` is the internal one.
    """

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        self.request_id = request_id
        self._aggregate = output_kind == RequestOutputKind.DELTA
        self._slot: EngineOutput | Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the one consumer
        self.input_task: asyncio.Task[None] | None = None  # sends the rest of a prompt that comes in pieces
        self.unanswered_pieces = asyncio.Semaphore(MAX_UNANSWERED_PIECES)  # taken by that task, released by answers

    def close(self) -> None:
        """Nobody reads any more: no further pieces of the prompt are wanted."""
        if self.input_task is not None:
            self.input_task.cancel()

    def put(self, output: EngineOutput | Exception) -> None:
        """Never blocks. An exception takes the place of what was there, and nothing takes an exception's."""
        if self._slot is None or isinstance(output, Exception):
            self._slot = output
            waiter = self._waiter
            if waiter is not None:
                self._waiter = None
                if not waiter.done() and not waiter.get_loop().is_closed():
                    waiter.set_result(None)
        elif isinstance(self._slot, RequestOutput) and isinstance(output, RequestOutput):
            self._slot.add(output, aggregate=self._aggregate)

    async def get(self) -> EngineOutput:
        """The next output, waiting for one. Raises the exception that was put."""
        while (output := self.get_nowait()) is None:
            await self.arrival()
        return output

    def arrival(self) -> asyncio.Future[None]:
        """Done when something is put."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def get_nowait(self) -> EngineOutput | None:
        output, self._slot = self._slot, None
        if isinstance(output, Exception):
            raise output
        return output
