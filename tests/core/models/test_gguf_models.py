"""Whole models out of GGUF files, configuration and tensors both, against transformers' model of the same weights."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from step_driver import StepDriver, make_vllm_config
from tiny_models import build_model

from corespan.core.models.gguf import GGUFSource
from corespan.core.worker.worker import Worker
from corespan.engine.model_files.gguf_metadata import hf_config_from_gguf, read_metadata
from corespan.engine.model_files.model_source import resolve_model
from corespan.protocol.params import SamplingParams

PROMPT = [(11 * i) % 320 for i in range(200)]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24, "pad_token_id": 0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: (GGUF architecture, transformers family, options)
    "llama": ("llama", "Llama", {}),
    "llama_with_linear_rope": ("llama", "Llama", {"rope_parameters": LINEAR}),
    "llama_with_llama3_rope": ("llama", "Llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 16384}),
    "mistral_with_window": ("llama", "Mistral", {"sliding_window": 24, "head_dim": 32}),
    "mistral_without_window": ("llama", "Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", "Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "attn_implementation": "eager"}),
    "gemma3": (
        "gemma3",
        "Gemma3",
        {**GEMMA, "num_hidden_layers": 7, "rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 1e6}}},
    ),
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, parts: dict[str, str]) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{parts[part]}.{kind}"


def in_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of each head as llama.cpp's converter puts them for the Llama architecture."""
    return np.ascontiguousarray(weight.reshape(num_heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape))


def write_model(
    path: Path, architecture: str, name: str, reference: Any, per_layer: bool = False, max_tensors: int = 0
) -> None:
    """What llama.cpp's converter makes of a transformers model, as far as it matters here.

    per_layer: figures are lists with an entry per layer; max_tensors: the file is split where it holds more.
    """
    config = reference.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=max_tensors)

    def figure(value: int) -> int | list[int]:
        return [value] * config.num_hidden_layers if per_layer else value

    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(figure(config.intermediate_size))
    writer.add_head_count(figure(config.num_attention_heads))
    writer.add_head_count_kv(figure(config.num_key_value_heads))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        unscaled = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        divisors = unscaled / reference.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    is_gemma = architecture.startswith("gemma")
    if (architecture == "llama" or is_gemma) and getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
    for softcap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, softcap, None) is not None:
            writer.add_float32(f"{architecture}.{softcap}", getattr(config, softcap))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for tensor_name, parameter in reference.named_parameters():
        values = parameter.detach().numpy()
        part = tensor_name.split(".")[-2]
        if architecture == "llama" and part in heads:
            values = in_pairs(values, heads[part])
        if is_gemma and values.ndim == 1:
            values = values + 1
        writer.add_tensor(gguf_name(tensor_name, GEMMA_PARTS if is_gemma else PARTS), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_log_probabilities_are_those_of(reference: Any, path: Path) -> None:
    driver = StepDriver(Worker(make_vllm_config(str(path), hf_config_from_gguf(read_metadata(path)))), num_blocks=32)
    driver.add("r", PROMPT, SamplingParams(temperature=0, prompt_logprobs=0))
    driver.step({"r": len(PROMPT)})

    (logprobs,) = (part.logprobs[:, 0] for part in driver.requests["r"].prompt_logprobs)
    with torch.inference_mode():
        expected = torch.log_softmax(reference(torch.tensor([PROMPT])).logits[0], -1)
    np.testing.assert_allclose(logprobs, expected[torch.arange(199), PROMPT[1:]], atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_of_a_prompt_equal_transformers(tmp_path: Path, name: str) -> None:
    architecture, family, options = MODELS[name]
    reference = build_model(tmp_path, family, options)
    path = tmp_path / f"{name}.gguf"
    write_model(path, architecture, name, reference)
    assert_log_probabilities_are_those_of(reference, path)


def test_lists_of_equal_figures_make_the_same_model(tmp_path: Path) -> None:
    reference = build_model(tmp_path, "Llama", {})
    path = tmp_path / "model.gguf"
    write_model(path, "llama", "llama", reference, per_layer=True)
    assert_log_probabilities_are_those_of(reference, path)


def test_a_split_file_is_one_model_whichever_part_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORESPAN_CACHE", str(tmp_path / "cache"))
    reference = build_model(tmp_path, "Llama", {})
    write_model(tmp_path / "model.gguf", "llama", "llama", reference, max_tensors=11)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert [part.name for part in parts] == [f"model-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert_log_probabilities_are_those_of(reference, parts[0])
    assert resolve_model(str(tmp_path / "model-00002-of-00003.gguf"), with_tokenizer=False).path == str(parts[0])
    parts[1].rename(tmp_path / "elsewhere.gguf")
    for read in (read_metadata, GGUFSource):
        with pytest.raises(FileNotFoundError, match=r"lacks model-00002-of-00003\.gguf"):
            read(str(parts[0]))
    with pytest.raises(FileNotFoundError, match=r"lacks model-00002-of-00003\.gguf"):
        resolve_model(str(parts[0]), with_tokenizer=False)  # though what it was converted to is kept
    with pytest.raises(ValueError, match=r"elsewhere\.gguf is one of 3 parts .* named NAME-00001-of-00003\.gguf"):
        read_metadata(tmp_path / "elsewhere.gguf")
    parts[2].rename(parts[1])
    (tmp_path / "elsewhere.gguf").rename(parts[2])
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.gguf is not part 2 of 3"):
        read_metadata(parts[0])
