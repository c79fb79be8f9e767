"""One face over the three clients, so that a test written once runs over all of them."""

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from corespan import LLM, AsyncEngineArgs, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams

ClientKind = Literal["inproc", "sync_mp", "async_mp"]
CLIENT_KINDS: tuple[ClientKind, ...] = ("inproc", "sync_mp", "async_mp")
SMALL_ENGINE: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 32, "num_gpu_blocks_override": 257}
T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own. `run` executes a coroutine there and waits for its result."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-event-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float = 120) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Runner:
    """An engine over the client of `kind`: `LLM` for the two sync ones, `AsyncLLM` on a loop thread for the third.

    `engine_args` are EngineArgs fields; statistics are off unless asked for.
    """

    def __init__(self, kind: ClientKind, **engine_args: Any) -> None:
        self.kind = kind
        self._ids = 0
        engine_args = {"disable_log_stats": True, **engine_args}
        if kind == "async_mp":
            self._loop = LoopThread()
            try:
                self.async_llm = self._loop.run(_build_async(engine_args))
            except BaseException:
                self._loop.close()
                raise
        else:
            with multiprocessing_flag(kind == "sync_mp"):
                self.llm = LLM(**engine_args)

    @property
    def engine(self) -> Any:
        """The LLM or AsyncLLM itself."""
        return self.async_llm if self.kind == "async_mp" else self.llm

    def generate(
        self,
        prompts: Sequence[Any] | Any,
        params: SamplingParams | Sequence[SamplingParams],
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """The final outputs of all prompts, generated as one batch, in their order."""
        if self.kind != "async_mp":
            return self.llm.generate(prompts, params, use_tqdm=False, priority=priority)
        if isinstance(prompts, (str, dict)) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return self._loop.run(self._generate_async(prompts, all_params, priority or [0] * len(prompts)))

    def stream(self, prompt: Any, params: SamplingParams, abort_after: int | None = None) -> list[RequestOutput]:
        """Every output of one request, as `params.output_kind` shapes them.

        With `abort_after` the request is aborted once that many outputs have come: by `abort_request` in the sync
        engines, which then yield nothing more, and by leaving the loop in AsyncLLM.
        """
        self._ids += 1
        if self.kind == "async_mp":
            return self._loop.run(self._stream_async(prompt, params, f"stream-{self._ids}", abort_after))
        engine = self.llm.llm_engine
        request_id = engine.add_request(f"stream-{self._ids}", prompt, params)
        outputs: list[RequestOutput] = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
            if abort_after is not None and len(outputs) >= abort_after:
                engine.abort_request([request_id], internal=True)
        return outputs

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The engine's method of that name, awaited where it is a coroutine function."""
        result = getattr(self.engine, method)(*args, **kwargs)
        return self._loop.run(result) if asyncio.iscoroutine(result) else result

    def utility(self, method: str, *args: Any) -> Any:
        """The core's own method of that name."""
        if self.kind == "async_mp":
            return self._loop.run(_awaited(self.async_llm, method, args))
        return self.llm.llm_engine.engine_core.call_utility(method, *args)

    def shutdown(self) -> None:
        if self.kind == "async_mp":
            self.async_llm.shutdown()
            self._loop.close()
        else:
            self.llm.shutdown()

    async def _generate_async(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], priorities: list[int]
    ) -> list[RequestOutput]:
        async def final_output(prompt: Any, params: SamplingParams, priority: int) -> RequestOutput:
            self._ids += 1
            params = params.clone()
            params.output_kind = RequestOutputKind.FINAL_ONLY
            outputs = [
                output
                async for output in self.async_llm.generate(prompt, params, f"batch-{self._ids}", priority=priority)
            ]
            return outputs[-1]

        tasks = [asyncio.ensure_future(final_output(*each)) for each in zip(prompts, params, priorities, strict=True)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream_async(
        self, prompt: Any, params: SamplingParams, request_id: str, abort_after: int | None
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        stream = self.async_llm.generate(prompt, params, request_id)
        async for output in stream:
            outputs.append(output)
            if abort_after is not None and len(outputs) >= abort_after:
                break
        await stream.aclose()
        return outputs


@contextmanager
def multiprocessing_flag(enabled: bool) -> Iterator[None]:
    """Sets VLLM_ENABLE_V1_MULTIPROCESSING while an engine is built."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = str(int(enabled))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


async def _build_async(engine_args: dict[str, Any]) -> AsyncLLM:
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))


async def _awaited(engine: AsyncLLM, method: str, args: Sequence[Any]) -> Any:
    return await engine.engine_core.call_utility(method, *args)
