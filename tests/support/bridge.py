"""One face over the three clients, for tests of the bridge itself: requests of token ids, no text, no model."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from deadlines import DEADLINE
from fake_executor import VOCAB_SIZE, expected_tokens

from corespan.client import make_async_client, make_client
from corespan.client.base import AsyncEngineCoreClient
from corespan.protocol.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from corespan.protocol.outputs import EngineCoreOutputs, FinishReason
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import ResolvedSampling

FAKE_EXECUTOR = "fake_executor:FakeExecutor"


def fake_config(
    max_model_len: int = 256,
    max_num_seqs: int = 16,
    num_gpu_blocks_override: int | None = None,
    parallel: dict[str, Any] | None = None,
    **fake: Any,
) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(
            model="/nonexistent",
            served_model_name="fake",
            tokenizer=None,
            hf_config={"vocab_size": VOCAB_SIZE, "fake": fake},
            dtype="float32",
            max_model_len=max_model_len,
        ),
        cache_config=CacheConfig(num_gpu_blocks_override=num_gpu_blocks_override),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=max(256, max_num_seqs), max_num_seqs=max_num_seqs, max_model_len=max_model_len
        ),
        parallel_config=ParallelConfig(**(parallel or {})),
    )


def request(
    request_id: str, prompt: Iterable[int] = (1, 2, 3), max_tokens: int = 5, seed: int = 7, **sampling: Any
) -> EngineCoreRequest:
    params = ResolvedSampling(max_tokens=max_tokens, **sampling)
    return EngineCoreRequest(request_id, list(prompt), params, noise_seed=seed)


def tokens_of(wanted: EngineCoreRequest) -> list[int]:
    """What the request generates when nothing goes wrong."""
    assert wanted.params.max_tokens is not None
    return expected_tokens(wanted.noise_seed, len(wanted.prompt_token_ids), wanted.params.max_tokens)


async def collect_async(client: AsyncEngineCoreClient, *request_ids: str) -> dict[str, list[int]]:
    """The tokens of these requests, once all of them have finished; nobody else's may come."""
    tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
    unfinished = set(request_ids)
    while unfinished:
        for output in (await client.get_output_async()).outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                unfinished.remove(output.request_id)
    return tokens


class Bridge:
    """A client of any kind, used blockingly. An asyncio client lives in a loop in a thread of its own."""

    def __init__(self, kind: str, executor_class: str = FAKE_EXECUTOR, **options: Any) -> None:
        self.kind = kind
        self.loop: asyncio.AbstractEventLoop | None = None
        arguments = fake_config(**options), executor_class, True
        self.client: Any = (
            make_async_client(*arguments) if kind == "async_mp" else make_client(kind != "inproc", *arguments)
        )
        if kind == "async_mp":
            self.loop = asyncio.new_event_loop()
            self.thread = threading.Thread(target=self.loop.run_forever, name="test-event-loop", daemon=True)
            self.thread.start()

    def _run(self, awaitable: Any) -> Any:
        async def run() -> Any:
            return await awaitable

        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(DEADLINE)

    def add(self, new: EngineCoreRequest) -> None:
        self._run(self.client.add_request_async(new)) if self.loop else self.client.add_request(new)

    def abort(self, *request_ids: str) -> None:
        ids = list(request_ids)
        self._run(self.client.abort_requests_async(ids)) if self.loop else self.client.abort_requests(ids)

    def get_output(self) -> EngineCoreOutputs:
        return self._run(self.client.get_output_async()) if self.loop else self.client.get_output()

    def call(self, method: str, *args: object) -> Any:
        result = self.client.call_utility(method, *args)
        return self._run(result) if self.loop else result

    def collect(self, *request_ids: str) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
        """Tokens and finish reasons, once all these requests have finished."""
        tokens: dict[str, list[int]] = defaultdict(list)
        reasons: dict[str, FinishReason] = {}
        while not set(request_ids) <= set(reasons):
            for output in self.get_output().outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    reasons[output.request_id] = output.finish_reason
        return dict(tokens), reasons

    def generate(self, *requests: EngineCoreRequest) -> dict[str, list[int]]:
        for new in requests:
            self.add(new)
        return self.collect(*(new.request_id for new in requests))[0]

    def close(self) -> None:
        self.client.shutdown()
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(DEADLINE)
            self.loop.close()
