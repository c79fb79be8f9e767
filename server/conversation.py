"""A conversation that remembers what was said; subclasses know who answers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .streaming import Interruption

if TYPE_CHECKING:
    from ..protocol.params import SamplingParams

Message = dict[str, str]


class Conversation(ABC):
    """The messages so far; subclasses know who answers them."""

    def __init__(self, params: "SamplingParams", system: str | None = None) -> None:
        self.params = params
        self.system = system
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return opening + self.turns

    def answer(self, question: str, interruption: Interruption) -> Iterator[str]:
        """Yields the answer's text as it grows. Both sides are remembered, an interrupted answer as far as it got.

        Raises ValueError where the question is refused, and then forgets it.
        """
        self.turns.append({"role": "user", "content": question})
        try:
            pieces = self._begin(interruption)
        except (ValueError, OSError):
            self.turns.pop()
            raise
        said: list[str] = []
        try:
            for text in pieces:
                said.append(text)
                yield text
        finally:
            self.turns.append({"role": "assistant", "content": "".join(said)})

    @abstractmethod
    def _begin(self, interruption: Interruption) -> Iterator[str]:
        """The pieces of the answer to `messages`. Raises ValueError for what is refused, at once."""
