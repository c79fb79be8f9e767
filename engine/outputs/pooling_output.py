"""What a user gets back of a prompt that was pooled. Made by the output processor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import numpy as np

from ...protocol.lora import LoRARequest

if TYPE_CHECKING:
    from ..metrics.stats import RequestStateStats

T = TypeVar("T")


@dataclass(slots=True)
class PoolingOutput:
    """data: [size] or, token by token, [num_tokens, size] float32."""

    data: np.ndarray


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """`probs`: of each class, in the order of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass
class PoolingRequestOutput(Generic[T]):
    """`request_id` is the caller's. `finish_reason`: "stop", or "error" or "abort" where there is nothing in `outputs`;
    `stop_reason` then says what went wrong.
    """

    request_id: str
    outputs: T
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int | None = None
    finished: bool = True
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    metrics: "RequestStateStats | None" = None
    lora_request: LoRARequest | None = None

    def require_success(self) -> None:
        """Raises RuntimeError where the request failed or was aborted."""
        if self.finish_reason != "stop":
            raise RuntimeError(f"request {self.request_id!r} ended with {self.finish_reason}: {self.stop_reason or ''}")


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Raises RuntimeError where the request failed, ValueError where there is more than one vector."""
        return _with(cls, base, EmbeddingOutput(_one_vector(base).tolist()))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Raises RuntimeError where the request failed, ValueError where there is more than one vector."""
        return _with(cls, base, ClassificationOutput(_one_vector(base).tolist()))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Raises RuntimeError where the request failed, ValueError where there is more than one number."""
        data = _one_vector(base)
        if data.shape != (1,):
            raise ValueError(f"a score is one number; this output is of shape {list(data.shape)}")
        return _with(cls, base, ScoringOutput(float(data[0])))

    @classmethod
    def of_pair(cls, first: PoolingRequestOutput[PoolingOutput], second: PoolingRequestOutput[PoolingOutput]) -> Self:
        """How near two texts' vectors are: their cosine; token by token, the sum over the first text's tokens of the
        nearest of the second's."""
        for each in (first, second):
            each.require_success()
        one, other = first.outputs.data, second.outputs.data
        if one.ndim == 1:
            length = float(np.linalg.norm(one) * np.linalg.norm(other))
            score = float(one @ other) / length if length else 0.0
        else:
            score = float((one @ other.T).max(axis=1).sum())
        joined = [*first.prompt_token_ids, *second.prompt_token_ids]
        return cls(f"{first.request_id}_{second.request_id}", ScoringOutput(score), joined)


R = TypeVar("R", bound=PoolingRequestOutput)  # type: ignore[type-arg]


def _one_vector(base: PoolingRequestOutput[PoolingOutput]) -> np.ndarray:
    base.require_success()
    if base.outputs.data.ndim != 1:
        raise ValueError(f"one vector is expected; this output is of shape {list(base.outputs.data.shape)}")
    return base.outputs.data


def _with(kind: type[R], base: PoolingRequestOutput[PoolingOutput], outputs: object) -> R:
    return kind(**{**vars(base), "outputs": outputs})
