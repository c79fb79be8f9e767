"""One face over the three clients, so that a test written once runs over all of them."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import pytest
from deadlines import DEADLINE

from corespan import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from corespan.engine.text.conversation import to_conversation_list
from corespan.engine.text.render_params import ChatParams

ClientKind = Literal["inproc", "sync_mp", "async_mp"]
CLIENT_KINDS: tuple[ClientKind, ...] = ("inproc", "sync_mp", "async_mp")
SMALL_ENGINE: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 32, "num_gpu_blocks_override": 257}
IN_PROCESS = pytest.mark.parametrize("client_kind", ["inproc"], indirect=True)  # of what no client has a part in
ATTEMPTS = (
    20  # at meeting a request before it has come to its end, on a machine where others are faster than this program
)
T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own. `run` executes a coroutine there and waits for its result."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-event-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float = DEADLINE) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

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
        self._others: dict[str, list[RequestOutput]] = {}
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
        lora_requests: Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The final outputs of all prompts, generated as one batch, in their order."""
        if self.kind != "async_mp":
            return self.llm.generate(prompts, params, use_tqdm=False, priority=priority, lora_request=lora_requests)
        if isinstance(prompts, (str, dict)) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        priorities, adapters = priority or [0] * len(prompts), lora_requests or [None] * len(prompts)
        return self._loop.run(self._generate_async(prompts, all_params, priorities, adapters))

    def encode(self, prompts: Sequence[Any], params: PoolingParams | Sequence[PoolingParams]) -> list[Any]:
        """What the pooler gives for each prompt, in their order; all run as one batch."""
        all_params = [params] * len(prompts) if isinstance(params, PoolingParams) else params
        if self.kind != "async_mp":
            return self.llm.encode(prompts, all_params, use_tqdm=False)
        return self._loop.run(self._encode_async(prompts, all_params))

    def generate_at_once(self, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """`generate`, but nothing runs before all of it has reached the core."""
        self.call("pause_generation", "keep")
        if self.kind != "async_mp":
            self.llm.enqueue(prompts, params, use_tqdm=False)
            self.llm.resume_generation()
            return self.llm.wait_for_completion(use_tqdm=False)
        return self._loop.run(self._at_once_async(prompts, params))

    def chat(
        self,
        conversations: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams],
        tokenization_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """`generate` for conversations: `LLM.chat`, or the renderer's prompts handed to AsyncLLM."""
        if self.kind != "async_mp":
            return self.llm.chat(
                conversations, params, use_tqdm=False, tokenization_kwargs=tokenization_kwargs, **options
            )
        renderer = self.async_llm.renderer
        tok_params = renderer.default_chat_tok_params.with_kwargs(tokenization_kwargs)
        prompts = renderer.render_chat(to_conversation_list(conversations), ChatParams(**options), tok_params)[1]
        return self.generate(prompts, params)

    def generate_in_waves(
        self, waves: Sequence[Sequence[Any]], params: SamplingParams, priorities: Sequence[list[int]]
    ) -> list[RequestOutput]:
        """The final outputs of all waves' prompts, in their order.

        The scheduler is paused until all of the first wave wait. Each further wave comes when another request ends.
        """
        self.call("pause_generation", "keep")
        if self.kind == "async_mp":
            return self._loop.run(self._waves_async(waves, params, priorities))
        self.llm.enqueue(waves[0], params, priority=priorities[0], use_tqdm=False)
        self.llm.resume_generation()
        ended: list[RequestOutput] = []
        for prompts, wave_priorities in zip(waves[1:], priorities[1:], strict=True):
            num_ended = len(ended)
            while len(ended) == num_ended:
                ended += [output for output in self.llm.llm_engine.step() if output.finished]
            self.llm.enqueue(prompts, params, priority=wave_priorities, use_tqdm=False)
        ended += self.llm.wait_for_completion(use_tqdm=False)
        return sorted(ended, key=lambda output: int(output.request_id))

    def stream(
        self, prompt: Any, params: SamplingParams, abort_after: int | None = None, request_id: str | None = None
    ) -> list[RequestOutput]:
        """Every output of one request, as `params.output_kind` shapes them.

        With `abort_after` the request is aborted once that many outputs have come: by `abort_request` in the sync
        engines, which then yield nothing more, and by leaving the loop in AsyncLLM, where it is asked for anew if its
        end has come with these outputs.
        """
        request_id = request_id or self._new_id()
        if self.kind == "async_mp":
            for _ in range(ATTEMPTS):
                outputs = self._loop.run(self._stream_async(prompt, params, request_id, abort_after))
                if abort_after is None or not outputs[-1].finished:
                    return outputs
            raise AssertionError(f"{ATTEMPTS} requests ended before they were aborted")
        own_id = getattr(prompt, "request_id", request_id)  # a prepared request brings one
        internal_id = self.llm.llm_engine.add_request(request_id, prompt, params)
        outputs = []
        while not (outputs and outputs[-1].finished):
            outputs += self._step_for(own_id)
            if abort_after is not None and len(outputs) >= abort_after:
                self.llm.llm_engine.abort_request([internal_id], internal=True)
                break
        return outputs

    def with_neighbour(
        self, prompt: Any, params: SamplingParams, action: Callable[[], None], request_id: str | None = None
    ) -> RequestOutput:
        """Runs `action` while a request is in the middle of its output; returns that request's final output.

        The action may use `stream`.
        """
        params = params.clone()
        params.output_kind = RequestOutputKind.CUMULATIVE
        request_id = request_id or self._new_id()
        if self.kind == "async_mp":
            started = threading.Event()
            finished = self._loop.start(self._neighbour_async(prompt, params, request_id, started))
            assert started.wait(DEADLINE)
            action()
            return finished.result(DEADLINE)
        self.llm.llm_engine.add_request(request_id, prompt, params)
        outputs: list[RequestOutput] = []
        while not outputs:
            outputs += self._step_for(request_id)
        action()
        while not outputs[-1].finished:
            outputs += self._step_for(request_id)
        return outputs[-1]

    def while_held(
        self, prompt: Any, params: SamplingParams, action: Callable[[], None], request_id: str | None = None
    ) -> RequestOutput:
        """Runs `action` while the scheduler is paused with a request in it; returns that request's final output."""
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        request_id = request_id or self._new_id()
        self.call("pause_generation", "keep")
        if self.kind == "async_mp":
            collector = self.call("add_request", request_id, prompt, params)
        else:
            self.llm.llm_engine.add_request(request_id, prompt, params)
        try:
            action()
        finally:
            self.call("resume_generation")
        if self.kind == "async_mp":
            return self._loop.run(collector.get())
        outputs: list[RequestOutput] = []
        while not outputs:
            outputs = self._step_for(request_id)
        return outputs[-1]

    def under_one_id(self, request_id: str, prompts: Sequence[str], params: SamplingParams) -> dict[str, RequestOutput]:
        """The final outputs, by prompt, of requests that run at the same time under the same id of the caller's."""
        if self.kind == "async_mp":
            return self._loop.run(self._under_one_id_async(request_id, prompts, params))
        for prompt in prompts:
            self.llm.llm_engine.add_request(request_id, prompt, params)
        finished: dict[str, RequestOutput] = {}
        while len(finished) < len(prompts):
            outputs = self._step_for(request_id)
            finished |= {str(output.prompt): output for output in outputs if output.finished}
        return finished

    def is_idle(self) -> bool:
        """Whether neither side knows of a request any more, and no KV block is in use."""
        processor = self.engine.output_processor if self.kind == "async_mp" else self.llm.llm_engine.output_processor
        tables = (processor.request_states, processor.parent_requests, processor.external_req_ids)
        counts = list(self.utility("get_request_counts"))
        return not any(tables) and counts == [0, 0] and bool(self.call("reset_prefix_cache"))

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The engine's method of that name, awaited where it is a coroutine function."""
        return self.result_of(getattr(self.engine, method)(*args, **kwargs))

    def result_of(self, call: Any) -> Any:
        """Of a coroutine, what it returns; else `call` itself."""
        return self._loop.run(call) if asyncio.iscoroutine(call) else call

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

    def _new_id(self) -> str:
        self._ids += 1
        return f"test-{self._ids}"

    def _step_for(self, request_id: str) -> list[RequestOutput]:
        """The outputs of one request. Those of others are kept until they are asked for."""
        if request_id not in self._others:
            assert self.llm.llm_engine.has_unfinished_requests(), f"{request_id} is gone without a final output"
            for output in self.llm.llm_engine.step():
                self._others.setdefault(output.request_id, []).append(output)
        return self._others.pop(request_id, [])

    async def _generate_async(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        priorities: list[int],
        adapters: Sequence[LoRARequest | None],
    ) -> list[RequestOutput]:
        batch = zip(prompts, params, priorities, adapters, strict=True)
        tasks = [asyncio.ensure_future(self._final_output(*each)) for each in batch]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _encode_async(self, prompts: Sequence[Any], params: Sequence[PoolingParams]) -> list[Any]:
        async def pooled(prompt: Any, own_params: PoolingParams) -> Any:
            self._ids += 1
            outputs = [out async for out in self.async_llm.encode(prompt, own_params, f"pooled-{self._ids}")]
            assert len(outputs) == 1 and outputs[0].finished
            return outputs[0]

        return list(await asyncio.gather(*map(pooled, prompts, params)))

    async def _at_once_async(self, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        batch = zip(prompts, params, strict=True)
        tasks = [asyncio.ensure_future(self._final_output(prompt, each, 0)) for prompt, each in batch]
        await self._resume_with(sum(each.n for each in params))
        return list(await asyncio.gather(*tasks))

    async def _resume_with(self, num_requests: int) -> None:
        while sum(await _awaited(self.async_llm, "get_request_counts", ())) < num_requests:
            pass  # each round is a message to the core and back
        await self.async_llm.resume_generation()

    async def _final_output(
        self, prompt: Any, params: SamplingParams, priority: int, adapter: LoRARequest | None = None
    ) -> RequestOutput:
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        stream = self.async_llm.generate(prompt, params, self._new_id(), priority=priority, lora_request=adapter)
        return [output async for output in stream][-1]

    async def _waves_async(
        self, waves: Sequence[Sequence[Any]], params: SamplingParams, priorities: Sequence[list[int]]
    ) -> list[RequestOutput]:
        tasks = []
        for prompts, wave_priorities in zip(waves, priorities, strict=True):
            if tasks:
                num_ended = sum(task.done() for task in tasks)
                while sum(task.done() for task in tasks) == num_ended:
                    await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
            for prompt, priority in zip(prompts, wave_priorities, strict=True):
                tasks.append(asyncio.ensure_future(self._final_output(prompt, params, priority)))
            if prompts is waves[0]:
                await self._resume_with(len(prompts))
        return list(await asyncio.gather(*tasks))

    async def _under_one_id_async(
        self, request_id: str, prompts: Sequence[str], params: SamplingParams
    ) -> dict[str, RequestOutput]:
        async def final_output(prompt: str) -> RequestOutput:
            return [output async for output in self.async_llm.generate(prompt, params, request_id)][-1]

        outputs = await asyncio.gather(*map(final_output, prompts))
        return dict(zip(prompts, outputs, strict=True))

    async def _neighbour_async(
        self, prompt: Any, params: SamplingParams, request_id: str, started: threading.Event
    ) -> RequestOutput:
        outputs = []
        async for output in self.async_llm.generate(prompt, params, request_id):
            outputs.append(output)
            started.set()
        return outputs[-1]

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
