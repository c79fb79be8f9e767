"""Drives a `SamplingBatch` and a `Sampler` without a model: made-up logits, exact distributions, users' processors."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from corespan.core.sampling.logits_processors import AddedRequest, BatchUpdate, LogitsProcessor
from corespan.core.sampling.metadata import SamplingBatch
from corespan.core.sampling.sampler import Sampler, SamplerOutput
from corespan.core.scheduler.runner_messages import NewRequestData
from corespan.protocol.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from corespan.protocol.params import SamplingParams
from corespan.protocol.resolved_sampling import ResolvedSampling, resolved

MAX_ROWS = 16


def vllm_config(vocab_size: int, **model_fields: Any) -> VllmConfig:
    settings = {"model": "/m", "served_model_name": "m", "tokenizer": None, "hf_config": {"vocab_size": vocab_size}}
    return VllmConfig(
        model_config=ModelConfig(**{**settings, "max_model_len": 4096, **model_fields}),
        cache_config=CacheConfig(),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=4096, max_num_seqs=256, max_model_len=4096),
    )


Params = SamplingParams | ResolvedSampling


def as_resolved(params: Params) -> ResolvedSampling:
    return resolved(params, for_processors=params) if isinstance(params, SamplingParams) else params


def new_request(
    params: Params, seed: int = 0, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = ()
) -> NewRequestData:
    return NewRequestData(0, [*prompt, *output], len(prompt), as_resolved(params), seed, [], 0)


def sample_rows(
    logits: torch.Tensor,
    params: Sequence[Params],
    seeds: Sequence[int] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    outputs: Sequence[Sequence[int]] | None = None,
    mode: Any = "raw_logprobs",
    **model_fields: Any,
) -> SamplerOutput:
    """One step over a fresh batch: row i of logits under params[i]."""
    num_rows, vocab_size = logits.shape
    batch = SamplingBatch(vllm_config(vocab_size, **model_fields), num_rows)
    for row in range(num_rows):
        seed = row if seeds is None else seeds[row]
        prompt = (1, 2, 3) if prompts is None else prompts[row]
        batch.add(row, new_request(params[row], seed, prompt, () if outputs is None else outputs[row]))
    return Sampler(batch, mode).sample(logits.clone(), np.arange(num_rows))


def draw_many(
    logits: torch.Tensor,
    params: Params,
    count: int,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
) -> np.ndarray:
    """`count` independent draws from one row of logits."""
    rows = logits.expand(count, -1)
    drawn = sample_rows(rows, [params] * count, range(count), [prompt] * count, [output] * count)
    assert not drawn.failed
    return drawn.token_ids


def exact_distribution(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = ()
) -> np.ndarray:
    """What the documentation promises, written down slowly in float64: [vocab]."""
    values = logits.double().numpy().copy()
    for token_id in {*prompt, *output}:
        values[token_id] *= params.repetition_penalty if values[token_id] <= 0 else 1 / params.repetition_penalty
    for token_id in set(output):
        values[token_id] -= params.frequency_penalty * list(output).count(token_id) + params.presence_penalty
    for token_id, bias in (params.logit_bias or {}).items():
        values[token_id] += bias
    if params.allowed_token_ids is not None:
        values[np.setdiff1d(np.arange(len(values)), params.allowed_token_ids)] = -np.inf
    weights = np.exp((values - values.max()) / params.temperature)
    weights[weights < params.min_p] = 0.0
    order = np.lexsort((np.arange(len(weights)), -weights))
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0.0
    probabilities = weights / weights.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= params.top_p]] = 0.0
    return probabilities / probabilities.sum()


class MadeUpModel:
    """Logits that depend on all tokens so far and on nothing else."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        generator = np.random.default_rng(zlib.crc32(np.array(token_ids, dtype=np.int64).tobytes()))
        return torch.from_numpy(generator.normal(0.0, 3.0, self.vocab_size).astype(np.float32))


class Loop:
    """Generates with a made-up model for requests that join, leave and wait."""

    def __init__(self, vocab_size: int, **model_fields: Any) -> None:
        self.model = MadeUpModel(vocab_size)
        self.batch = SamplingBatch(vllm_config(vocab_size, **model_fields), MAX_ROWS)
        self.sampler = Sampler(self.batch)
        self.tokens: dict[int, list[int]] = {}
        self._lines = np.empty(0, dtype=np.int64)

    def add(self, row: int, request: NewRequestData) -> None:
        self.batch.add(row, request)
        self.tokens[row] = list(request.token_ids)

    def remove(self, row: int) -> list[int]:
        self.batch.remove(row)
        return self.tokens.pop(row)

    def step(self, rows: Sequence[int]) -> SamplerOutput:
        """One token for each of `rows`; the others wait."""
        logits = torch.stack([self.model.logits(self.tokens[row]) for row in rows])
        if self._lines.tolist() != list(rows):  # else the same array, as the model runner passes it
            self._lines = np.array(rows, dtype=np.int64)
        lines = self._lines
        output = self.sampler.sample(logits, lines)
        self.batch.append_tokens(lines, output.token_ids)
        for row, token_id in zip(rows, output.token_ids.tolist(), strict=True):
            self.tokens[row].append(token_id)
        return output


def generate_alone(request: NewRequestData, num_tokens: int, vocab_size: int, **model_fields: Any) -> list[int]:
    """All tokens of the request after `num_tokens` steps in a batch of its own."""
    loop = Loop(vocab_size, **model_fields)
    loop.add(0, request)
    for _ in range(num_tokens):
        loop.step([0])
    return loop.tokens[0]


class _PerRequest(LogitsProcessor):
    """Keeps each request's params by row, as a user would write it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[int, AddedRequest] = {}
        self.shapes: list[tuple[int, ...]] = []
        self.seen = torch.empty(0, 0)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.requests.pop(row, None)
        for request in batch_update.added:
            self.requests[request.row] = request


class OnlyMultiplesProcessor(_PerRequest):
    """Allows only multiples of extra_args["multiple"], and of the number of tokens generated so far plus two."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if (params.extra_args or {}).get("multiple") == 0:
            raise ValueError("extra_args['multiple'] must not be 0")

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(logits.shape))
        self.seen = logits.clone()
        ids = torch.arange(logits.shape[1])
        for row, request in self.requests.items():
            multiple = (request.params.extra_args or {}).get("multiple")
            if multiple:
                logits[row, ids % (multiple + len(request.output_token_ids)) != 0] = float("-inf")
        return logits


class SharpeningProcessor(_PerRequest):
    """Multiplies scaled logits by extra_args["sharpen"]: the largest stays the largest. Returns a new tensor."""

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        factors = [(self.requests[row].params.extra_args or {}).get("sharpen", 1.0) if row in self.requests else 1.0
                   for row in range(logits.shape[0])]  # fmt: skip
        return logits * torch.tensor(factors)[:, None] + 1.0
