"""The runtime on the native kernels: a whole step is one recorded list of operations, run in one parallel region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ..attention.interface import AttentionMetadata, StepMetadata
from ..attention.native import NativeAttentionBackend
from ..dtypes import AnyDType, DType
from ..kernels import library
from ..kernels.linear import (
    GELU_MUL,
    PANEL,
    SILU_MUL,
    STORE,
    BlockWeight,
    Int8Weight,
    MixedWeight,
    PackedWeight,
    block_bytes,
    block_loading_bytes,
    loading_bytes,
)
from ..kernels.memory import Array, Buffer, Keep, as_buffer, as_tensor, keep_new
from ..lazy_torch import inference_mode, torch
from ..lora.adapter import Adapter, AdapterRows
from ..models.rotary import inverse_frequencies, rotary_table
from ..models.spec import ModelSpec, RotarySpec
from ..models.tensor_names import Projection
from ..models.tensor_source import TensorSource
from ..models.weight_plan import Kinds, MatrixPlan, WeightPlan
from ..models.weights import DecoderWeights, PromptEmbeds, load_weights
from ..packed_cache import kept
from .interface import Runtime
from .native_adapters import packed
from .native_program import DecoderProgram, HeadProgram

_FIRST_CAPACITY = 64
_FIRST_POSITIONS = 1024
_EPILOGUES = {None: STORE, "silu": SILU_MUL, "gelu_tanh": GELU_MUL}
"""What may follow a product, by its activation."""


class NativeRuntime(Runtime[PackedWeight]):
    """See `Runtime`. Activations are bfloat16, and a token's bits do not depend on what else is in the batch: sums are
    taken in an order of each token's own, along a row of weights, and along the context at fixed places."""

    attention: Sequence[NativeAttentionBackend]

    def __init__(self, spec: ModelSpec, dtype: AnyDType, block_size: int, quantization: str | None = None) -> None:
        attention = [NativeAttentionBackend(layer.attention, block_size, dtype) for layer in spec.layers]
        super().__init__(spec, dtype, quantization, attention)
        self._programs: dict[bool, DecoderProgram] = {}  # by whether they apply adapters
        self._program: DecoderProgram | None = None  # the one that has entered a step
        self._head: HeadProgram | None = None
        self._metadata: StepMetadata | None = None  # of the step that the program has entered
        self._query_metadata: AttentionMetadata[Array] | None = None
        self._picks: np.ndarray | None = None  # which of the program's states were asked for, where it has more
        self._tables: dict[RotarySpec, Buffer] = {}
        self._num_positions = 0  # that the tables have
        self._result: Buffer = as_buffer(np.empty(0))

    @staticmethod
    def obstacle(spec: ModelSpec, dtype: AnyDType, block_size: int) -> str | None:
        """What keeps the native kernels from running this model, and what to change; None where they can."""
        if DType.of(dtype) is not DType.BFLOAT16:
            return f"dtype is {DType.of(dtype)}, which the native kernels do not multiply with; use dtype='bfloat16'"
        if not library.is_available():
            return (
                "the native kernels are not built or switched off; build them and leave CORESPAN_CPU_ISA other than "
                "'none'"
            )
        for layer in spec.layers:
            sizes = (spec.hidden_size, layer.attention.q_size, layer.mlp.inner_size)
            if any(size % 16 for size in sizes):
                return (
                    f"no native kernel multiplies with hidden_size {sizes[0]}, {sizes[1]} channels of queries and "
                    f"intermediate_size {sizes[2]}; each must be a multiple of 16"
                )
            if obstacle := NativeAttentionBackend.obstacle(layer.attention, block_size, dtype):
                return obstacle
        return None

    def _plan_matrix(self, projection: Projection, kinds: Kinds) -> MatrixPlan[PackedWeight]:
        """A gated pair of two kinds of block is dequantised; all else is kept in blocks where a kernel knows them."""
        rows, columns = projection.shape
        padded_rows, slab = -(-rows // PANEL) * PANEL, loading_bytes(rows, columns)
        epilogue = _EPILOGUES[projection.activation]
        known = [kind for kind in kinds if BlockWeight.knows(kind)]
        if len(set(known)) == 1 and len(known) == len(kinds):
            build = partial(BlockWeight, known[0], epilogue=epilogue)
            num_bytes, slab = block_bytes(known[0], rows, columns), block_loading_bytes(known[0], rows, columns)
            return MatrixPlan(projection, build, num_bytes, slab, from_blocks=True)
        aligned = all(count % PANEL == 0 for count in projection.rows[:-1])
        if len(known) == len(kinds) and projection.activation is None and aligned:
            parts = list(zip(known, projection.rows, strict=True))
            num_bytes = sum(block_bytes(kind, count, columns) for kind, count in parts)
            slab = max(block_loading_bytes(kind, count, columns) for kind, count in parts)
            return MatrixPlan(projection, partial(MixedWeight, parts), num_bytes, slab, from_blocks=True)
        if self.quantization == "int8":
            return MatrixPlan(projection, partial(Int8Weight, epilogue=epilogue), padded_rows * (columns + 4), slab)
        num_bytes = padded_rows * columns * self.dtype.itemsize
        return MatrixPlan(projection, partial(PackedWeight, epilogue=epilogue), num_bytes, slab)

    def _load(
        self, plan: WeightPlan[PackedWeight], source: TensorSource, num_positions: int
    ) -> DecoderWeights[PackedWeight]:
        self._compute_tables(max(num_positions, _FIRST_POSITIONS))
        if not source.files:
            return load_weights(plan, source, keep_new)
        settings = self.spec, self.dtype, self.quantization, source.block_kinds
        weights, self.shared_bytes = kept(source.files, settings, lambda keep: load_weights(plan, source, keep))
        return weights

    def _compute_tables(self, num_positions: int) -> None:
        """A file of their own: they take time without the model's files, and their size is the engine's choice."""
        rotaries = sorted({layer.attention.rotary for layer in self.spec.layers if layer.attention.rotary}, key=repr)

        def table(rotary: RotarySpec, keep: Keep) -> Buffer:
            def fill(out: Buffer) -> None:
                out[:] = as_buffer(rotary_table(inverse_frequencies(rotary), num_positions, self.dtype.torch))

            return keep((num_positions, rotary.dim), np.float32, fill)

        self._tables, _ = kept(
            (), (rotaries, num_positions, self.dtype), lambda keep: {each: table(each, keep) for each in rotaries}
        )
        self._num_positions = num_positions

    def unload(self) -> None:
        super().unload()
        self._forget_programs()
        self._head = None

    def release_kv(self) -> None:
        super().release_kv()
        self._forget_programs()

    def _forget_programs(self) -> None:
        self._programs.clear()
        self._program = None

    @inference_mode
    def keep_adapter(self, adapter: Adapter) -> Adapter:
        return replace(adapter, parts={place: packed(part) for place, part in adapter.parts.items()})

    def forward(
        self,
        token_ids: np.ndarray | torch.Tensor,
        metadata: StepMetadata,
        output_rows: np.ndarray | torch.Tensor | None = None,
        prompt_embeds: PromptEmbeds = (),
        adapters: Sequence[AdapterRows] = (),
    ) -> Buffer:
        program = self._program
        if metadata is not self._metadata or program is None or metadata[0].max_seq_len > self._num_positions:
            program = self._enter_step(token_ids, metadata, output_rows, adapters)
        if prompt_embeds:
            self._run_with(program, token_ids, prompt_embeds)
        else:
            program.run()
        return self._result if self._picks is None else self._result[self._picks]

    def _enter_step(
        self,
        token_ids: np.ndarray | torch.Tensor,
        metadata: StepMetadata,
        output_rows: np.ndarray | torch.Tensor | None,
        adapters: Sequence[AdapterRows],
    ) -> DecoderProgram:
        of_last_layer = metadata[self.kv_layout.group_of[-1]]
        program = self._program_for(of_last_layer.num_tokens, of_last_layer.max_seq_len, bool(adapters))
        queries, query_metadata = np.arange(of_last_layer.num_tokens), of_last_layer
        self._picks = None
        if output_rows is not None:
            output_rows = np.asarray(output_rows)
            queries, query_metadata = _queries(output_rows, of_last_layer)
            if not np.array_equal(queries, output_rows):
                self._picks = np.searchsorted(queries, output_rows)
        program.enter_step(as_buffer(token_ids), metadata, queries, query_metadata, adapters)
        self._program = program
        self._metadata, self._query_metadata = metadata, query_metadata
        self._result = program.output[: queries.shape[0]]
        return program

    def _program_for(self, num_tokens: int, num_positions: int, with_adapters: bool) -> DecoderProgram:
        """The program at hand, or one with more room, by doubling."""
        if num_positions > self._num_positions:
            self._compute_tables(1 << (num_positions - 1).bit_length())
            self._forget_programs()
        program = self._programs.get(with_adapters)
        if program is None or num_tokens > program.capacity:
            capacity = max(_FIRST_CAPACITY, 1 << (num_tokens - 1).bit_length())
            program = self._programs[with_adapters] = DecoderProgram(
                self._loaded(),
                self.attention,
                self.kv_caches,
                self.kv_layout.group_of,
                capacity,
                self._tables,
                with_adapters,
            )
        return program

    @inference_mode
    def _run_with(
        self, program: DecoderProgram, token_ids: np.ndarray | torch.Tensor, prompt_embeds: PromptEmbeds
    ) -> None:
        program.run(as_buffer(self._loaded().embed(as_tensor(token_ids), prompt_embeds)))

    def logits(self, hidden: Array) -> Buffer:
        if self._head is None or hidden.shape[0] > self._head.capacity:
            self._head = HeadProgram(self._loaded(), hidden.shape[0])
        return self._head.run(as_buffer(hidden))


def _queries(
    output_rows: np.ndarray, metadata: AttentionMetadata[Array]
) -> tuple[np.ndarray, AttentionMetadata[Array]]:
    """The tokens whose queries the last layer needs, in ascending order, and the metadata of a step of just those.

    Attention takes a request's queries for its last tokens: those from the first that is asked for on.
    """
    ends, positions = np.asarray(metadata.query_start_loc[1:]), np.asarray(metadata.positions)
    first = ends.astype(np.int64)
    np.minimum.at(first, np.searchsorted(ends, output_rows, side="right"), output_rows)
    starts = np.zeros(metadata.num_reqs + 1, dtype=np.int32)
    np.cumsum(ends - first, out=starts[1:])
    queries = np.arange(starts[-1]) + np.repeat(first - starts[:-1], ends - first)
    step = replace(metadata, query_start_loc=as_buffer(starts), positions=as_buffer(positions[queries]))
    return queries, step
