"""`Sampler`: from a step's logits to one token per row, with logprobs where asked for. Called by the model runner.

The order is: raw logprobs, grammar, allowed tokens, bad words, min_tokens, logit_bias, users' processors, penalties,
then greedy's argmax or temperature, min_p and other argmax-invariant processors, top-k and top-p, the draw. Every stage
touches only the rows that ask for it, and works row by row, so that a row's token never depends on the batch.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from ...protocol.outputs import LogprobsArrays
from ...protocol.params import SamplingParams
from . import noise, ordering
from .draw import draw
from .logits_processors.builtin import RowStateProcessor
from .logits_processors.interface import LogitsProcessor
from .logprobs import gather_logprobs, merge_rows
from .metadata import SamplingBatch
from .penalties import apply_penalties

_LINES_AT_ONCE = 16
"""So many lines of logits are drawn from together: what is computed for them stays in the CPU's caches."""

_USUAL_K = 256

_MASK_OF_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, 0.0, -np.inf
).astype(np.float32)
"""[256, 8]: what to add to eight logits for a byte of a bitmask."""

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


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
        logits: torch.Tensor,
        rows: np.ndarray,
        grammar_rows: np.ndarray | None = None,
        grammar_bitmask: np.ndarray | None = None,
    ) -> SamplerOutput:
        """Draw a token for each row of logits.

        logits: [n, vocab] float32, may be overwritten; rows: [n] int64, the batch row of each line of logits.
        grammar_rows: [m] int64, lines of logits that a grammar binds; grammar_bitmask: [m, ceil(vocab / 32)] int32,
        bit set = token allowed.
        """
        batch = self.batch
        batch.update_processors()
        wanted = [i for i, row in enumerate(rows.tolist()) if row in batch.logprobs] if batch.logprobs else []
        work = ordering.pad_to_blocks(logits)
        processors = [p for p in batch.processors if not p.is_argmax_invariant() and p.is_active()]
        raw = None
        if wanted and self.report_raw:
            unchanged = not (processors or batch.counts or grammar_rows is not None)
            raw = work if unchanged and len(wanted) == len(rows) else work[wanted]
        if grammar_rows is not None and grammar_bitmask is not None and len(grammar_rows):
            self._apply_bitmask(work, grammar_rows, grammar_bitmask)
        if processors:
            work = self._apply_processors(work, rows, processors)
        if batch.counts:
            penalised = [(i, batch.counts[row]) for i, row in enumerate(rows.tolist()) if row in batch.counts]
            apply_penalties(work, [i for i, _ in penalised], [counts for _, counts in penalised])

        tokens, best = ordering.argmax(work, ordering.block_max(work))
        output = SamplerOutput(tokens.cpu().numpy())
        self._fail(output, best, np.arange(len(rows)))
        processed: dict[int, torch.Tensor] = {}
        if not batch.greedy[rows].all():
            processed = self._sample_random(work, best, rows, output, bool(wanted) and not self.report_raw)
        if wanted:
            reported = raw if raw is not None else self._processed(work, wanted, processed)
            output.logprobs = self._logprobs(reported, rows, wanted, output.token_ids)
        for i in output.failed:
            output.token_ids[i] = -1
        return output

    def _sample_random(
        self, work: torch.Tensor, best: torch.Tensor, rows: np.ndarray, output: SamplerOutput, want_processed: bool
    ) -> dict[int, torch.Tensor]:
        """Fill in the tokens of the rows that are not greedy. Returns those rows' processed logits where wanted."""
        lines = np.flatnonzero(~self.batch.greedy[rows])
        if output.failed:
            lines = lines[~np.isin(lines, list(output.failed))]
        processors = [p for p in self.batch.processors if p.is_argmax_invariant() and p.is_active()]
        has_custom = not all(isinstance(processor, RowStateProcessor) for processor in processors)
        size = max(len(lines), 1) if has_custom else _LINES_AT_ONCE
        processed: dict[int, torch.Tensor] = {}
        for start in range(0, len(lines), size):
            at = lines[start : start + size]
            self._sample_lines(work, best, rows, at, processors, output, processed if want_processed else None)
        return processed

    def _sample_lines(
        self,
        work: torch.Tensor,
        best: torch.Tensor,
        rows: np.ndarray,
        at: np.ndarray,
        processors: list[LogitsProcessor],
        output: SamplerOutput,
        processed: dict[int, torch.Tensor] | None,
    ) -> None:
        """Draw for the lines `at` ([n] int64, ascending)."""
        batch = self.batch
        chosen = work[at[0] : at[-1] + 1] if at[-1] - at[0] + 1 == len(at) else work[at]
        temperature = torch.from_numpy(batch.temperature[rows[at]]).to(work.device, torch.float32)
        scaled = (chosen - best[at, None]).div_(temperature[:, None])
        offset = best[at] / temperature
        if processors:
            scaled = self._apply_processors(scaled, rows[at], processors)
            largest = scaled.amax(1)
            self._fail(output, largest, at)
            sound = torch.isfinite(largest)
            if not sound.all():
                scaled, largest, offset, at = scaled[sound], largest[sound], offset[sound], at[sound.cpu().numpy()]
            if largest.any():
                scaled = scaled - largest[:, None]
                offset += largest
        drawn_rows = rows[at]
        uniforms = noise.uniform(batch.noise_seeds[drawn_rows], batch.num_tokens[drawn_rows])
        top_k, top_p = batch.top_k[drawn_rows], batch.top_p[drawn_rows]
        drawn = draw(scaled, top_k, top_p, uniforms, processed is not None)
        output.token_ids[at] = drawn.token_ids.cpu().numpy()
        if processed is None:
            return
        for line, i in enumerate(at.tolist()):
            row = scaled[line] + offset[line]
            if line in drawn.kept:
                ids = drawn.kept[line]
                row = torch.full_like(row, float("-inf")).index_copy_(0, ids, row[ids])
            processed[i] = row

    def _apply_processors(
        self, work: torch.Tensor, rows: np.ndarray, processors: list[LogitsProcessor]
    ) -> torch.Tensor:
        """Run processors, the engine's own first; `work` belongs to `rows`, line by line."""
        line_of = {row: line for line, row in enumerate(rows.tolist())}
        for processor in processors:
            if isinstance(processor, RowStateProcessor):
                processor.apply_to_lines(work, line_of)
        custom = [processor for processor in processors if not isinstance(processor, RowStateProcessor)]
        return self._apply_custom(work, rows, custom) if custom else work

    def _apply_custom(self, work: torch.Tensor, rows: np.ndarray, processors: list[LogitsProcessor]) -> torch.Tensor:
        """Users' processors see a line for every batch row, in its place; rows that have none now are zeros."""
        batch_size = self.batch.batch_size
        aligned = len(rows) == batch_size and bool((rows == np.arange(batch_size)).all())
        lines = torch.from_numpy(rows).to(work.device)
        full = work if aligned else work.new_zeros(batch_size, work.shape[1]).index_copy_(0, lines, work)
        for processor in processors:
            view = full[:, : self.batch.vocab_size]
            result = processor.apply(view)
            if result is not view:
                view.copy_(result)
        return full if aligned else full[lines]

    def _apply_bitmask(self, work: torch.Tensor, lines: np.ndarray, bitmask: np.ndarray) -> None:
        vocab_size = self.batch.vocab_size
        masks = _MASK_OF_BYTE[bitmask.view(np.uint8)].reshape(len(lines), -1)
        for line, mask in zip(lines.tolist(), torch.from_numpy(masks).to(work.device), strict=True):
            work[line, :vocab_size] += mask[:vocab_size]

    @staticmethod
    def _fail(output: SamplerOutput, best: torch.Tensor, lines: np.ndarray) -> None:
        """Mark rows whose largest logit is not a finite number; `best` belongs to `lines`."""
        values = best.cpu().numpy()
        for at in np.flatnonzero(~np.isfinite(values)).tolist():
            i = int(lines[at])
            if values[at] == -np.inf:
                output.failed[i] = "no token is left to draw: the request's constraints exclude the whole vocabulary"
            else:
                output.failed[i] = f"the model's logits are not finite (largest: {values[at]})"

    @staticmethod
    def _processed(work: torch.Tensor, wanted: list[int], processed: dict[int, torch.Tensor]) -> torch.Tensor:
        """[len(wanted), width]: the logits that the tokens were drawn from."""
        return torch.stack([processed.get(i, work[i]) for i in wanted])

    def _logprobs(
        self, reported: torch.Tensor, rows: np.ndarray, wanted: list[int], token_ids: np.ndarray
    ) -> LogprobsArrays:
        """Gather for the lines in `wanted`; those with a usual k go together, the others one by one."""
        reported = reported[:, : self.batch.vocab_size]
        requests = [self.batch.logprobs[int(rows[i])] for i in wanted]
        usual = [at for at, params in enumerate(requests) if _has_usual_k(params)]
        groups = [usual] if usual else []
        groups += [[at] for at, params in enumerate(requests) if not _has_usual_k(params)]
        parts = []
        for group in groups:
            lines = np.array(wanted)[group]
            given = requests[group[0]].logprob_token_ids
            part = gather_logprobs(
                reported if len(group) == len(wanted) else reported[group],
                token_ids[lines],
                max(requests[at].num_logprobs or 0 for at in group),
                as_logits=self.report_logits,
                more_token_ids=None if given is None else np.array([given]),
            )
            parts.append((lines, part))
        return parts[0][1] if len(usual) == len(rows) else merge_rows(parts, len(rows))


def _has_usual_k(params: SamplingParams) -> bool:
    return params.logprob_token_ids is None and params.logprobs is not None and 0 <= params.logprobs <= _USUAL_K
