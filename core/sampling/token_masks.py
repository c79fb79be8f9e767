"""Which tokens a request may have, as bits: `allowed_token_ids`, `bad_words` and `min_tokens`. Kept by `SamplingBatch`;
the draw masks the logits as it reads them.
"""

import numpy as np

from ...protocol.resolved_sampling import ResolvedSampling


class TokenMask:
    """What one request rules out. `output_token_ids` is live: it grows by every token that is generated.

    Bits are [ceil(vocab / 32)] uint32, set = allowed.
    """

    def __init__(self, params: ResolvedSampling, output_token_ids: list[int], vocab_size: int) -> None:
        allowed = params.allowed_token_ids
        self._always_allowed = allowed is None
        self._allowed = _bits(slice(vocab_size) if allowed is None else list(allowed), vocab_size)
        self._bad_words = [list(word) for word in params.bad_words_token_ids]
        stops = [token_id for token_id in params.end_token_ids if token_id < vocab_size]
        self._no_stops = ~_bits(stops, vocab_size)
        self._min_tokens = params.min_tokens if stops else 0
        self._output_token_ids = output_token_ids

    @property
    def is_spent(self) -> bool:
        """Whether nothing is ruled out any more, whatever is generated."""
        return self._always_allowed and not self._bad_words and not self._is_short

    def allowed(self, grammar: np.ndarray | None) -> np.ndarray:
        """The tokens that may come next; `grammar`: those that the request's grammar allows, None without one.

        End tokens are ruled out until `min_tokens` are there, unless nothing else is left.
        """
        bits = self._allowed if grammar is None else self._allowed & grammar
        banned = [word[-1] for word in self._bad_words if self._ends_in(word[:-1])]
        if banned:
            bits = bits & ~_bits(banned, 32 * len(bits))
        if self._is_short:
            going_on = bits & self._no_stops
            if going_on.any():
                return going_on
        return bits

    @property
    def _is_short(self) -> bool:
        return len(self._output_token_ids) < self._min_tokens

    def _ends_in(self, beginning: list[int]) -> bool:
        return not beginning or self._output_token_ids[-len(beginning) :] == beginning


def token_mask(params: ResolvedSampling, output_token_ids: list[int], vocab_size: int) -> TokenMask | None:
    """None for a request that rules out nothing."""
    if params.allowed_token_ids is None and not params.bad_words_token_ids and not params.min_tokens:
        return None
    mask = TokenMask(params, output_token_ids, vocab_size)
    return None if mask.is_spent else mask


def _bits(token_ids: list[int] | slice, vocab_size: int) -> np.ndarray:
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    flags[token_ids] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)
