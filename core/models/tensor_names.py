"""Which tensors a checkpoint holds for a `ModelSpec`, under their Hugging Face names, and which of its matrices make
one product. The weight plan, the loader and the check of a checkpoint all go by it."""

from collections.abc import Iterator
from dataclasses import dataclass

from .spec import Activation, ModelSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Projection:
    """Matrices that are one product, on top of one another: [sum(rows), columns].

    activation: of a gated pair, whose result is activation(first half) * second half.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    bias: bool = False
    activation: Activation | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.rows), self.columns


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}"


def layer_projections(spec: ModelSpec, index: int) -> tuple[Projection, Projection, Projection, Projection]:
    """Queries, keys and values; what follows attention; the MLP's gated half; its other."""
    attention, mlp, hidden = spec.layers[index].attention, spec.layers[index].mlp, spec.hidden_size
    attn, ffn = f"{layer_prefix(index)}.self_attn", f"{layer_prefix(index)}.mlp"
    return (
        Projection(
            (f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
            (attention.q_size, attention.kv_size, attention.kv_size),
            hidden,
            attention.qkv_bias,
        ),
        Projection((f"{attn}.o_proj",), (hidden,), attention.q_size, attention.o_bias),
        Projection((f"{ffn}.gate_proj", f"{ffn}.up_proj"), (mlp.inner_size,) * 2, hidden, mlp.bias, mlp.activation),
        Projection((f"{ffn}.down_proj",), (hidden,), mlp.inner_size, mlp.bias),
    )


def embedding_projection(spec: ModelSpec) -> Projection:
    """The embedding, as the product that a tied head makes of it."""
    return Projection((EMBEDDING.removesuffix(".weight"),), (spec.vocab_size,), spec.hidden_size)


def head_projection(spec: ModelSpec) -> Projection | None:
    """None of a model without a head."""
    if not spec.has_head:
        return None
    if spec.tied_head:
        return embedding_projection(spec)
    return Projection(("lm_head",), (spec.vocab_size,), spec.hidden_size)


def vectors(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Name and size of every norm."""
    yield FINAL_NORM, spec.hidden_size
    for index, layer in enumerate(spec.layers):
        prefix, names = layer_prefix(index), layer.norms
        for name in (names.attention, names.attention_output, names.mlp, names.mlp_output):
            if name is not None:
                yield f"{prefix}.{name}.weight", spec.hidden_size
        if layer.attention.qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", layer.attention.head_dim
            yield f"{prefix}.self_attn.k_norm.weight", layer.attention.head_dim


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this model must hold, with its shape."""
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    tensors.update((name, (size,)) for name, size in vectors(spec))
    projections = [each for index in range(len(spec.layers)) for each in layer_projections(spec, index)]
    if (head := head_projection(spec)) is not None:
        projections.append(head)
    for projection in projections:
        for name, rows in zip(projection.names, projection.rows, strict=True):
            tensors[f"{name}.weight"] = (rows, projection.columns)
            if projection.bias:
                tensors[f"{name}.bias"] = (rows,)
    return tensors


def optional_tensors(spec: ModelSpec) -> frozenset[str]:
    """Tensors that checkpoints carry without need: a head that is tied or not wanted, classifiers, which the pooler
    reads, and in GGUF files the divisors of the rotary frequencies, of which the shell has made the config's rotary
    scaling."""
    names = {"rope_freqs.weight"}
    if spec.tied_head or not spec.has_head:
        names.add("lm_head.weight")
    if not spec.has_head:
        names |= {"score.weight", "score.bias"}
    return frozenset(names)
