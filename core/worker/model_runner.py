"""Runs the scheduler's steps: prepares inputs from the persistent batch, has the runtime compute, samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...protocol.config import VllmConfig
from ...protocol.outputs import LogprobsArrays
from ..kernels.memory import Array
from ..lazy_torch import torch
from ..lora.cache import AdapterCache
from ..multimodal.encoder import Encoder
from ..pooling.pooler import Pooler
from ..profile_ranges import profile_range
from ..runtime.cpu_encoder import EncoderRuntime
from ..sampling.logprobs import gather_logprobs
from ..sampling.metadata import SamplingBatch
from ..sampling.sampler import Sampler, SamplerOutput
from ..scheduler.runner_messages import ModelRunnerOutput, SchedulerOutput
from ..speculation.verification import kept_lines, lines_ahead
from .input_batch import InputBatch, StepInputs

_PROMPT_LOGPROB_ROWS = 128
"""Prompt positions whose logits are held at once."""


class _PromptSpan(NamedTuple):
    """Tokens start..end of a step whose next tokens, `targets`, are prompt tokens that want logprobs and the top k."""

    row: int
    start: int
    end: int
    targets: np.ndarray
    k: int


class ModelRunner:
    """The batch: its tokens and blocks, and what each request asks of the sampler."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        runtime: Any,
        pooler: Pooler | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        """`runtime`: a Runtime, or an EncoderRuntime with a `pooler`, which stands in the place of sampling. `encoder`:
        of pictures, where the model takes any."""
        model_config, scheduler_config = vllm_config.model_config, vllm_config.scheduler_config
        block_size = vllm_config.cache_config.block_size
        self.runtime = runtime
        self.adapters = AdapterCache(vllm_config.lora_config, runtime)
        self.batch = InputBatch(
            scheduler_config.max_num_seqs, model_config.max_model_len, block_size, len(runtime.kv_groups)
        )
        self.sampling = SamplingBatch(vllm_config, scheduler_config.max_num_seqs)
        self.sampler = Sampler(self.sampling, model_config.logprobs_mode)
        self.pooler = pooler
        self.encoder = encoder

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step. A request that cannot be run is named in `failed`; the others are unaffected."""
        with profile_range("prepare"):
            output = ModelRunnerOutput(failed=self._update_batch(scheduler_output))
            if self.encoder is not None:
                self.encoder.update(scheduler_output.encoder_dropped, scheduler_output.encoder_inputs)
            rows, num_scheduled = scheduler_output.rows, scheduler_output.num_scheduled_tokens
            if output.failed:
                taken = ~np.isin(rows, list(output.failed))
                rows, num_scheduled = rows[taken], num_scheduled[taken]
            if len(rows) == 0:
                return output
            inputs = self.batch.prepare(rows, num_scheduled, scheduler_output.drafts)
        if self.pooler is not None:
            self._pool(self.pooler, inputs, output)
            return output
        with profile_range("model"):
            hidden, prompt_spans = self._run(inputs)
        num_sampling = len(inputs.sampled)
        if num_sampling:
            with profile_range("sample"):
                self._sample(scheduler_output, inputs, hidden[:num_sampling] if prompt_spans else hidden, output)
        if prompt_spans:
            output.prompt_logprobs = self._prompt_logprobs(hidden[num_sampling:], prompt_spans)
        return output

    def _update_batch(self, scheduler_output: SchedulerOutput) -> dict[int, str]:
        """Bring the batch up to date. Returns what is wrong with new requests that could not be taken, by row."""
        for row in scheduler_output.removed_rows:
            self.batch.remove(row)
            self.sampling.remove(row)
            if self.pooler is not None:
                self.pooler.remove(row)
        for row, block_ids in scheduler_output.new_block_ids.items():
            self.batch.append_blocks(row, block_ids)
        failed: dict[int, str] = {}
        for request in scheduler_output.scheduled_new_reqs:
            embeds = request.prompt_embeds
            expected = (request.num_prompt_tokens, self.runtime.spec.hidden_size)
            if embeds is not None and embeds.shape != expected:
                failed[request.row] = f"prompt_embeds are of shape {list(embeds.shape)}, expected {list(expected)}"
                continue
            if self.pooler is not None:
                assert request.pooling is not None
                self.pooler.add(request.row, request.pooling)
            try:
                self.batch.add(request, None if request.adapter is None else self.adapters.get(request.adapter))
                if self.pooler is None:
                    self.sampling.add(request.row, request)
            except ValueError as error:
                self.batch.remove(request.row)
                failed[request.row] = str(error)
        return failed

    def _pool(self, pooler: Pooler, inputs: StepInputs, output: ModelRunnerOutput) -> None:
        """Compute the step's tokens, and the vectors of the requests that are through."""
        lines = pooler.lines(inputs)
        with profile_range("model"):
            states = self._final_states(pooler, inputs, lines)
        with profile_range("pool"):
            output.pooled = pooler.pool(inputs, lines, states, self.batch.num_tokens)

    def _final_states(self, pooler: Pooler, inputs: StepInputs, lines: np.ndarray) -> np.ndarray:
        """[len(lines), hidden_size] float32."""
        if isinstance(self.runtime, EncoderRuntime):
            return self.runtime.encode(inputs.token_ids, inputs.metadata, pooler.token_types(inputs))[lines]
        hidden = self.runtime.forward(
            inputs.token_ids,
            inputs.metadata,
            None if len(lines) == len(inputs.token_ids) else lines,
            self._prompt_embeds(inputs) if self.batch.prompt_embeds or self.batch.mm_features else (),
            inputs.adapters,
        )
        states: np.ndarray = self.runtime.final_states(hidden).cpu().numpy()
        return states

    def _run(self, inputs: StepInputs) -> tuple[Array, list[_PromptSpan]]:
        """Hidden states of the tokens to sample from, then those of the prompt positions whose logprobs are wanted."""
        spans = self._prompt_spans(inputs) if self.batch.prompt_logprobs else []
        output_rows = inputs.output_rows
        if spans:
            output_rows = np.concatenate((output_rows, *(np.arange(span.start, span.end) for span in spans)))
        everything = len(output_rows) == len(inputs.token_ids) and not spans
        hidden = self.runtime.forward(
            inputs.token_ids,
            inputs.metadata,
            None if everything else output_rows,
            self._prompt_embeds(inputs) if self.batch.prompt_embeds or self.batch.mm_features else (),
            inputs.adapters,
        )
        return hidden, spans

    def _prompt_embeds(self, inputs: StepInputs) -> list[tuple[int, torch.Tensor]]:
        """The embeddings that stand for tokens of this step: the first such token of each request, and its rows."""
        pieces = []
        for index, row in enumerate(inputs.rows.tolist()):
            embeds = self.batch.prompt_embeds.get(row)
            start, end = inputs.starts[index : index + 2].tolist()
            first = int(inputs.positions[start])
            if embeds is not None and first < embeds.shape[0]:
                pieces.append((start, embeds[first : first + end - start]))
            if self.encoder is not None and (features := self.batch.mm_features.get(row)) is not None:
                for offset, rows in self.encoder.pieces(features, first, end - start):
                    pieces.append((start + offset, rows))
                if first + end - start >= features[-1].mm_position.end:
                    del self.batch.mm_features[row]
        return pieces

    def _sample(
        self,
        scheduler_output: SchedulerOutput,
        inputs: StepInputs,
        hidden: Array,
        output: ModelRunnerOutput,
    ) -> None:
        """Sample a token for each of `inputs.sampling_rows`, remember it and put it into `output`."""
        rows = inputs.sampling_rows
        grammar_lines, grammar_bitmask = self._grammar(scheduler_output, rows)
        drafts = scheduler_output.drafts
        ahead = lines_ahead(rows) if drafts else None
        sampled = self.sampler.sample(self.runtime.logits(hidden), rows, grammar_lines, grammar_bitmask, ahead)
        token_ids, logprobs = sampled.token_ids, sampled.logprobs
        inputs.sampled = token_ids
        if ahead is not None:
            lines = kept_lines(rows, ahead, token_ids, drafts)
            self.batch.enter_drafted(inputs, lines)
            self._report_drafted(inputs, lines, ahead, sampled, output)
            return
        if sampled.failed:
            output.failed.update((int(rows[line]), error) for line, error in sampled.failed.items())
            kept = [line for line in range(len(rows)) if line not in sampled.failed]
            rows, token_ids = rows[kept], token_ids[kept]
            if logprobs is not None:
                logprobs = logprobs.take(kept)
        self.sampling.append_tokens(rows, token_ids)
        output.rows, output.sampled_token_ids, output.logprobs = rows, token_ids, logprobs

    def _report_drafted(
        self,
        inputs: StepInputs,
        lines: np.ndarray,
        ahead: np.ndarray,
        sampled: SamplerOutput,
        output: ModelRunnerOutput,
    ) -> None:
        """As at the end of `_sample`, where drafts gave some requests several lines, of which `lines` are kept."""
        rows, token_ids = inputs.sampling_rows, sampled.token_ids
        good = np.array([line for line in lines.tolist() if line not in sampled.failed], dtype=np.int64)
        for line in set(lines.tolist()).intersection(sampled.failed):
            output.failed[int(rows[line])] = sampled.failed[line]
        self.sampling.append_drafted(rows[good], token_ids[good])
        firsts = good[ahead[good] == 0]
        output.rows, output.sampled_token_ids = rows[firsts], token_ids[firsts]
        if sampled.logprobs is not None:
            output.logprobs = sampled.logprobs.take(firsts)
        for line in good[ahead[good] > 0].tolist():
            output.further_token_ids.setdefault(int(rows[line]), []).append(int(token_ids[line]))

    def _grammar(
        self, scheduler_output: SchedulerOutput, rows: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The lines of logits that a grammar binds, and the bitmask's lines in the same order."""
        if scheduler_output.grammar_bitmask is None:
            return None, None
        line_of = {row: line for line, row in enumerate(rows.tolist())}
        lines, kept = [], []
        for index, row in enumerate(scheduler_output.structured_rows):
            line = line_of.get(row)
            if line is not None:
                lines.append(line)
                kept.append(index)
        return np.array(lines, dtype=np.int64), scheduler_output.grammar_bitmask[kept]

    def _prompt_spans(self, inputs: StepInputs) -> list[_PromptSpan]:
        """Tokens of this step that have a prompt token behind them, of requests that asked for prompt logprobs."""
        spans = []
        for index, row in enumerate(inputs.rows.tolist()):
            k = self.batch.prompt_logprobs.get(row)
            if k is None:
                continue
            start, end = inputs.starts[index : index + 2].tolist()
            first = int(inputs.positions[start])
            end = min(end, start + int(self.batch.num_prompt_tokens[row]) - 1 - first)
            if end > start:
                targets = self.batch.token_ids[row, first + 1 : first + 1 + end - start].astype(np.int64)
                spans.append(_PromptSpan(row, start, end, targets, k))
        return spans

    def _prompt_logprobs(self, hidden: Array, spans: list[_PromptSpan]) -> dict[int, LogprobsArrays]:
        """hidden: the states of all spans' tokens, one after another."""
        result, offset = {}, 0
        for span in spans:
            parts = []
            for at in range(0, span.end - span.start, _PROMPT_LOGPROB_ROWS):
                targets = span.targets[at : at + _PROMPT_LOGPROB_ROWS]
                first = offset + at
                logits = self.runtime.logits(hidden[first : first + len(targets)])
                parts.append(gather_logprobs(logits, targets, span.k, as_logits=self.sampler.report_logits))
            result[span.row] = LogprobsArrays.concatenated(parts)
            offset += span.end - span.start
        return result
