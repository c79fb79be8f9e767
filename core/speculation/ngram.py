"""Drafts by n-gram lookup: what followed the last time the text ended like this is proposed again.

The scheduler asks `NgramProposer` for drafts and tells it what came of them. A draft is kept as far as the model draws
the same tokens itself, each position with its own noise, so speculation changes no token; it only saves steps. After
A. Saxena, "Prompt Lookup Decoding", 2023.
"""

from collections.abc import Sequence

from ...protocol.config import SpeculativeConfig, VllmConfig
from ...protocol.outputs import SpecDecodingStats
from ..scheduler.request import Request

MAX_STEP_TOKENS = 16
"""Tokens of a step up to which a further one costs little, since the weights are read anyway."""

_MAX_CANDIDATES = 16
_MOST_HITS_NEEDED = 7


class NgramProposer:
    """Each request's history is kept on the request (`Request.drafter`), so it ends with it."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self._stats = SpecDecodingStats(num_accepted_tokens_per_pos=[0] * config.num_speculative_tokens)

    @classmethod
    def for_engine(cls, vllm_config: VllmConfig) -> "NgramProposer | None":
        """None where nothing is drafted: users' logits processors would see tokens that are then dropped."""
        config = vllm_config.speculative_config
        return None if config is None or vllm_config.model_config.logits_processors else cls(config)

    def propose(self, request: Request, room: int) -> Sequence[int]:
        """At most `room` tokens that may follow the request's last one; none where nothing like it was seen."""
        if room < 1 or not request.may_speculate:
            return ()
        drafter = request.drafter
        if not isinstance(drafter, _Drafter):
            drafter = request.drafter = _Drafter(self.config)
        return drafter.propose(request.token_ids, min(room, request.num_tokens_left - 1))

    def record(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """What the model made of a draft."""
        if isinstance(request.drafter, _Drafter):
            request.drafter.adapt(num_drafted, num_accepted)
        stats = self._stats
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafted
        stats.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            stats.num_accepted_tokens_per_pos[position] += 1

    def take_stats(self) -> SpecDecodingStats | None:
        """The counts since the last call; None where nothing was drafted."""
        if self._stats.num_drafts == 0:
            return None
        stats = self._stats
        self._stats = SpecDecodingStats(num_accepted_tokens_per_pos=[0] * self.config.num_speculative_tokens)
        return stats


class _Drafter:
    """One request's n-grams, indexed as it grows, and how many tokens it is worth drafting.

    `_last[ngram]` is the position behind the latest occurrence of that n-gram of the shortest length,
    `_previous[position]` the one behind the occurrence before it, 0: none.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._shortest = config.prompt_lookup_min
        self._longest = config.prompt_lookup_max
        self._most = self._length = config.num_speculative_tokens
        self._guess: tuple[int, int] | None = None  # position and token that the last look-up foretold
        self._hits = self._hits_needed = 0  # guesses in a row that came true, and how many it takes to draft
        self._last: dict[tuple[int, ...], int] = {}
        self._previous: list[int] = [0]

    def propose(self, token_ids: list[int], room: int) -> list[int]:
        """The draft that a look-up gives. After drafts that did not hold it is only compared with what comes, which
        costs no step, until guesses have come true several times in a row.
        """
        self._index(token_ids)
        if self._guess is not None and self._guess[0] < len(token_ids):
            self._hits = self._hits + 1 if token_ids[self._guess[0]] == self._guess[1] else 0
        best = self._find(token_ids)
        self._guess = (len(token_ids), token_ids[best]) if best else None
        if best == 0 or self._hits < self._hits_needed:
            return []
        return token_ids[best : best + min(self._length, room)]

    def _find(self, token_ids: list[int]) -> int:
        """The position behind the longest and latest earlier occurrence of the last tokens; 0: there is none."""
        size = len(token_ids)
        position = self._last.get(tuple(token_ids[size - self._shortest :]), 0) if size > self._shortest else 0
        best, best_length = 0, 0
        for _ in range(_MAX_CANDIDATES):
            if position == 0:
                break
            length = self._match_length(token_ids, position)
            if length > best_length:
                best, best_length = position, length
                if length >= self._longest:
                    break
            position = self._previous[position]
        return best

    def adapt(self, num_drafted: int, num_accepted: int) -> None:
        """Draft more while drafts hold; where they do not, less, and only after so many more guesses come true."""
        if num_accepted == num_drafted:
            self._length = min(self._most, 2 * self._length)
        elif num_accepted == 0:
            self._length = max(1, self._length // 2)
        self._hits = 0
        self._hits_needed = 0 if num_accepted else min(_MOST_HITS_NEEDED, 2 * self._hits_needed + 1)

    def _index(self, token_ids: list[int]) -> None:
        """Take in what was appended, but for the n-gram at the very end, which has nothing behind it yet."""
        shortest, last, previous = self._shortest, self._last, self._previous
        for position in range(len(previous), len(token_ids)):
            ngram = tuple(token_ids[max(position - shortest, 0) : position])
            previous.append(last.get(ngram, 0))
            last[ngram] = position

    def _match_length(self, token_ids: list[int], position: int) -> int:
        """How many tokens before `position` equal the last ones, up to `prompt_lookup_max`."""
        size, length = len(token_ids), self._shortest
        while (
            length < min(self._longest, position) and token_ids[position - 1 - length] == token_ids[size - 1 - length]
        ):
            length += 1
        return length
