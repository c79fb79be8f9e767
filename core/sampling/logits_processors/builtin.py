"""The processors every engine has: allowed tokens, bad words, min_tokens and logit_bias.

Built by `SamplingBatch`. Each keeps state only for the rows that use it, and touches only those.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch

from ....protocol.config import VllmConfig
from ....shared.logits_processors import AddedRequest, BatchUpdate, LogitsProcessor
from .row_states import State, follow_batch

_NEG_INF = float("-inf")
_LARGEST = float(np.finfo(np.float32).max)


class RowStateProcessor(LogitsProcessor, Generic[State]):
    """A processor with one state object for each row that uses it: `rows`, by row number."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.vocab_size = vllm_config.model_config.vocab_size
        self.device = device
        self.rows: dict[int, State] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def is_active(self) -> bool:
        return bool(self.rows)

    @abstractmethod
    def state_of(self, request: AddedRequest) -> State | None:
        """The state for a new request, None if it does not use this processor."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        follow_batch(self.rows, batch_update, self.state_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.apply_to_lines(logits, {row: row for row in self.rows})
        return logits

    @abstractmethod
    def apply_to_lines(self, logits: torch.Tensor, line_of: dict[int, int]) -> None:
        """Change in place the lines of logits that belong to this processor's rows; rows not in `line_of` have none."""

    def _lines(self, line_of: dict[int, int]) -> list[tuple[int, State]]:
        return [(line_of[row], state) for row, state in self.rows.items() if row in line_of]


class AllowedTokensProcessor(RowStateProcessor[torch.Tensor]):
    """Masks everything but a request's `allowed_token_ids`."""

    def state_of(self, request: AddedRequest) -> torch.Tensor | None:
        if request.params.allowed_token_ids is None:
            return None
        return torch.tensor(request.params.allowed_token_ids, dtype=torch.int64, device=self.device)

    def apply_to_lines(self, logits: torch.Tensor, line_of: dict[int, int]) -> None:
        for line, token_ids in self._lines(line_of):
            allowed = logits[line, token_ids]
            logits[line].fill_(_NEG_INF)
            logits[line, token_ids] = allowed


@dataclass(slots=True)
class BadWords:
    words: list[list[int]]
    output_token_ids: list[int]

    def banned(self) -> Iterator[int]:
        """The tokens that would complete a bad word now."""
        for word in self.words:
            beginning = word[:-1]
            if not beginning or self.output_token_ids[-len(beginning) :] == beginning:
                yield word[-1]


class BadWordsProcessor(RowStateProcessor[BadWords]):
    """Masks the last token of each bad word whose beginning was just generated."""

    def state_of(self, request: AddedRequest) -> BadWords | None:
        words = request.params.bad_words_token_ids
        return BadWords(words, request.output_token_ids) if words else None

    def apply_to_lines(self, logits: torch.Tensor, line_of: dict[int, int]) -> None:
        for line, bad_words in self._lines(line_of):
            logits[line, list(bad_words.banned())] = _NEG_INF


@dataclass(slots=True)
class MinTokens:
    min_tokens: int
    stop_token_ids: list[int]
    output_token_ids: list[int]


class MinTokensProcessor(RowStateProcessor[MinTokens]):
    """Masks a request's stop tokens until it has `min_tokens`, unless nothing else is left to draw."""

    def state_of(self, request: AddedRequest) -> MinTokens | None:
        params = request.params
        if len(request.output_token_ids) >= params.min_tokens:
            return None
        stop_token_ids = sorted(token_id for token_id in params.all_stop_token_ids if token_id < self.vocab_size)
        return MinTokens(params.min_tokens, stop_token_ids, request.output_token_ids) if stop_token_ids else None

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        super().update_state(batch_update)
        for row in [row for row, state in self.rows.items() if len(state.output_token_ids) >= state.min_tokens]:
            del self.rows[row]

    def apply_to_lines(self, logits: torch.Tensor, line_of: dict[int, int]) -> None:
        for line, state in self._lines(line_of):
            stops = logits[line, state.stop_token_ids]
            logits[line, state.stop_token_ids] = _NEG_INF
            if logits[line].amax() == _NEG_INF:  # a grammar or allowed_token_ids leaves only the end
                logits[line, state.stop_token_ids] = stops


class LogitBiasProcessor(RowStateProcessor[tuple[torch.Tensor, torch.Tensor]]):
    """Adds a request's `logit_bias`."""

    def state_of(self, request: AddedRequest) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not request.params.logit_bias:
            return None
        biases = [min(max(bias, -_LARGEST), _LARGEST) for bias in request.params.logit_bias.values()]
        token_ids = torch.tensor(list(request.params.logit_bias), dtype=torch.int64, device=self.device)
        return token_ids, torch.tensor(biases, dtype=torch.float32, device=self.device)

    def apply_to_lines(self, logits: torch.Tensor, line_of: dict[int, int]) -> None:
        for line, (token_ids, biases) in self._lines(line_of):
            logits[line, token_ids] += biases


BUILTIN_PROCESSORS: tuple[type[RowStateProcessor[Any]], ...] = (
    AllowedTokensProcessor,
    BadWordsProcessor,
    MinTokensProcessor,
    LogitBiasProcessor,
)
"""In the order in which they are applied."""
