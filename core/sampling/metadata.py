"""`SamplingBatch`: what each row of the batch asks of the sampler. Kept up to date, row by row, by the model runner."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...protocol.config import VllmConfig
from ...protocol.resolved_sampling import ResolvedSampling
from ...shared.logits_processors import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    load_logits_processors,
)
from ..kernels.sampling import Allowed, DrawParams
from ..lazy_torch import inference_mode, torch
from ..scheduler.runner_messages import NewRequestData
from . import noise
from .logit_bias import LogitBias
from .logits_processors.guarded import GuardedProcessor
from .penalties import TokenCounts, uses_penalties
from .token_masks import TokenMask, token_mask

_NOISE_AHEAD = 16
"""Steps for which the randomness is worked out at once."""


class SamplingBatch:
    """Parameters, token counts and logits processors of the requests in the batch, by row.

    Rows change with `add` and `remove`; `append_tokens` records what was generated. Arrays are indexed
    by row: temperature (0: greedy), min_p, top_p [max_num_reqs] float64; top_k, num_tokens int64; noise_seeds uint64.
    """

    def __init__(self, vllm_config: VllmConfig, max_num_reqs: int, device: torch.device | None = None) -> None:
        self.vocab_size = vllm_config.model_config.vocab_size
        self.temperature = np.zeros(max_num_reqs, dtype=np.float64)
        self.min_p = np.zeros(max_num_reqs, dtype=np.float64)
        self.top_k = np.zeros(max_num_reqs, dtype=np.int64)
        self.top_p = np.ones(max_num_reqs, dtype=np.float64)
        self.noise_seeds = np.zeros(max_num_reqs, dtype=np.uint64)
        self.num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.counts: dict[int, TokenCounts] = {}  # rows with penalties
        self.logprobs: dict[int, ResolvedSampling] = {}  # rows that want logprobs
        self.masks: dict[int, TokenMask] = {}  # rows that rule out tokens
        self.biases: dict[int, LogitBias] = {}  # rows with a logit_bias
        self._rows: set[int] = set()
        self._output_token_ids: dict[int, list[int]] = {}  # rows where somebody looks at what was generated
        paths = vllm_config.model_config.logits_processors
        self.processors: list[GuardedProcessor] = []
        if paths:
            loaded = load_logits_processors(paths, vllm_config, device or torch.device("cpu"))
            self.processors = [GuardedProcessor(each) for each in loaded]
        self.active_processors: list[LogitsProcessor] = []
        self._params: DrawParams | None = None  # of `_drawn_rows`, as long as they alone go on
        self._drawn_rows = np.empty(0, dtype=np.int64)
        self._noise = np.empty((_NOISE_AHEAD, 0))  # of their next tokens
        self._is_random = False  # whether any of them is not greedy
        self._num_appended = 0  # tokens to each of them that `num_tokens` lacks
        self._updates: list[BatchUpdate] = []

    @property
    def batch_size(self) -> int:
        """One more than the last row in use."""
        return max(self._rows, default=-1) + 1

    def add(self, row: int, request: NewRequestData) -> None:
        """Put a request into a row, in place of any that sat there.

        Raises ValueError, and changes nothing, when a user's logits processor refuses it.
        """
        params, shown = request.sampling_params, request.sampling_params.for_processors
        for processor in self.processors:
            assert shown is not None
            processor.check_params(shown)
        self._enter_appended()
        self._forget(row)
        self._rows.add(row)
        prompt, output = request.token_ids[: request.num_prompt_tokens], request.token_ids[request.num_prompt_tokens :]
        self.temperature[row] = params.temperature
        self.min_p[row] = params.min_p
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.noise_seeds[row] = request.noise_seed % 2**64
        self.num_tokens[row] = len(request.token_ids)
        if uses_penalties(params):
            self.counts[row] = TokenCounts(params, [] if request.prompt_embeds is not None else prompt, output)
        if params.num_logprobs is not None:
            self.logprobs[row] = params
        if params.logit_bias:
            self.biases[row] = LogitBias(params)
        if (mask := token_mask(params, output, self.vocab_size)) is not None:
            self.masks[row] = mask
        if self.processors or mask is not None:
            self._output_token_ids[row] = output
        if shown is not None:
            prompt_ids = None if request.prompt_embeds is not None else prompt
            self._update().added.append(AddedRequest(row, shown, prompt_ids, output))

    def remove(self, row: int) -> None:
        """Nothing, where no request has the row."""
        if row not in self._rows:
            return
        self._enter_appended()
        self._forget(row)
        self._rows.discard(row)
        self._update(before_added=True).removed.append(row)

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Record one generated token for each of `rows` ([n] int64, distinct)."""
        if rows is not self._drawn_rows:
            self._enter_appended()
            self._drawn_rows = rows
        self._num_appended += 1
        if self.counts or self._output_token_ids:
            self._show(rows, token_ids)

    def append_drafted(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """As `append_tokens` behind a step with drafts: a row may come several times, its tokens in their order."""
        self._enter_appended()
        np.add.at(self.num_tokens, rows, 1)
        self._show(rows, token_ids)

    def _show(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Tell of the new tokens whoever looks at what was generated."""
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            if row in self.counts:
                self.counts[row].append(token_id)
            if row in self._output_token_ids:
                self._output_token_ids[row].append(token_id)

    def draw_params(self, rows: np.ndarray, ahead: np.ndarray | None = None) -> DrawParams:
        """What the draw needs for these rows, [n] int64. As long as the same array comes, it is the same object.

        `ahead`: [n] int64, how many tokens lie between a row's last one and the one drawn, where they are drafts.
        """
        if rows is not self._drawn_rows or self._params is None:
            self._enter_appended()
            temperature, uniforms = self.temperature[rows], np.zeros(len(rows))
            self._params = DrawParams(temperature, self.min_p[rows], self.top_k[rows], self.top_p[rows], uniforms)
            self._drawn_rows, self._is_random = rows, bool(temperature.any())
        if ahead is not None:
            self._params.uniforms[:] = noise.uniform(self.noise_seeds[rows], (self.num_tokens[rows] + ahead)[None])[0]
            self._drawn_rows = np.empty(0, dtype=np.int64)
            return self._params
        if self._is_random:
            step = self._num_appended % _NOISE_AHEAD
            if step == 0:
                places = self.num_tokens[rows] + self._num_appended + np.arange(_NOISE_AHEAD)[:, None]
                self._noise = noise.uniform(self.noise_seeds[rows], places)
            self._params.uniforms[:] = self._noise[step]
        return self._params

    def allowed(self, rows: np.ndarray, grammar: Allowed | None) -> Allowed | None:
        """What the lines of `rows`, [n] int64, may have, all constraints together; None where all may have anything.

        `grammar`: what the grammars of some lines allow.
        """
        masked = [(line, row) for line, row in enumerate(rows.tolist()) if row in self.masks] if self.masks else []
        if not masked:
            return grammar
        bits = {} if grammar is None else dict(zip(grammar.lines.tolist(), grammar.bitmask, strict=True))
        for line, row in masked:
            bits[line] = self.masks[row].allowed(bits.get(line))
            if self.masks[row].is_spent:
                del self.masks[row]
        return Allowed(np.array(list(bits)), np.stack(list(bits.values())))

    def explain(self, failed: dict[int, str], rows: np.ndarray) -> None:
        """Says of the lines in `failed` whose processor failed that it did, and how. `rows`: [n], the lines' rows."""
        for processor in self.processors:
            for line in failed:
                failed[line] = processor.failures.get(int(rows[line]), failed[line])

    def _enter_appended(self) -> None:
        if self._num_appended:
            self.num_tokens[self._drawn_rows] += self._num_appended
        self._num_appended, self._params = 0, None

    def update_processors(self) -> None:
        """Tell the logits processors what has changed since the last call."""
        if self.processors:
            self._update_processors()
        self._updates.clear()

    @inference_mode
    def _update_processors(self) -> None:
        for update in self._updates:
            update.batch_size = self.batch_size
        changes: list[BatchUpdate] | list[None] = self._updates or [None]
        for processor in self.processors:
            for change in changes:
                processor.update_state(change)
        self.active_processors = [processor for processor in self.processors if processor.is_active()]

    def _forget(self, row: int) -> None:
        for table in self._tables():
            table.pop(row, None)

    def _tables(self) -> tuple[dict[int, Any], ...]:
        return self.counts, self.logprobs, self.masks, self.biases, self._output_token_ids

    def _update(self, before_added: bool = False) -> BatchUpdate:
        """The update that takes a change in its proper order: what is removed comes before what is added."""
        last = self._updates[-1] if self._updates else None
        if last is None or (before_added and last.added):
            last = BatchUpdate(0)
            self._updates.append(last)
        return last
