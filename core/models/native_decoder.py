"""The decoder on the native kernels: a whole step is one recorded list of operations, run in one parallel region.

The model runner uses it in place of `Decoder` where the kernels can run the model."""

import ctypes
import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..attention.interface import AttentionBackend, AttentionMetadata, KVCache
from ..attention.native import NativeAttentionBackend, fill_step
from ..kernels import library, memory
from ..kernels.linear import PANEL, PackedWeight, QuantizedRows
from .decoder import Decoder, DecoderLayer
from .decoder_config import DecoderConfig
from .linear import Linear, NativeLinear
from .ops import TorchOps
from .rotary import rotary_table
from .tensor_source import TensorSource

logger = logging.getLogger("corespan.core")

_NO_KERNELS = "the native kernels are not built, or do not run this model or dtype"
_WITHOUT_KERNELS = {
    "int8": "its weights are turned to float32 at every product, which saves memory and is slow",
    "gguf": "weights that no kernel reads in the file's own bits are held in the engine's dtype instead",
}
_FIRST_CAPACITY = 64


def load_decoder(
    config: DecoderConfig,
    source: TensorSource,
    dtype: torch.dtype,
    attention_backend: type[AttentionBackend],
    block_size: int,
    quantization: str | None = None,
) -> Decoder:
    """The decoder that runs fastest here. Raises ValueError as `Decoder` does."""
    native = NativeDecoder.supports(config, dtype, attention_backend)
    if quantization is not None and not native:
        logger.warning("quantization is %r, and %s: %s", quantization, _NO_KERNELS, _WITHOUT_KERNELS[quantization])
    decoder = NativeDecoder if native else Decoder
    return decoder(config, source, dtype, attention_backend, block_size, TorchOps(), quantization)


class NativeDecoder(Decoder):
    """Same weights, same face; activations are bfloat16.

    A recording holds addresses, so it lasts until the buffers grow, the caches move or the rotary table is extended.
    """

    _recording: library.Recording | None = None
    _first_cache: weakref.ref[torch.Tensor] | None = None  # of the caches in `_recording`
    _metadata: AttentionMetadata | None = None  # of the last step
    _picks: torch.Tensor | None = None  # which of its states were asked for, where there are more
    _head: library.Recording | None = None
    _head_input = torch.empty(0)
    _head_input_at = 0  # the address that `_head` reads from
    _logits = torch.empty(0, 0)
    _capacity = 0

    @staticmethod
    def supports(config: DecoderConfig, dtype: torch.dtype, attention_backend: type[AttentionBackend]) -> bool:
        """Whether every matrix product and the attention of such a model are native."""
        sizes = (config.hidden_size, config.q_size, config.intermediate_size)
        return attention_backend is NativeAttentionBackend and all(
            size % 16 == 0 and PackedWeight.supports(dtype, size, size) for size in sizes
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
        output_rows: torch.Tensor | None = None,
        prompt_embeds: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> torch.Tensor:
        """As `Decoder.forward`. The result is overwritten by the next call.

        Metadata that comes again at once comes with the same other arguments as before. Without `output_rows`, the
        content of the tensors may be new.
        """
        if metadata is not self._metadata:
            self._enter_step(token_ids, metadata, output_rows)
        self._extend_rotary_table(metadata.max_seq_len)
        if self._recording is None or self._first_cache is None or self._first_cache() is not kv_caches[0]:
            self._recording = self._record(kv_caches)
            self._first_cache = weakref.ref(kv_caches[0])
        if prompt_embeds:
            self._embed_with(prompt_embeds, token_ids)
        self._recording.run(first=1 if prompt_embeds else 0)
        return self._result if self._picks is None else self._result[self._picks]

    @torch.inference_mode()
    def _enter_step(
        self, token_ids: torch.Tensor, metadata: AttentionMetadata, output_rows: torch.Tensor | None
    ) -> None:
        """Points the recording at the step's tensors."""
        num_tokens = metadata.num_tokens
        self._reserve(num_tokens)
        queries, self._query_metadata = self._every_row[:num_tokens], metadata
        self._picks = None
        if output_rows is not None:
            queries, self._query_metadata = _queries(output_rows, metadata)
            if not torch.equal(queries, output_rows):
                self._picks = torch.searchsorted(queries, output_rows)
        num_rows = queries.shape[0]
        self._num_tokens.value, self._num_rows.value = num_tokens, num_rows
        self._query_rows[:num_rows] = queries
        self._embed.ids = token_ids.data_ptr()
        fill_step(self._step, metadata, self.layers[0].attention.block_size)
        fill_step(self._query_step, self._query_metadata, self.layers[0].attention.block_size)
        self._result = self._output[:num_rows]
        self._metadata = metadata

    @torch.inference_mode()
    def _embed_with(self, prompt_embeds: Sequence[tuple[int, torch.Tensor]], token_ids: torch.Tensor) -> None:
        hidden = self._embedded(token_ids, prompt_embeds)
        self._hidden[: hidden.shape[0]] = hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `Decoder.compute_logits`. The result is overwritten by the next call."""
        if hidden is not self._head_input:
            self._enter_head(hidden)
        assert self._head is not None
        self._head.run()
        return self._head_logits

    def _enter_head(self, hidden: torch.Tensor) -> None:
        """Points the head's recording at these states."""
        num_rows = hidden.shape[0]
        if num_rows > self._logits.shape[0]:
            self._normed_rows = memory.allocate((num_rows, self.config.hidden_size), self.dtype)
            self._logits = memory.allocate((num_rows, self.config.vocab_size), torch.float32)
            self._quantized_rows = QuantizedRows(num_rows, self.config.hidden_size)
            self._head = None
        if self._head is None or self._head_input_at != hidden.data_ptr():
            self._head_rows = library.Int()
            self._head = self._record_head(hidden, ctypes.addressof(self._head_rows))
            self._head_input_at = hidden.data_ptr()
        self._head_rows.value = num_rows
        self._head_input, self._head_logits = hidden, self._logits[:num_rows]

    def _record_head(self, hidden: torch.Tensor, rows: int) -> library.Recording:
        assert isinstance(self.lm_head, NativeLinear)
        norm = self._norm(rows, None, hidden, self.norm, self._normed_rows)
        product = self.lm_head.packed.operations(rows, self._normed_rows, self._logits, self._quantized_rows)
        return library.Recording([norm, *product])

    def _reserve(self, num_tokens: int) -> None:
        """Makes room for a step of `num_tokens`, by doubling."""
        if num_tokens <= self._capacity:
            return
        config = self.config
        capacity = max(_FIRST_CAPACITY, 1 << (num_tokens - 1).bit_length())

        def buffer(width: int) -> torch.Tensor:
            return memory.allocate((capacity, width), self.dtype)

        self._capacity = capacity
        self._recording = None
        self._hidden, self._output, self._hidden_rows = (buffer(config.hidden_size) for _ in range(3))
        self._normed, self._update = buffer(config.hidden_size), buffer(config.hidden_size)
        self._qkv = buffer(config.q_size + 2 * config.kv_size)
        self._attended = buffer(config.q_size)
        self._activated = buffer(config.intermediate_size)
        # By width, since blocks of rows do not wait for each other: one may be at another product already.
        widths = {config.hidden_size, config.q_size, config.intermediate_size}
        self._quantized = {width: QuantizedRows(capacity, width) for width in widths}
        self._every_row = torch.arange(capacity)
        self._query_rows = torch.empty(capacity, dtype=torch.int64)
        self._num_tokens, self._num_rows = library.Int(), library.Int()
        self._step, self._query_step = library.Step(), library.Step()
        self._embed = library.Embed(
            rows=ctypes.addressof(self._num_tokens),
            table=self.embed_weight.data_ptr(),
            out=self._hidden.data_ptr(),
            size=config.hidden_size,
            dtype=library.dtype_code(self.dtype),
        )

    _num_positions = 0  # that `_cos_sin` has

    def _extend_rotary_table(self, num_positions: int) -> None:
        if num_positions > self._num_positions:
            self._num_positions = max(1024, 1 << (num_positions - 1).bit_length())
            self._cos_sin = rotary_table(self.frequencies, self._num_positions, self.dtype)
            self._recording = None

    def _record(self, kv_caches: Sequence[KVCache]) -> library.Recording:
        tokens = ctypes.addressof(self._num_tokens)
        operations: list[library.Operation] = [self._embed]
        chain: list[library.Operation] = []  # what every token goes through between two attentions
        update: torch.Tensor | None = None  # what the layer before has yet to add to the hidden states
        for layer, kv_cache in zip(self.layers[:-1], kv_caches[:-1], strict=True):
            chain += [
                self._norm(tokens, update, self._hidden, layer.input_norm, self._normed),
                *self._product(_packed(layer.qkv), tokens, self._normed, self._qkv),
                self._rotary(layer, tokens, self._step, kv_cache),
            ]
            operations += [*_in_row_blocks(tokens, chain), self._attention(layer, kv_cache, self._step)]
            chain, update = self._after_attention(layer, tokens, self._hidden), self._update
        return library.Recording(operations + self._last_layer(chain, update, kv_caches[-1]))

    def _last_layer(
        self, chain: list[library.Operation], update: torch.Tensor | None, kv_cache: KVCache
    ) -> list[library.Operation]:
        """Keys and values of every token, and all else of the tokens that are asked for."""
        layer, tokens, rows = self.layers[-1], ctypes.addressof(self._num_tokens), ctypes.addressof(self._num_rows)
        qkv, q_size = _packed(layer.qkv), self.config.q_size
        first = q_size // PANEL * PANEL  # queries that share a panel with keys are computed again below
        rotate_keys = self._rotary(layer, tokens, self._step, kv_cache)
        rotate_keys.qkv, rotate_keys.num_heads = self._qkv[:, q_size:].data_ptr(), 0
        keys_and_values = [
            self._norm(tokens, update, self._hidden, layer.input_norm, self._normed),
            *self._product(qkv.columns(first, qkv.n), tokens, self._normed, self._qkv[:, first:]),
            rotate_keys,
        ]
        queries = [
            self._pick_rows(self._hidden, self._hidden_rows),
            self._norm(rows, None, self._hidden_rows, layer.input_norm, self._normed),
            *self._product(qkv.columns(0, q_size), rows, self._normed, self._qkv),
            self._rotary(layer, rows, self._query_step, None),
        ]
        result = [
            *self._after_attention(layer, rows, self._hidden_rows),
            self._norm(rows, self._update, self._hidden_rows, None, self._output),
        ]
        return [
            *_in_row_blocks(tokens, chain + keys_and_values),
            *_in_row_blocks(rows, queries),
            self._attention(layer, kv_cache, self._query_step),
            *_in_row_blocks(rows, result),
        ]

    def _after_attention(self, layer: DecoderLayer, rows: int, hidden: torch.Tensor) -> list[library.Operation]:
        """Leaves in `_update` what is yet to be added to `hidden`."""
        return [
            *self._product(_packed(layer.o), rows, self._attended, self._update),
            self._norm(rows, self._update, hidden, layer.post_norm, self._normed),
            *self._product(_packed(layer.gate_up), rows, self._normed, self._activated),
            *self._product(_packed(layer.down), rows, self._activated, self._update),
        ]

    def _product(self, weight: PackedWeight, rows: int, x: torch.Tensor, out: torch.Tensor) -> list[library.Operation]:
        return weight.operations(rows, x, out, self._quantized[weight.k])

    def _norm(
        self, rows: int, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor
    ) -> library.RmsNorm:
        return library.RmsNorm(
            rows=rows,
            x=None if x is None else x.data_ptr(),
            residual=residual.data_ptr(),
            weight=None if weight is None else weight.data_ptr(),
            out=out.data_ptr(),
            size=self.config.hidden_size,
            eps=self.config.rms_norm_eps,
            dtype=library.dtype_code(self.dtype),
        )

    def _pick_rows(self, source: torch.Tensor, out: torch.Tensor) -> library.RmsNorm:
        """Copies the rows that are asked for."""
        return library.RmsNorm(
            rows=ctypes.addressof(self._num_rows),
            residual=source.data_ptr(),
            out=out.data_ptr(),
            row_index=self._query_rows.data_ptr(),
            size=source.shape[1],
            dtype=library.dtype_code(self.dtype),
        )

    def _rotary(
        self, layer: DecoderLayer, rows: int, step: library.Step, kv_cache: torch.Tensor | None
    ) -> library.Rotary:
        """Without a cache, of the queries alone."""
        config = self.config
        return library.Rotary(
            rows=rows,
            step=ctypes.addressof(step),
            qkv=self._qkv.data_ptr(),
            stride=self._qkv.stride(0),
            cos_sin=self._cos_sin.data_ptr(),
            q_norm=None if layer.q_norm is None else layer.q_norm.data_ptr(),
            k_norm=None if layer.k_norm is None else layer.k_norm.data_ptr(),
            k_cache=None if kv_cache is None else kv_cache[0].data_ptr(),
            v_cache=None if kv_cache is None else kv_cache[1].data_ptr(),
            num_blocks=0 if kv_cache is None else kv_cache.shape[2],
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.head_dim,
            eps=config.rms_norm_eps,
            dtype=library.dtype_code(self.dtype),
        )

    def _attention(self, layer: DecoderLayer, kv_cache: torch.Tensor, step: library.Step) -> library.Attention:
        config = self.config
        return library.Attention(
            step=ctypes.addressof(step),
            q=self._qkv.data_ptr(),
            q_stride=self._qkv.stride(0),
            k_cache=kv_cache[0].data_ptr(),
            v_cache=kv_cache[1].data_ptr(),
            num_blocks=kv_cache.shape[2],
            out=self._attended.data_ptr(),
            out_stride=self._attended.stride(0),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=layer.attention.scale,
            window=layer.attention.sliding_window or 0,
            dtype=library.dtype_code(self.dtype),
        )


def _queries(output_rows: torch.Tensor, metadata: AttentionMetadata) -> tuple[torch.Tensor, AttentionMetadata]:
    """The tokens whose queries the last layer needs, in ascending order, and the metadata of a step of just those.

    Attention takes a request's queries for its last tokens: those from the first that is asked for on.
    """
    ends = metadata.query_start_loc[1:].numpy()
    rows = output_rows.numpy()
    first = ends.astype(np.int64)
    np.minimum.at(first, np.searchsorted(ends, rows, side="right"), rows)
    starts = np.zeros(metadata.num_reqs + 1, dtype=np.int32)
    np.cumsum(ends - first, out=starts[1:])
    queries = torch.from_numpy(np.arange(starts[-1]) + np.repeat(first - starts[:-1], ends - first))
    step = replace(metadata, query_start_loc=torch.from_numpy(starts), positions=metadata.positions[queries])
    return queries, step


def _packed(linear: Linear) -> PackedWeight:
    assert isinstance(linear, NativeLinear)
    return linear.packed


def _in_row_blocks(rows: int, operations: list[library.Operation]) -> list[library.Operation]:
    return [library.RowBlocks(rows=rows, operations=len(operations)), *operations]
