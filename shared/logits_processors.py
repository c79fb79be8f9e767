"""The interface of logits processors: code that changes the logits of a whole batch before a token is drawn.

To add one, subclass `LogitsProcessor` at the top level of a module or of the script, and hand the class, or its path
"package.module:Class", to the engine. The core builds one instance for the whole engine, tells it which request sits in
which row, and calls it once per step. Requests reach it with their parameters: `SamplingParams.extra_args` is free for
a processor's own settings.

The shell imports the class too, for `validate_params`; this module loads no torch, and a processor's need not either.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..protocol.config import VllmConfig
from ..protocol.params import SamplingParams
from ..protocol.user_classes import load_class

if TYPE_CHECKING:
    import torch


class MoveDirectionality(enum.Enum):
    UNIDIRECTIONAL = 0  # the request in the first row goes to the second, which was free
    SWAP = 1  # the requests in the two rows change places


class AddedRequest(NamedTuple):
    """A request that now sits in `row`, in place of any that sat there.

    `output_token_ids` is live: it grows by every token that is generated. `prompt_token_ids` is None for a prompt that
    was given as embeddings.
    """

    row: int
    params: SamplingParams
    prompt_token_ids: list[int] | None
    output_token_ids: list[int]


@dataclass(slots=True)
class BatchUpdate:
    """Changes of the batch since the last update, to be taken in this order: removed, added, moved."""

    batch_size: int  # rows once all updates of the step are taken
    removed: list[int] = field(default_factory=list)
    added: list[AddedRequest] = field(default_factory=list)
    moved: list[tuple[int, int, MoveDirectionality]] = field(default_factory=list)


class LogitsProcessor(ABC):
    """One instance serves the whole batch. Called from one thread, between the model's forward and the draw."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: "torch.device", is_pin_memory: bool) -> None: ...

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError if the request asks this processor for something it cannot do.

        Called where the request is made, maybe from several threads, and again in the core. `params` stay as they are.
        """
        return None

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the largest logit of every row stays the largest.

        Such a processor runs on the scaled logits, after temperature, and not at all in an all-greedy batch; any other
        runs before penalties and temperature.
        """

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch. Called before each `apply` with what changed, None for nothing; more than once a step
        where the order of the changes demands it."""

    @abstractmethod
    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        """logits: [batch size, vocab] float32, row i belongs to the request in row i. Change in place or return new.

        Rows that are not sampled now (a prompt not wholly computed; after temperature: greedy rows) hold zeros.
        """

    def is_active(self) -> bool:
        """False while no request in the batch is concerned: then `apply` is skipped."""
        return True


class RowsFailed(Exception):
    """Raised by `apply` when it failed for some rows and has done its work for the others; by row, what went wrong."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        super().__init__(f"rows {sorted(errors)}")
        self.errors = errors


def load_logits_processors(
    paths: Sequence[str], vllm_config: VllmConfig, device: "torch.device"
) -> list[LogitsProcessor]:
    """Build the processors named as "package.module:Class". Raises what `load_processor_class` does."""
    return [load_processor_class(path)(vllm_config, device, device.type == "cuda") for path in paths]


def load_processor_class(path: str) -> type[LogitsProcessor]:
    """Raises ValueError naming the path that is malformed, does not import, or is not a `LogitsProcessor`."""
    return load_class(path, LogitsProcessor, "logits processor")  # type: ignore[type-abstract]
