"""The Llama-like decoder: embeddings, attention and feed-forward layers, head. Built from a checkpoint by the worker,
run by the model runner."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from ..attention.interface import AttentionBackend, AttentionMetadata, KVCache
from .decoder_config import DecoderConfig
from .ops import TorchOps
from .rotary import inverse_frequencies, rotary_tables
from .tensor_source import TensorSource, check_tensors
from .weight_format import Projection
from .weights import ProjectionReader

EMBEDDING = "model.embed_tokens.weight"


class DecoderLayer:
    """One layer's weights. `qkv` gives queries, keys and values side by side, `gate_up` the MLP's silu(gate) * up."""

    __slots__ = ("attention", "down", "gate_up", "input_norm", "k_norm", "o", "post_norm", "q_norm", "qkv")

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        source: TensorSource,
        dtype: torch.dtype,
        attention: AttentionBackend,
        projections: ProjectionReader,
    ) -> None:
        prefix = f"model.layers.{index}"
        attn = f"{prefix}.self_attn"
        self.input_norm = _read_vector(source, f"{prefix}.input_layernorm.weight", dtype)
        self.post_norm = _read_vector(source, f"{prefix}.post_attention_layernorm.weight", dtype)
        self.qkv, self.o, self.gate_up, self.down = map(projections.read, layer_projections(config, index))
        self.q_norm = _read_vector(source, f"{attn}.q_norm.weight", dtype) if config.qk_norm else None
        self.k_norm = _read_vector(source, f"{attn}.k_norm.weight", dtype) if config.qk_norm else None
        self.attention = attention


class Decoder:
    """Maps tokens (or embeddings) and the paged cache to the logits of the rows asked for."""

    def __init__(
        self,
        config: DecoderConfig,
        source: TensorSource,
        dtype: torch.dtype,
        attention_backend: type[AttentionBackend],
        block_size: int,
        ops: TorchOps,
        quantization: str | None = None,
    ) -> None:
        """Raises ValueError naming the tensors that `source` lacks, has in excess, or has in another shape."""
        check_tensors(source, expected_tensors(config), optional_tensors(config))
        self.config = config
        self.dtype = dtype
        self.ops = ops
        projections = ProjectionReader(source, dtype, ops, quantization)
        self.embed_weight = projections.read_matrix(EMBEDDING)
        backends = {
            window: attention_backend(
                config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5, block_size, dtype, window
            )
            for window in set(config.sliding_windows)
        }
        self.layers = [
            DecoderLayer(config, index, source, dtype, backends[window], projections)
            for index, window in enumerate(config.sliding_windows)
        ]
        self.norm = _read_vector(source, "model.norm.weight", dtype)
        self.lm_head = projections.read(head_projection(config))
        self.frequencies = inverse_frequencies(config.rope, config.head_dim)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
        output_rows: torch.Tensor | None = None,
        prompt_embeds: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> torch.Tensor:
        """Embeds the tokens, runs all layers and returns the hidden states before the final norm.

        token_ids: [num_tokens] int64; kv_caches: one a layer; output_rows: [n] int64, the tokens whose states are
        wanted, None for all; prompt_embeds: (first token, [count, hidden_size] of any float type), what to take in
        place of those tokens' embeddings. Returns [n or num_tokens, hidden_size].
        """
        hidden = self._embedded(token_ids, prompt_embeds)
        cos, sin = rotary_tables(self.frequencies, metadata.positions, self.dtype)
        last = len(self.layers) - 1
        update: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            normed = self._norm_after(update, hidden, layer.input_norm)
            update = self._attend(layer, normed, cos, sin, kv_caches[index], metadata)
            if index == last and output_rows is not None:
                update, hidden = update[output_rows], hidden[output_rows]
            normed = self._norm_after(layer.o(update), hidden, layer.post_norm)
            update = layer.down(layer.gate_up(normed))
        return hidden if update is None else hidden.add_(update)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden_size] from `forward`. Returns [n, vocab_size] float32."""
        return self.lm_head(self.ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps)).float()

    def _embedded(self, token_ids: torch.Tensor, prompt_embeds: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        hidden = F.embedding(token_ids, self.embed_weight)
        for first, embeds in prompt_embeds:
            hidden[first : first + embeds.shape[0]] = embeds
        return hidden

    def _norm_after(self, update: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if update is None:
            return self.ops.rms_norm(residual, weight, self.config.rms_norm_eps)
        return self.ops.add_rms_norm(update, residual, weight, self.config.rms_norm_eps)

    def _attend(
        self,
        layer: DecoderLayer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. Returns [num_tokens, num_heads * head_dim], not yet projected."""
        config, ops = self.config, self.ops
        heads = layer.qkv(x).view(x.shape[0], -1, config.head_dim)
        rotated = heads[:, : config.num_heads + config.num_kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rotated.split((config.num_heads, config.num_kv_heads), dim=1)
            q = ops.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = ops.rms_norm(k, layer.k_norm, config.rms_norm_eps)
            rotated = torch.cat((q, k), dim=1)
        q, k = ops.rotate(rotated, cos, sin).split((config.num_heads, config.num_kv_heads), dim=1)
        v = heads[:, config.num_heads + config.num_kv_heads :]
        return layer.attention.forward(q, k, v, kv_cache, metadata).view(x.shape[0], -1)


def layer_projections(config: DecoderConfig, index: int) -> tuple[Projection, Projection, Projection, Projection]:
    """A layer's matrix products: queries, keys and values; what follows attention; the MLP's gated half; its other."""
    attn, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
    return (
        Projection((f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"), config.qkv_bias),
        Projection((f"{attn}.o_proj",), config.o_bias),
        Projection((f"{mlp}.gate_proj", f"{mlp}.up_proj"), config.mlp_bias, gated=True),
        Projection((f"{mlp}.down_proj",), config.mlp_bias),
    )


def head_projection(config: DecoderConfig) -> Projection:
    return Projection(("model.embed_tokens" if config.tie_word_embeddings else "lm_head",))


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this shape must hold, by its Hugging Face name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    tensors: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    projections: Mapping[str, tuple[int, int, bool]] = {
        "self_attn.q_proj": (config.q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (config.kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (config.kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, config.q_size, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        tensors[f"{prefix}.input_layernorm.weight"] = (hidden,)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, bias) in projections.items():
            tensors[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                tensors[f"{prefix}.{name}.bias"] = (rows,)
        if config.qk_norm:
            tensors[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            tensors[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
    return tensors


def optional_tensors(config: DecoderConfig) -> frozenset[str]:
    """Tensors that checkpoints carry without need: a tied head's copy, and in GGUF files the divisors of the rotary
    frequencies, of which the shell has made the config's rotary scaling."""
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return frozenset({"rope_freqs.weight"} | tied)


def _read_vector(source: TensorSource, name: str, dtype: torch.dtype) -> torch.Tensor:
    return source.read(name, dtype).clone()
