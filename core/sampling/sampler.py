"""`Sampler`: from a step's logits to one token per row, with logprobs where asked for. Called by the model runner.

The order is: raw logprobs, grammar, allowed tokens, bad words, min_tokens, logit_bias, users' processors, penalties,
then greedy's argmax or temperature, min_p, users' argmax-invariant processors, top-k and top-p, the draw. What rules
out whole tokens is left to the draw where no processor has to see it. Every stage touches only the rows that ask for
it, and works row by row, so that a row's token never depends on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from ...protocol.config import LogprobsMode
from ...protocol.outputs import LogprobsArrays
from ...protocol.resolved_sampling import ResolvedSampling
from ...shared.logits_processors import LogitsProcessor
from ..kernels.memory import Array, Buffer, as_buffer, as_tensor
from ..kernels.sampling import Allowed, DrawParams
from ..lazy_torch import inference_mode, torch
from .draw import draw, masked
from .logit_bias import add_biases
from .logprobs import gather_allowed_logprobs, gather_logprobs, merge_rows
from .metadata import SamplingBatch
from .penalties import apply_penalties
from .torch_draw import mask_below_min_p

_USUAL_K = 256


@dataclass(slots=True)
class SamplerOutput:
    """token_ids: [rows] int64, -1 where the row failed; `failed`: position of the row -> what is wrong with it.

    `logprobs` has a line per row if any row wants logprobs; a row takes its own first k + 1 columns.
    """

    token_ids: np.ndarray
    logprobs: LogprobsArrays | None = None
    failed: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Samples for the requests of one `SamplingBatch`."""

    def __init__(self, batch: SamplingBatch, logprobs_mode: LogprobsMode = "raw_logprobs") -> None:
        self.batch = batch
        self.report_logits = logprobs_mode.endswith("logits")
        self.report_raw = logprobs_mode.startswith("raw")

    def sample(
        self,
        logits: Array,
        rows: np.ndarray,
        grammar_rows: np.ndarray | None = None,
        grammar_bitmask: np.ndarray | None = None,
        ahead: np.ndarray | None = None,
    ) -> SamplerOutput:
        """Draw a token for each row of logits.

        logits: [n, vocab] float32, may be overwritten; rows: [n] int64, the batch row of each line of logits.
        grammar_rows: [m] int64, lines of logits that a grammar binds; grammar_bitmask: [m, ceil(vocab / 32)] int32,
        bit set = token allowed. ahead: [n] int64, as for `SamplingBatch.draw_params`.
        """
        batch = self.batch
        batch.update_processors()
        shaped = batch.masks or batch.biases or batch.active_processors or batch.counts or batch.logprobs
        if grammar_rows is None and not shaped:
            token_ids, largest = draw(logits, batch.draw_params(rows, ahead))
            output = SamplerOutput(token_ids, failed=_failures(largest))
        else:
            sample = self._sample_shaped if isinstance(logits, Buffer) else inference_mode(self._sample_shaped)
            output = sample(logits, rows, grammar_rows, grammar_bitmask, ahead)
        for i in output.failed:
            output.token_ids[i] = -1
        if output.failed:
            batch.explain(output.failed, rows)
        return output

    def _sample_shaped(
        self,
        logits: Array,
        rows: np.ndarray,
        grammar_rows: np.ndarray | None,
        grammar_bitmask: np.ndarray | None,
        ahead: np.ndarray | None,
    ) -> SamplerOutput:
        """As `sample`, where some row asks for more than a draw."""
        batch = self.batch
        wanted = _lines_of(rows, batch.logprobs)
        processors = [p for p in batch.active_processors if not p.is_argmax_invariant()]
        raw = None
        if wanted and self.report_raw:
            unchanged = not (processors or batch.biases or batch.counts)
            raw = logits if unchanged and len(wanted) == len(rows) else logits[wanted]
        grammar = None
        if grammar_rows is not None and grammar_bitmask is not None and len(grammar_rows):
            grammar = Allowed(grammar_rows, grammar_bitmask.view(np.uint32))
        allowed = batch.allowed(rows, grammar)
        mask_first = allowed is not None and bool(batch.active_processors)  # they see what the constraints leave
        work = self._changed(masked(logits, allowed) if mask_first and allowed else logits, rows, processors)

        params = batch.draw_params(rows, ahead)
        invariant = [p for p in batch.active_processors if p.is_argmax_invariant()]
        offset = None
        if invariant and params.temperature.any():
            work, offset, params = self._apply_to_scaled(as_tensor(work), rows, params, invariant)
        processed = _empty_like(work) if wanted and not self.report_raw else None
        token_ids, largest = draw(work, params, processed, None if mask_first else allowed)
        output = SamplerOutput(token_ids, failed=_failures(largest))
        if wanted:
            if processed is not None:
                raw, allowed = (processed if offset is None else as_tensor(processed) + offset)[wanted], None
            assert raw is not None
            output.logprobs = self._logprobs(raw, rows, wanted, output.token_ids, allowed)
        return output

    def _changed(self, work: Array, rows: np.ndarray, processors: list[LogitsProcessor]) -> Array:
        """The logits, which may be overwritten, after logit_bias, users' processors and penalties."""
        biases, counts = self.batch.biases, self.batch.counts
        if biased := _lines_of(rows, biases):
            add_biases(work, biased, [biases[int(rows[line])] for line in biased])
        if processors:
            work = self._apply_custom(as_tensor(work), rows, processors)
        if penalised := _lines_of(rows, counts):
            apply_penalties(work, penalised, [counts[int(rows[line])] for line in penalised])
        return work

    @inference_mode
    def _apply_to_scaled(
        self, work: torch.Tensor, rows: np.ndarray, params: DrawParams, processors: list[LogitsProcessor]
    ) -> tuple[torch.Tensor, torch.Tensor, DrawParams]:
        """Let users' processors change the logits over temperature, after min_p, of the rows that are not greedy.

        Those logits are shifted, so that each row's largest is 0. Returns all rows' logits as they are to be drawn
        from, what the shifts took from them, [n, 1], and the parameters to match.
        """
        largest = work.amax(1, keepdim=True)
        offset = torch.zeros_like(largest)
        lines = np.flatnonzero((params.temperature > 0.0) & largest.isfinite().cpu().numpy()[:, 0])
        index = torch.from_numpy(lines).to(work.device)
        temperature = torch.from_numpy(params.temperature[lines, None]).to(work.device, torch.float32)
        scaled = (work[index] - largest[index]).div_(temperature)
        mask_below_min_p(scaled, params.min_p[lines])
        offset[index] = torch.nan_to_num_(largest[index] / temperature)  # infinite for a tiny temperature
        params = replace(params, temperature=params.temperature.copy(), min_p=params.min_p.copy(), recorded=None)
        params.temperature[lines], params.min_p[lines] = 1.0, 0.0
        return work.index_copy(0, index, self._apply_custom(scaled, rows[lines], processors)), offset, params

    @inference_mode
    def _apply_custom(self, work: torch.Tensor, rows: np.ndarray, processors: list[LogitsProcessor]) -> torch.Tensor:
        """Users' processors see a line for every batch row, in its place; rows that have none now are zeros."""
        batch_size = self.batch.batch_size
        aligned = len(rows) == batch_size and bool((rows == np.arange(batch_size)).all())
        lines = torch.from_numpy(rows).to(work.device)
        full = work if aligned else work.new_zeros(batch_size, work.shape[1]).index_copy_(0, lines, work)
        for processor in processors:
            result = processor.apply(full)
            if result is not full:
                full.copy_(result)
        return full if aligned else full[lines]

    def _logprobs(
        self,
        reported: Array,
        rows: np.ndarray,
        wanted: list[int],
        token_ids: np.ndarray,
        allowed: Allowed | None,
    ) -> LogprobsArrays:
        """Gather for the lines in `wanted`; those with a usual k go together, and beams, the others one by one."""
        requests = [self.batch.logprobs[int(rows[i])] for i in wanted]
        bits = {} if allowed is None else dict(zip(allowed.lines.tolist(), allowed.bitmask, strict=True))
        beams = [at for at, params in enumerate(requests) if params.beam_length is not None and wanted[at] in bits]
        usual = [at for at, params in enumerate(requests) if _has_usual_k(params) and at not in beams]
        groups = [group for group in (usual, beams) if group]
        groups += [[at] for at in range(len(requests)) if at not in usual and at not in beams]
        parts = []
        for group in groups:
            lines = np.array(wanted)[group]
            logits = reported if len(group) == len(wanted) else reported[group]
            k = max(requests[at].num_logprobs or 0 for at in group)
            if group is beams:
                mine = Allowed(np.arange(len(group)), np.stack([bits[line] for line in lines.tolist()]))
                part = gather_allowed_logprobs(logits, token_ids[lines], k, mine, as_logits=self.report_logits)
            else:
                given = requests[group[0]].logprob_token_ids
                part = gather_logprobs(
                    logits,
                    token_ids[lines],
                    k,
                    as_logits=self.report_logits,
                    more_token_ids=None if given is None else np.array([given]),
                )
            parts.append((lines, part))
        return parts[0][1] if len(groups[0]) == len(rows) else merge_rows(parts, len(rows))


def _empty_like(logits: Array) -> Array:
    return as_buffer(np.empty_like(logits)) if isinstance(logits, Buffer) else torch.empty_like(logits)


def _lines_of(rows: np.ndarray, table: Collection[int]) -> list[int]:
    """The lines of logits whose batch row is in the table."""
    return [] if not table else [line for line, row in enumerate(rows.tolist()) if row in table]


def _has_usual_k(params: ResolvedSampling) -> bool:
    return params.logprob_token_ids is None and params.logprobs is not None and 0 <= params.logprobs <= _USUAL_K


def _failures(largest: np.ndarray) -> dict[int, str]:
    """What is wrong with the rows whose largest logit, [n] float32, is not a finite number."""
    failed = {}
    for i in np.flatnonzero(~np.isfinite(largest)).tolist():
        value = float(largest[i])
        if value == -math.inf:
            failed[i] = "no token is left to draw: the request's constraints exclude the whole vocabulary"
        else:
            failed[i] = f"the model's logits are not finite (largest: {value})"
    return failed
