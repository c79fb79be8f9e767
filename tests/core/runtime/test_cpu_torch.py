"""The reference runtime against transformers, in float32, on specs that use everything a spec can say."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from spec_models import BLOCK_SIZE, load, logits_of, random_tensors

from corespan.core.kernels import library
from corespan.core.models.spec import SANDWICH_NORMS, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RotarySpec
from corespan.core.runtime.cpu_native import NativeRuntime
from corespan.core.runtime.cpu_torch import TorchRuntime
from corespan.core.runtime.selection import make_runtime
from corespan.shared.rope_config import RopeConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
LOCAL, GLOBAL = RotarySpec(16, RopeConfig(10000.0)), RotarySpec(16, RopeConfig(1e6, "linear", factor=8.0))
GELU = MlpSpec(96, "gelu_tanh")

SOFTCAPPED = AttentionSpec(4, 2, 16, scale=24**-0.5, rotary=LOCAL, softcap=4.0)
GEMMA2 = ModelSpec(
    320,
    64,
    tuple(LayerSpec(replace(SOFTCAPPED, window=w), GELU, SANDWICH_NORMS) for w in (20, None, 20)),
    rms_norm_eps=1e-6,
    tied_head=True,
    norm_offset=1.0,
    embed_scale=64**0.5,
    logit_softcap=6.0,
)
NORMED = AttentionSpec(4, 2, 16, scale=24**-0.5, rotary=LOCAL, window=20, qk_norm=True)
LOCAL_LAYER = LayerSpec(NORMED, GELU, SANDWICH_NORMS)
GLOBAL_LAYER = replace(LOCAL_LAYER, attention=replace(NORMED, rotary=GLOBAL, window=None))
GEMMA3 = replace(GEMMA2, layers=(LOCAL_LAYER, GLOBAL_LAYER, LOCAL_LAYER), logit_softcap=None)
PARTIAL = AttentionSpec(4, 2, 16, scale=0.25, rotary=RotarySpec(8, RopeConfig(10000.0)))
PHI3 = ModelSpec(320, 64, (LayerSpec(PARTIAL, MlpSpec(96)),) * 3, rms_norm_eps=1e-5)

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
GEMMA = {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24, "attn_implementation": "eager"}
MODELS: dict[str, tuple[ModelSpec, str, str, dict[str, Any]]] = {
    "gemma2": (
        GEMMA2,
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        GEMMA3,
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": ROPES,
        },
    ),
    "phi3": (
        PHI3,
        "Phi3Config",
        "Phi3ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
}
TOKENS = [(37 * i) % 320 for i in range(70)]


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """The model's parameters; merged matrices taken apart."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        merged = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        whole, parts = next(((key, parts) for key, parts in merged.items() if key in name), ("", ()))
        sizes = {"qkv_proj": [64, 32, 32], "gate_up_proj": [96, 96], "": [len(parameter)]}[whole]
        for part, tensor in zip(parts or ("",), parameter.detach().split(sizes), strict=True):
            tensors[name.replace(whole, part) if whole else name] = tensor
    return tensors


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[ModelSpec, Any]:
    import transformers

    spec, config, family, options = MODELS[request.param]
    torch.manual_seed(5)
    reference = getattr(transformers, family)(getattr(transformers, config)(**SHAPE, **options)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + 1.0)
    return spec, reference


@pytest.mark.parametrize("chunks", [[70], [1, 15, 16, 17, 21], [40, *[1] * 30]], ids=["whole", "chunked", "decoded"])
def test_logits_equal_transformers(model: tuple[ModelSpec, Any], chunks: list[int]) -> None:
    spec, reference = model
    runtime = TorchRuntime(spec, torch.float32, BLOCK_SIZE)
    load(runtime, tensors_of(reference))
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(runtime, TOKENS, chunks), expected, atol=1e-4, rtol=0)


needs_kernels = pytest.mark.skipif(not library.is_available(), reason="no native kernels")


@needs_kernels
def test_what_no_native_kernel_computes_is_named_and_left_to_the_reference(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = replace(PHI3, hidden_size=72)
    with caplog.at_level("WARNING", logger="corespan.core"):
        assert isinstance(make_runtime(odd, torch.bfloat16, BLOCK_SIZE, None), TorchRuntime)
    (line,) = caplog.messages
    assert "torch runs this model" in line and "no native kernel multiplies with hidden_size 72" in line
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="cannot be kept: no native kernel multiplies with hidden_size 72"):
        make_runtime(odd, torch.bfloat16, BLOCK_SIZE, None)


UNLIKE = (
    (PARTIAL, 96),
    (AttentionSpec(2, 1, 32, scale=0.2, rotary=RotarySpec(32, RopeConfig(1e6)), window=20, qk_norm=True), 128),
    (AttentionSpec(6, 3, 16, scale=0.25, rotary=None), 64),
    (replace(PARTIAL, qkv_bias=True, o_bias=True), 96),
)
NATIVE = {
    "unlike_layers": replace(PHI3, layers=tuple(LayerSpec(attention, MlpSpec(inner)) for attention, inner in UNLIKE)),
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
}


@needs_kernels
@pytest.mark.parametrize("name", NATIVE)
def test_native_kernels_in_bfloat16_are_as_near_to_float32_as_the_reference(name: str) -> None:
    spec = replace(NATIVE[name], norm_offset=1.0, embed_scale=8.0)
    tensors = random_tensors(spec)
    native, plain = NativeRuntime(spec, torch.bfloat16, BLOCK_SIZE), TorchRuntime(spec, torch.bfloat16, BLOCK_SIZE)
    exact = TorchRuntime(spec, torch.float32, BLOCK_SIZE)
    errors = []
    load(exact, tensors)
    truth = logits_of(exact, TOKENS, [70])
    for runtime in (native, plain):
        load(runtime, tensors)
        errors.append((logits_of(runtime, TOKENS, [40, *[1] * 30]) - truth).abs().mean().item())
    assert errors[0] < 1.25 * errors[1]
