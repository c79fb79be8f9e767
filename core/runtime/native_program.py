"""A decoder as one recorded list of native operations over buffers of its own: what `NativeRuntime` runs."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..attention.interface import AttentionMetadata, StepMetadata
from ..attention.native import NativeAttentionBackend, fill_step
from ..kernels import library, memory
from ..kernels.linear import PANEL, BlockWeight, PackedWeight, QuantizedRows
from ..kernels.memory import Array, Buffer, as_buffer, as_tensor
from ..lora.adapter import ATTENTION_OUT, DOWN, GATE_UP, PARTS_A_LAYER, QKV, AdapterRows
from ..models.ops import softcap
from ..models.spec import RotarySpec
from ..models.weights import DecoderWeights, LayerWeights, embed_factor
from .native_adapters import AdapterProducts, AdapterStep, Parts


@dataclass(frozen=True, slots=True)
class Layer:
    """What the operations of one layer read and write."""

    index: int
    weights: LayerWeights[PackedWeight]
    attention: NativeAttentionBackend
    kv_cache: Buffer
    step: library.Step
    cos_sin: Buffer | None


@dataclass(frozen=True, slots=True)
class Update:
    """What is yet to be added to the hidden states, after `norm` where there is one."""

    values: Buffer
    norm: Buffer | None


class DecoderProgram:
    """Runs steps of up to `capacity` tokens at positions that the tables have. A recording holds addresses, so other
    weights, caches or sizes need another program.

    `output`: [capacity, hidden_size], the states of the last step's queries.
    """

    def __init__(
        self,
        weights: DecoderWeights[PackedWeight],
        attention: Sequence[NativeAttentionBackend],
        kv_caches: Sequence[Buffer],
        group_of: Sequence[int],
        capacity: int,
        tables: Mapping[RotarySpec, Buffer],
        with_adapters: bool = False,
    ) -> None:
        """tables: of each rotation, by position (`rotary_table`); `with_adapters`: for steps that have some."""
        spec, self._dtype = weights.spec, weights.dtype
        self.capacity = capacity
        self._eps = spec.rms_norm_eps
        self._block_size = attention[0].block_size
        self._num_tokens, self._num_rows = library.Int(), library.Int()
        self._tokens, self._rows = ctypes.addressof(self._num_tokens), ctypes.addressof(self._num_rows)
        self._steps = [library.Step() for _ in range(max(group_of) + 1)]  # one a KV group
        self._query_step = library.Step()
        self._query_rows = as_buffer(np.zeros(capacity, dtype=np.int64))

        q_sizes = {layer.attention.q_size for layer in spec.layers}
        inner_sizes = {layer.mlp.inner_size for layer in spec.layers}
        # Hidden states, before a layer's attention and before its MLP: a sum leaves what it is made of as it was.
        self._hidden, self._middle, self._hidden_rows, self._middle_rows, self.output, self._normed, self._update = (
            self._buffer(spec.hidden_size) for _ in range(7)
        )
        self._qkv = self._buffer(max(layer.attention.qkv_size for layer in spec.layers))
        self._attended = self._buffer(max(q_sizes))
        self._activated = self._buffer(max(inner_sizes))
        # One scratch buffer per input width: row blocks run unsynchronised, so two products may be in flight.
        self._quantized = {
            width: QuantizedRows(capacity, width) for width in {spec.hidden_size, *q_sizes, *inner_sizes}
        }
        num_places = len(spec.layers) * PARTS_A_LAYER
        self._adapters = self._adapter_steps = None
        if with_adapters:
            widest = max(max(each.qkv.n, each.o.n, each.gate_up.n, each.down.n) for each in weights.layers)
            self._adapters = AdapterProducts(capacity, widest)
            self._adapter_steps = {rows: AdapterStep(num_places) for rows in (self._tokens, self._rows)}
        self._embed = self._embedding_of(weights)
        layers = [
            Layer(index, layer, backend, kv_cache, self._steps[group], _table(tables, backend.spec.rotary))
            for index, (layer, backend, kv_cache, group) in enumerate(
                zip(weights.layers, attention, kv_caches, group_of, strict=True)
            )
        ]
        self._recording = library.Recording(self._record(layers), keep_alive=(weights, layers))

    def _embedding_of(self, weights: DecoderWeights[PackedWeight]) -> library.Embed | library.EmbedBlocks:
        if isinstance(weights.embedding, BlockWeight):
            factor = embed_factor(weights.spec, self._dtype)
            return weights.embedding.lookup_operation(self._tokens, None, self._hidden, factor)
        return library.Embed(
            rows=self._tokens,
            table=weights.embedding.data_ptr(),
            out=self._hidden.data_ptr(),
            size=weights.spec.hidden_size,
            dtype=library.dtype_code(self._dtype),
        )

    def _buffer(self, width: int) -> Buffer:
        return memory.allocate((self.capacity, width), self._dtype.numpy)

    def enter_step(
        self,
        token_ids: Buffer,
        metadata: StepMetadata,
        queries: np.ndarray,
        query_metadata: AttentionMetadata[Array],
        adapters: Sequence[AdapterRows] = (),
    ) -> None:
        """Points the recording at the step's arrays, which must outlive its runs.

        queries: [n] int64, ascending, the tokens whose states are computed to the end; query_metadata: the last layer's
        metadata in a step of just those.
        """
        num_rows = queries.shape[0]
        self._num_tokens.value, self._num_rows.value = metadata[0].num_tokens, num_rows
        self._query_rows[:num_rows] = queries
        self._embed.ids = token_ids.data_ptr()
        for step, group in zip(self._steps, metadata, strict=True):
            fill_step(step, group, self._block_size)
        fill_step(self._query_step, query_metadata, self._block_size)
        if self._adapter_steps is not None:
            self._adapter_steps[self._tokens].enter(adapters, np.arange(metadata[0].num_tokens))
            self._adapter_steps[self._rows].enter(adapters, queries)

    def run(self, embedded: Buffer | None = None) -> None:
        """embedded: [num_tokens, hidden_size], what to begin with in place of the tokens' embeddings."""
        if embedded is None:
            self._recording.run()
        else:
            self._hidden[: embedded.shape[0]] = embedded
            self._recording.run(first=1)

    def _record(self, layers: list[Layer]) -> list[library.Operation]:
        tokens = self._tokens
        operations: list[library.Operation] = [self._embed]
        chain: list[library.Operation] = []  # what every token goes through between two attentions
        update: Update | None = None
        for layer in layers[:-1]:
            weights = layer.weights
            chain += [
                *self._normed_product(self._attention_norm(weights, update), weights.qkv, self._qkv, _qkv_parts(layer)),
                self._rotary(layer, tokens, layer.step, layer.kv_cache),
            ]
            operations += [*_in_row_blocks(tokens, chain), self._attend(layer, layer.step)]
            chain, update = self._after_attention(layer, tokens, self._hidden, self._middle)
        return operations + self._last_layer(layers[-1], chain, update)

    def _last_layer(
        self, layer: Layer, chain: list[library.Operation], update: Update | None
    ) -> list[library.Operation]:
        """Keys and values of every token, and all else of the tokens that are asked for."""
        weights, tokens, rows = layer.weights, self._tokens, self._rows
        qkv, q_size = weights.qkv, weights.spec.attention.q_size
        first = q_size // PANEL * PANEL  # queries that share a panel with keys are computed here and again below
        rotate_keys = self._rotary(layer, tokens, layer.step, layer.kv_cache)
        rotate_keys.qkv, rotate_keys.num_heads = self._qkv[:, q_size:].data_ptr(), 0
        keys_and_values = [
            *self._normed_product(
                self._attention_norm(weights, update),
                qkv.columns(first, qkv.n),
                self._qkv[:, first:],
                _qkv_parts(layer, 1, 3, skip=q_size - first),
            ),
            rotate_keys,
        ]
        queries = [
            self._pick_rows(self._hidden, self._hidden_rows),
            *self._normed_product(
                self._norm(rows, None, self._hidden_rows, None, weights.attention_norm, self._normed),
                qkv.columns(0, q_size),
                self._qkv,
                _qkv_parts(layer, 0, 1),
            ),
            self._rotary(layer, rows, self._query_step, None),
        ]
        result, update = self._after_attention(layer, rows, self._hidden_rows, self._middle_rows)
        result.append(self._norm(rows, update, self._middle_rows, self._hidden_rows, None, self.output))
        return [
            *_in_row_blocks(tokens, chain + keys_and_values),
            *_in_row_blocks(rows, queries),
            self._attend(layer, self._query_step),
            *_in_row_blocks(rows, result),
        ]

    def _after_attention(
        self, layer: Layer, rows: int, hidden: Buffer, middle: Buffer
    ) -> tuple[list[library.Operation], Update]:
        """`hidden` with what was attended to added becomes `middle`; the update is to that."""
        weights, first_place = layer.weights, layer.index * PARTS_A_LAYER
        hidden_size, inner_size = hidden.shape[1], weights.spec.mlp.inner_size
        attended = Update(self._update, weights.attention_output_norm)
        operations = [
            *self._product(
                weights.o, rows, self._attended, self._update, Parts(first_place + ATTENTION_OUT, (hidden_size,))
            ),
            *self._normed_product(
                self._norm(rows, attended, hidden, middle, weights.mlp_norm, self._normed),
                weights.gate_up,
                self._activated,
                Parts(first_place + GATE_UP, (inner_size,) * 2),
            ),
            *self._product(
                weights.down, rows, self._activated, self._update, Parts(first_place + DOWN, (hidden_size,))
            ),
        ]
        return operations, Update(self._update, weights.mlp_output_norm)

    def _attention_norm(self, weights: LayerWeights[PackedWeight], update: Update | None) -> library.RmsNorm:
        residual = self._hidden if update is None else self._middle
        return self._norm(self._tokens, update, residual, self._hidden, weights.attention_norm, self._normed)

    def _product(
        self, weight: PackedWeight, rows: int, x: Buffer, out: Buffer, parts: Parts
    ) -> list[library.Operation]:
        scratch = self._quantized[weight.k]
        if self._adapters is None or self._adapter_steps is None:
            return with_prologue(rows, weight.operations(rows, x, out, scratch))
        return self._adapters.record(weight, rows, x, out, scratch, parts, self._adapter_steps[rows])

    def _normed_product(
        self, norm: library.RmsNorm, weight: PackedWeight, out: Buffer, parts: Parts
    ) -> list[library.Operation]:
        if self._adapters is not None:  # they read the norm's result too
            return [norm, *self._product(weight, norm.rows, self._normed, out, parts)]
        product = weight.operations(norm.rows, self._normed, out, self._quantized[weight.k])
        return with_prologue(norm.rows, [norm, *product])

    def _norm(
        self,
        rows: int,
        update: Update | None,
        residual: Buffer,
        total: Buffer | None,
        weight: Buffer | None,
        out: Buffer,
    ) -> library.RmsNorm:
        return rms_norm(rows, update, residual, total, weight, out, self._eps)

    def _pick_rows(self, source: Buffer, out: Buffer) -> library.RmsNorm:
        """Copies the rows that are asked for."""
        copy = rms_norm(self._rows, None, source, None, None, out, self._eps)
        copy.row_index = self._query_rows.data_ptr()
        return copy

    def _rotary(self, layer: Layer, rows: int, step: library.Step, kv_cache: Buffer | None) -> library.Rotary:
        """Without a cache, of the queries alone."""
        weights, spec = layer.weights, layer.weights.spec.attention
        return library.Rotary(
            rows=rows,
            step=ctypes.addressof(step),
            qkv=self._qkv.data_ptr(),
            stride=self._qkv.stride(0),
            cos_sin=_address(layer.cos_sin),
            q_norm=_address(weights.q_norm),
            k_norm=_address(weights.k_norm),
            k_cache=None if kv_cache is None else kv_cache[0].data_ptr(),
            v_cache=None if kv_cache is None else kv_cache[1].data_ptr(),
            num_blocks=0 if kv_cache is None else kv_cache.shape[2],
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=0 if spec.rotary is None else spec.rotary.dim,
            eps=self._eps,
            dtype=library.dtype_code(self._dtype),
            wide_norms=weights.q_norm is not None and weights.q_norm.dtype != self._dtype.numpy,
        )

    def _attend(self, layer: Layer, step: library.Step) -> library.Attention:
        return layer.attention.operation(step, self._qkv, layer.kv_cache, self._attended)


def _table(tables: Mapping[RotarySpec, Buffer], rotary: RotarySpec | None) -> Buffer | None:
    return None if rotary is None else tables[rotary]


class HeadProgram:
    """The final norm and the head, recorded for up to `capacity` states."""

    def __init__(self, weights: DecoderWeights[PackedWeight], capacity: int) -> None:
        spec = weights.spec
        self.capacity = capacity
        self._num_rows = library.Int()
        rows = ctypes.addressof(self._num_rows)
        normed = memory.allocate((capacity, spec.hidden_size), weights.dtype.numpy)
        scratch = QuantizedRows(capacity, spec.hidden_size)
        self._logits = memory.allocate((capacity, spec.vocab_size), np.float32)
        self._norm = rms_norm(rows, None, normed, None, weights.norm, normed, spec.rms_norm_eps)
        assert weights.head is not None
        product = weights.head.operations(rows, normed, self._logits, scratch)
        operations = with_prologue(rows, [self._norm, *product])
        self._recording = library.Recording(operations, keep_alive=(weights, normed, scratch))
        self._softcap = spec.logit_softcap
        self._hidden = self._result = as_buffer(np.empty(0))

    def run(self, hidden: Buffer) -> Buffer:
        """hidden: [n, hidden_size]. Returns [n, vocab_size] float32, overwritten by the next run."""
        if hidden is not self._hidden:
            self._norm.residual, self._num_rows.value = hidden.data_ptr(), hidden.shape[0]
            self._hidden, self._result = hidden, self._logits[: hidden.shape[0]]
        self._recording.run()
        if self._softcap is not None:
            softcap(as_tensor(self._result), self._softcap)
        return self._result


def rms_norm(
    rows: int,
    update: Update | None,
    residual: Buffer,
    total: Buffer | None,
    weight: Buffer | None,
    out: Buffer,
    eps: float,
) -> library.RmsNorm:
    """See csrc/args.h. residual: [>= rows, size], contiguous; total: likewise, takes the residual and the update."""
    update_norm = None if update is None else update.norm
    return library.RmsNorm(
        rows=rows,
        x=None if update is None else update.values.data_ptr(),
        x_weight=_address(update_norm),
        residual=residual.data_ptr(),
        sum=_address(total),
        weight=_address(weight),
        out=out.data_ptr(),
        size=residual.shape[1],
        eps=eps,
        dtype=library.dtype_code(residual.dtype),
        wide_weights=any(norm is not None and norm.dtype != residual.dtype for norm in (weight, update_norm)),
    )


def _address(buffer: Buffer | None) -> int | None:
    return None if buffer is None else buffer.data_ptr()


def with_prologue(rows: int, operations: list[library.Operation]) -> list[library.Operation]:
    """operations: a product behind what leads up to it, whose results nothing else reads. Of several products, each has
    its own quantisation right before it, and what precedes the first of them is for all."""
    products = [index for index, operation in enumerate(operations) if isinstance(operation, library.Gemm)]
    if len(products) > 1:
        first = products[0] - 1
        pairs = [with_prologue(rows, operations[index - 1 : index + 1]) for index in products]
        return operations[:first] + [operation for pair in pairs for operation in pair]
    if len(operations) == 1:
        return operations
    return [library.Prologue(rows=rows, operations=len(operations) - 1), *operations]


def _qkv_parts(layer: Layer, first: int = 0, end: int = 3, skip: int = 0) -> Parts:
    """Of queries, keys and values, those from the first on; `skip` columns before them are computed in vain."""
    spec = layer.weights.spec.attention
    sizes = (spec.q_size, spec.kv_size, spec.kv_size)[first:end]
    return Parts(layer.index * PARTS_A_LAYER + QKV + first, sizes, skip)


def _in_row_blocks(rows: int, operations: list[library.Operation]) -> list[library.Operation]:
    return [library.RowBlocks(rows=rows, operations=len(operations)), *operations]
