"""Drives a ModelRunner with hand-made scheduler outputs: blocks are dealt out in order, chunks as the test says."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from corespan.core.scheduler.runner_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from corespan.core.worker.worker import Worker
from corespan.protocol.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from corespan.protocol.outputs import LogprobsArrays
from corespan.protocol.params import SamplingParams
from corespan.protocol.resolved_sampling import resolved


def make_vllm_config(
    model: str,
    hf_config: dict[str, Any],
    *,
    dtype: str = "float32",
    quantization: str | None = None,
    max_model_len: int = 256,
    max_num_seqs: int = 32,
) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(
            model=model, served_model_name="m", tokenizer=None, hf_config=hf_config, dtype=dtype,
            quantization=quantization, max_model_len=max_model_len,
        ),
        cache_config=CacheConfig(block_size=16),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=4096, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        ),
    )  # fmt: skip


@dataclass
class DrivenRequest:
    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: list[list[int]]  # by KV group
    computed: int = 0
    entered: bool = False
    prompt_embeds: np.ndarray | None = None
    prompt_logprobs: list[Any] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


@dataclass
class StepResult:
    """The runner's output, by the test's names."""

    req_ids: list[str]
    sampled_token_ids: list[int]
    logprobs: LogprobsArrays | None
    prompt_logprobs: dict[str, LogprobsArrays]
    failed: dict[str, str]


class StepDriver:
    """A scheduler reduced to the test's wishes: `step` computes exactly the chunks it is told."""

    def __init__(self, worker: Worker, num_blocks: int = 512) -> None:
        self.worker = worker
        worker.initialize_kv_cache(num_blocks)
        self.block_size = worker.vllm_config.cache_config.block_size
        self.num_groups = len(worker.kv_groups())
        self.next_block = 1
        self.requests: dict[str, DrivenRequest] = {}
        self._removed_rows: list[int] = []

    def add(
        self,
        req_id: str,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        shared_with: str | None = None,
        num_shared_blocks: int = 0,
        prompt_embeds: np.ndarray | None = None,
    ) -> None:
        """`shared_with`: begin with that request's first `num_shared_blocks` blocks, as after a prefix-cache hit."""
        source = self.requests[shared_with].block_ids if shared_with else [[]] * self.num_groups
        block_ids = [ids[:num_shared_blocks] for ids in source]
        taken = {request.row for request in self.requests.values()}
        self.requests[req_id] = DrivenRequest(
            next(row for row in itertools.count() if row not in taken),
            list(prompt),
            len(prompt),
            params or SamplingParams(temperature=0, max_tokens=1000),
            block_ids,
            num_shared_blocks * self.block_size,
            prompt_embeds=prompt_embeds,
        )

    def remove(self, req_id: str) -> None:
        request = self.requests.pop(req_id)
        if request.entered:
            self._removed_rows.append(request.row)

    def step(
        self, chunks: dict[str, int], structured: Sequence[str] = (), bitmask: np.ndarray | None = None
    ) -> StepResult:
        """Compute so many tokens of each request and append what was sampled. `bitmask` has a line for each of
        `structured`.
        """
        new, new_block_ids = [], {}
        for req_id, count in chunks.items():
            request = self.requests[req_id]
            fresh = self._grow(request, request.computed + count)
            if request.entered:
                new_block_ids[request.row] = fresh
            else:
                new.append(self._new_request_data(request))
                request.entered = True
        removed, self._removed_rows = self._removed_rows, []
        rows = np.array([self.requests[req_id].row for req_id in chunks], dtype=np.int64)
        lengths = np.array(list(chunks.values()), dtype=np.int64)
        planned = SchedulerOutput(new, removed, rows, lengths, sum(chunks.values()), new_block_ids)
        planned.structured_rows = [self.requests[req_id].row for req_id in structured]
        planned.grammar_bitmask = bitmask
        result = self._named(self.worker.execute_model(planned))
        for req_id, count in chunks.items():
            self.requests[req_id].computed += count
        for req_id, token in zip(result.req_ids, result.sampled_token_ids, strict=True):
            self.requests[req_id].token_ids.append(token)
        for req_id, logprobs in result.prompt_logprobs.items():
            self.requests[req_id].prompt_logprobs.append(logprobs)
        return result

    def _named(self, output: ModelRunnerOutput) -> StepResult:
        name_of = {request.row: req_id for req_id, request in self.requests.items()}
        return StepResult(
            [name_of[row] for row in output.rows.tolist()],
            output.sampled_token_ids.tolist(),
            output.logprobs,
            {name_of[row]: logprobs for row, logprobs in output.prompt_logprobs.items()},
            {name_of[row]: error for row, error in output.failed.items()},
        )

    def flush(self) -> None:
        """Tell the runner of removals without computing anything."""
        self.step({})

    def run(self, max_new_tokens: int, chunk: int = 10**9) -> None:
        """Run everything to `max_new_tokens` output tokens, no request computing more than `chunk` tokens a step."""
        while True:
            chunks = {
                req_id: min(chunk, len(request.token_ids) - request.computed)
                for req_id, request in self.requests.items()
                if len(request.output) < max_new_tokens
            }
            if not chunks:
                return
            self.step(chunks)

    def _grow(self, request: DrivenRequest, num_tokens: int) -> list[list[int]]:
        return self.give_blocks(request, -(-num_tokens // self.block_size) - len(request.block_ids[0]))

    def give_blocks(self, request: DrivenRequest, count: int) -> list[list[int]]:
        """New blocks for the request, so many in each KV group."""
        fresh = [self.take_blocks(count) for _ in range(self.num_groups)]
        for known, new in zip(request.block_ids, fresh, strict=True):
            known += new
        return fresh

    def take_blocks(self, count: int) -> list[int]:
        first = self.next_block
        self.next_block += max(0, count)
        return list(range(first, self.next_block))

    def _new_request_data(self, request: DrivenRequest) -> NewRequestData:
        return NewRequestData(
            request.row, request.token_ids, request.num_prompt_tokens, resolved(request.params), 0,
            request.block_ids,
            request.computed, request.prompt_embeds,
        )  # fmt: skip
