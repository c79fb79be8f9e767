"""What a model is, as data. A family (`families/`) makes a `ModelSpec` of a configuration; the weight plan, the KV
cache and every runtime read it, layer by layer, and ask nothing else about the model."""

from dataclasses import dataclass
from typing import Literal

from ...shared.rope_config import RopeConfig
from .vision import VisionSpec

Activation = Literal["silu", "gelu_tanh"]


@dataclass(slots=True, frozen=True)
class RotarySpec:
    """How positions rotate the first `dim` channels of each head, those of its two halves together."""

    dim: int
    rope: RopeConfig


@dataclass(slots=True, frozen=True)
class AttentionSpec:
    """One layer's attention. Query head h reads key/value head h // (num_heads // num_kv_heads).

    rotary: None where positions are not encoded. window: how many tokens, its own included, a token sees; None: all
    before it. bidirectional: it sees as many of those behind it. softcap: scores become cap * tanh(score / cap).
    qk_norm: RMSNorm of each head of queries and keys, before they are rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary: RotarySpec | None
    window: int | None = None
    bidirectional: bool = False
    softcap: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size


@dataclass(slots=True, frozen=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x)), with `inner_size` channels between."""

    inner_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(slots=True, frozen=True)
class NormNames:
    """A layer's norms, by the names of their tensors: what attention and MLP take in, and, where a model has such, what
    they give back before it is added to the residual."""

    attention: str
    mlp: str
    attention_output: str | None = None
    mlp_output: str | None = None


PRE_NORMS = NormNames("input_layernorm", "post_attention_layernorm")
SANDWICH_NORMS = NormNames(
    attention="input_layernorm",
    mlp="pre_feedforward_layernorm",
    attention_output="post_attention_layernorm",
    mlp_output="post_feedforward_layernorm",
)


@dataclass(slots=True, frozen=True)
class LayerSpec:
    attention: AttentionSpec
    mlp: MlpSpec
    norms: NormNames = PRE_NORMS


@dataclass(slots=True, frozen=True)
class ModelSpec:
    """A decoder: embedding, layers, RMSNorm, head.

    norm_offset: what every norm adds to its stored weight; embed_scale: a factor to the embeddings. Both are worked
    into the weights when they are loaded. logit_softcap: logits become cap * tanh(logit / cap). tied_head: the head is
    the embedding's matrix; has_head: without, there are no logits.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    tied_head: bool = False
    has_head: bool = True
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    vision: VisionSpec | None = None  # what turns pictures into embeddings, where it takes any
