"""How each matrix of a model is kept and what that takes, decided once: the worker counts by the plan before anything
is loaded, and the loader builds by it. A runtime says how it keeps one product; `plan_weights` asks it about all."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..dtypes import DType
from ..kernels.linear import Rows
from ..kernels.memory import Keep
from .spec import ModelSpec
from .tensor_names import Projection, embedding_projection, head_projection, layer_projections, vectors
from .tensor_source import TensorSource

Matrix = TypeVar("Matrix", covariant=True)
Kinds = tuple[str | None, ...]
"""Of block, one for each part of a projection; None: not to be kept in blocks."""


class BuildMatrix(Protocol[Matrix]):
    """Packs, quantises or copies a matrix of `rows` ([n, k]) with its bias ([n]), a slab of rows at a time, into
    buffers that `keep` gives, where the runtime has its weights in such."""

    def __call__(self, rows: Rows, bias: Rows | None, /, *, keep: Keep) -> Matrix: ...


@dataclass(frozen=True, slots=True)
class MatrixPlan(Generic[Matrix]):
    """One product: it takes `num_bytes` for good, and `loading_bytes` more while it is read.

    from_blocks: it is built from the file's own blocks, as they lie there, and not from values of the engine's dtype.
    """

    projection: Projection
    build: BuildMatrix[Matrix]
    num_bytes: int
    loading_bytes: int
    from_blocks: bool = False


@dataclass(frozen=True, slots=True)
class LayerPlan(Generic[Matrix]):
    qkv: MatrixPlan[Matrix]
    o: MatrixPlan[Matrix]
    gate_up: MatrixPlan[Matrix]
    down: MatrixPlan[Matrix]


@dataclass(frozen=True, slots=True)
class WeightPlan(Generic[Matrix]):
    """A whole model's. `embedding`: None where it is a table of `dtype`, which a tied head holds a second time, as a
    product; else rows are looked up in the blocks of this matrix, which may be the head itself."""

    spec: ModelSpec
    dtype: DType
    layers: tuple[LayerPlan[Matrix], ...]
    head: MatrixPlan[Matrix] | None
    embedding: MatrixPlan[Matrix] | None

    @property
    def num_bytes(self) -> int:
        """What the model takes once it is loaded."""
        table = self.spec.vocab_size * self.spec.hidden_size * self.dtype.itemsize if self.embedding is None else 0
        norm_size = 4 if self.spec.norm_offset else self.dtype.itemsize
        norms = norm_size * sum(size for _, size in vectors(self.spec))
        return table + norms + sum(matrix.num_bytes for matrix in self._matrices())

    @property
    def kept_as(self) -> str:
        """For messages: what most of it is."""
        in_blocks = any(matrix.from_blocks for matrix in self._matrices())
        return "the file's own blocks" if in_blocks else str(self.dtype)

    @property
    def peak_bytes(self) -> int:
        """What it takes at most while it is loaded."""
        return self.num_bytes + max(matrix.loading_bytes for matrix in self._matrices())

    def _matrices(self) -> Iterator[MatrixPlan[Matrix]]:
        if self.head is not None:
            yield self.head
        if self.embedding is not None and self.embedding is not self.head:
            yield self.embedding
        for layer in self.layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)


def plan_weights(
    spec: ModelSpec,
    dtype: DType,
    quantization: str | None,
    source: TensorSource,
    plan_matrix: Callable[[Projection, Kinds], MatrixPlan[Matrix]],
) -> WeightPlan[Matrix]:
    """plan_matrix: given a projection and in which kind of block each of its parts lies, where those are to be kept.

    Raises ValueError for "gguf" of another file.
    """
    if quantization == "gguf" and not source.block_kinds:
        raise ValueError(f"quantization 'gguf' needs a .gguf file; {source.path} is none")
    kinds = source.block_kinds if quantization in (None, "gguf") else {}

    def plan(projection: Projection) -> MatrixPlan[Matrix]:
        return plan_matrix(projection, tuple(kinds.get(f"{name}.weight") for name in projection.names))

    layers = tuple(LayerPlan(*map(plan, layer_projections(spec, index))) for index in range(len(spec.layers)))
    head_names = head_projection(spec)
    head = None if head_names is None else plan(head_names)
    embedding = head if head is not None and spec.tied_head else plan(embedding_projection(spec))
    return WeightPlan(spec, dtype, layers, head, embedding if embedding.from_blocks else None)
