"""An answer as blocks: runs of reasoning, of text, and one for each tool call, as Anthropic's and the responses API
spell it. One block is open at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..parsers.base import CallDelta, Delta

Kind = Literal["reasoning", "text", "call"]
Act = Literal["open", "piece", "close"]
_OWN_CALL_ID = "chatcmpl-tool-"


@dataclass(slots=True)
class Block:
    """`pieces`: the reasoning, the text, or the arguments' JSON of a call, whose `call_id` and `name` are set."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """`text` is what a "piece" adds to its block."""

    act: Act
    block: Block
    text: str = ""


class BlockReader:
    """Turns deltas into block events. White space alone makes no block of text beside other blocks."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._blank = ""  # white space that becomes text if text follows

    def read(self, delta: Delta) -> Iterator[BlockEvent]:
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning)
        if delta.content:
            yield from self._add_text(delta.content)
        for call in delta.calls:
            yield from self._add_call(call)

    def finish(self) -> Iterator[BlockEvent]:
        """Closes the last block. An answer of nothing is one empty text."""
        if not self.blocks:
            yield self._begin(Block("text", 0))
            if self._blank:
                yield self._piece(self._blank)
        yield from self._close()

    def _add_text(self, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != "text":
            text = self._blank + text
            self._blank = "" if text.strip() else text
            if self._blank:
                return
        yield from self._add("text", text)

    def _add(self, kind: Kind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            yield self._begin(Block(kind, len(self.blocks)))
        yield self._piece(text)

    def _add_call(self, call: CallDelta) -> Iterator[BlockEvent]:
        if call.id is not None:
            self._blank = ""
            yield from self._close()
            yield self._begin(Block("call", len(self.blocks), call.id, call.name or ""))
        if call.arguments:
            yield self._piece(call.arguments)

    def _begin(self, block: Block) -> BlockEvent:
        self.blocks.append(block)
        self._open = block
        return BlockEvent("open", block)

    def _piece(self, text: str) -> BlockEvent:
        assert self._open is not None
        self._open.pieces.append(text)
        return BlockEvent("piece", self._open, text)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockEvent("close", self._open)
        self._open = None


def call_id_for(block: Block, prefix: str) -> str:
    """The call's id with an API's own prefix; an id that the model wrote stays as it is."""
    if block.call_id.startswith(_OWN_CALL_ID):
        return prefix + block.call_id.removeprefix(_OWN_CALL_ID)
    return block.call_id
