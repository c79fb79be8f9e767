"""Log-probabilities as users see them, over the arrays that the core sends.

The output processor only appends arrays; dicts and decoded texts come into being when somebody looks at a position.
"""

from abc import abstractmethod
from collections import UserList
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar, overload

from ...protocol.outputs import LogprobsArrays
from ..text.tokenizer import Tokenizer

_MAX_CONTEXT = 4  # a UTF-8 character has at most four bytes, so at most four tokens


@dataclass(slots=True)
class Logprob:
    """One token's log-probability. `rank` counts from 1; `decoded_token` is None without detokenisation."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class TokenDecoder:
    """Decodes single tokens, with the tokens before them where those complete a character. Remembers what it saw."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._alone: dict[int, str] = {}

    def __call__(self, token_id: int, context: Sequence[int]) -> str:
        """Text of `token_id` behind `context`; "" where it ends inside a character."""
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self._decode([token_id])
        if not text.endswith("\ufffd"):
            return text
        for length in range(1, min(_MAX_CONTEXT, len(context)) + 1):
            before = list(context[-length:])
            text = self._decode([*before, token_id])
            known = self._decode(before).rstrip("\ufffd")
            if not text.endswith("\ufffd") and text.startswith(known):
                return text[len(known) :]
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


class LogprobsStore:
    """One request's log-probabilities, growing; views of it never change.

    `top_k` columns beside column 0 belong to the request, -1: all. `ranked`: these columns are the likeliest tokens in
    order, not tokens that the caller named. `context`: token ids before the first position.
    """

    def __init__(
        self, top_k: int, decoder: TokenDecoder | None, ranked: bool = True, context: Sequence[int] = ()
    ) -> None:
        self.top_k = top_k
        self.decoder = decoder
        self.ranked = ranked
        self._context = list(context[-_MAX_CONTEXT:])
        self._rows: list[tuple[LogprobsArrays, int]] = []
        self.cumulative_logprob = 0.0

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, arrays: LogprobsArrays, num_positions: int | None = None) -> None:
        """Take over the first `num_positions` rows (default: all) and add up what column 0 says."""
        count = len(arrays.ranks) if num_positions is None else min(num_positions, len(arrays.ranks))
        for row in range(count):
            self._rows.append((arrays, row))
            self.cumulative_logprob += arrays.logprobs.item(row, 0)

    def entry(self, position: int) -> dict[int, Logprob]:
        """Token id -> Logprob: the token itself first, then the top k by rank."""
        arrays, row = self._rows[position]
        end = None if self.top_k < 0 else self.top_k + 1
        token_ids: list[int] = arrays.token_ids[row, :end].tolist()
        logprobs: list[float] = arrays.logprobs[row, :end].tolist()
        decoder, context = self.decoder, self._context_before(position)
        texts = [None] * len(token_ids) if decoder is None else [decoder(token, context) for token in token_ids]
        entry = {token_ids[0]: Logprob(logprobs[0], arrays.ranks.item(row), texts[0])}
        for column in range(1, len(token_ids)):
            if self.ranked:
                entry[token_ids[column]] = Logprob(logprobs[column], column, texts[column])
            else:
                entry.setdefault(token_ids[column], Logprob(logprobs[column], None, texts[column]))
        return entry

    def _context_before(self, position: int) -> list[int]:
        first = max(position - _MAX_CONTEXT, 0)
        tokens = [arrays.token_ids.item(row, 0) for arrays, row in self._rows[first:position]]
        return (self._context + tokens)[-_MAX_CONTEXT:] if self._context else tokens


_Entry = TypeVar("_Entry")


class _Positions(Sequence[_Entry], Generic[_Entry]):
    """Entries, each of which is made whenever it is asked for. Never changes."""

    __slots__ = ()

    @abstractmethod
    def _entry(self, position: int) -> _Entry: ...

    @overload
    def __getitem__(self, index: int) -> _Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Entry]: ...
    def __getitem__(self, index: int | slice) -> _Entry | list[_Entry]:
        if isinstance(index, slice):
            return [self._entry(position) for position in range(len(self))[index]]
        try:
            position = range(len(self))[index]
        except IndexError:
            raise IndexError(f"position {index} is not among the {len(self)} there are") from None
        return self._entry(position)


class SamplePositions(_Positions[dict[int, Logprob]]):
    """Positions `start` to `stop` of a store."""

    __slots__ = ("start", "stop", "store")

    def __init__(self, store: LogprobsStore, start: int, stop: int) -> None:
        self.store = store
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return self.stop - self.start

    def _entry(self, position: int) -> dict[int, Logprob]:
        return self.store.entry(self.start + position)


class PromptPositions(_Positions[dict[int, Logprob] | None]):
    """None, then every position of a store so far."""

    __slots__ = ("_length", "_store")

    def __init__(self, store: LogprobsStore) -> None:
        self._store = store
        self._length = len(store) + 1

    def __len__(self) -> int:
        return self._length

    def _entry(self, position: int) -> dict[int, Logprob] | None:
        return self._store.entry(position - 1) if position else None


class LogprobsList(UserList[_Entry]):
    """A list to whoever uses it, `isinstance` included; copied, pickled and added to others it becomes a plain one.

    While nothing changes it, what is asked for by position, in a slice or a loop is made at that moment.
    """

    def __init__(self, entries: Iterable[_Entry] = ()) -> None:
        self.entries: Sequence[_Entry] = entries if isinstance(entries, _Positions) else list(entries)

    @property  # type: ignore[misc]
    def __class__(self) -> type[list[_Entry]]:  # type: ignore[override]
        return list

    @property
    def data(self) -> list[_Entry]:
        """All entries, in the list that `UserList` works on."""
        if not isinstance(self.entries, list):
            self.entries = list(self.entries)
        return self.entries

    @data.setter
    def data(self, entries: list[_Entry]) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[_Entry]:
        return iter(self.entries)

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __contains__(self, entry: object) -> bool:
        return entry in self.entries

    def __repr__(self) -> str:
        return repr(list(self))

    def __copy__(self) -> list[_Entry]:  # type: ignore[override]
        return list(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (list, (list(self),))


@dataclass
class FlatLogprobs(MutableSequence[dict[int, Logprob] | None]):
    """Log-probabilities in parallel lists, position i in `start_indices[i]:end_indices[i]` of the last four.

    Reads as a sequence of dicts; a position without any (None) reads as an empty one. Grows at its end only.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, entries: Iterable[dict[int, Logprob] | None]) -> "FlatLogprobs":
        flat = cls()
        flat.extend(entries)
        return flat

    def append(self, value: dict[int, Logprob] | None) -> None:
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (value or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, values: Iterable[dict[int, Logprob] | None]) -> None:
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...
    def __getitem__(self, index: int | slice) -> "dict[int, Logprob] | FlatLogprobs":
        if isinstance(index, slice):
            return FlatLogprobs.of(self[position] for position in range(len(self))[index])
        return {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
            for at in range(self.start_indices[index], self.end_indices[index])
        }

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return (self[position] for position in range(len(self)))

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError("FlatLogprobs grows at its end only; no position can be set")

    def __delitem__(self, index: Any) -> NoReturn:
        raise TypeError("FlatLogprobs grows at its end only; no position can be deleted")

    def insert(self, index: int, value: Any) -> NoReturn:
        raise TypeError("FlatLogprobs grows at its end only; nothing can be inserted")


SampleLogprobs = LogprobsList[dict[int, Logprob]] | FlatLogprobs | list[dict[int, Logprob]]
"""One dict per generated token."""
PromptLogprobs = LogprobsList[dict[int, Logprob] | None] | FlatLogprobs | list[dict[int, Logprob] | None]
"""One dict per prompt token; None for the first, which nothing precedes."""


def joined(first: SampleLogprobs, following: SampleLogprobs) -> SampleLogprobs:
    """Both stretches in one, of the kind of `first`; neither changes."""
    if isinstance(first, LogprobsList) and isinstance(following, LogprobsList):
        before, behind = first.entries, following.entries
        if isinstance(before, SamplePositions) and isinstance(behind, SamplePositions):
            if before.store is behind.store and before.stop == behind.start:
                return LogprobsList(SamplePositions(before.store, before.start, behind.stop))
    entries = [*first, *following]
    return FlatLogprobs.of(entries) if isinstance(first, FlatLogprobs) else entries
