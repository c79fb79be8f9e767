"""Checkpoints on disk: single files, shards, dtypes, and every way in which they can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from step_driver import StepDriver, make_vllm_config
from tiny_models import build_tiny_model

from corespan.core.kernels.memory import as_tensor
from corespan.core.models.loader import open_checkpoint
from corespan.core.models.registry import resolve_model_spec
from corespan.core.models.tensor_names import expected_tensors
from corespan.core.runtime import cpu_memory
from corespan.core.worker.worker import Worker

PROMPT = list(range(5, 25))
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[int]]:
    """A tiny Llama's folder, its config, and its greedy continuation of PROMPT."""
    folder = tmp_path_factory.mktemp("llama")
    build_tiny_model(folder, "llama")
    hf_config = json.loads((folder / "config.json").read_text())
    return folder, hf_config, continuation(folder, hf_config)


@pytest.fixture
def rewrite(llama: tuple[Path, dict[str, Any], list[int]], tmp_path: Path) -> Callable[..., None]:
    """Writes the tiny Llama's tensors to tmp_path after `change` has had its way with them."""

    def write(change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        tensors = load_file(llama[0] / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")

    return write


def continuation(folder: Path, hf_config: dict[str, Any], dtype: str = "float32") -> list[int]:
    driver = StepDriver(Worker(make_vllm_config(str(folder), hf_config, dtype=dtype)), num_blocks=8)
    driver.add("r", PROMPT)
    driver.run(8)
    return driver.requests["r"].output


def load(folder: Path, hf_config: dict[str, Any]) -> Worker:
    return Worker(make_vllm_config(str(folder), hf_config))


def test_shards_named_by_an_index_make_one_model(llama: Any, tmp_path: Path) -> None:
    folder, hf_config, expected = llama
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert continuation(tmp_path, hf_config) == expected


def test_a_missing_shard_is_named(llama: Any, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    with pytest.raises(FileNotFoundError, match=r"lacks model-2\.safetensors"):
        load(tmp_path, llama[1])


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_any_stored_dtype_serves_any_engine_dtype(
    llama: Any, rewrite: Any, tmp_path: Path, stored: torch.dtype, dtype: str
) -> None:
    rewrite(lambda tensors: tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()}))
    weights = Worker(make_vllm_config(str(tmp_path), llama[1], dtype=dtype)).runtime.weights
    assert weights is not None
    source = load_file(llama[0] / "model.safetensors")["model.embed_tokens.weight"]
    assert as_tensor(weights.embedding).equal(source.to(stored).to(getattr(torch, dtype)))
    assert len(continuation(tmp_path, llama[1], dtype)) == 8


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(llama: Any, tmp_path: Path, share: float) -> None:
    content = (llama[0] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        load(tmp_path, llama[1])


def test_a_folder_without_weights_is_named(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path.name} holds no safetensors"):
        load(tmp_path, llama[1])


def test_missing_surplus_and_misshapen_tensors_are_all_named(llama: Any, rewrite: Any, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.extra.weight"] = torch.zeros(2)
        tensors[UP] = tensors[UP][:-1].clone()

    rewrite(spoil)
    with pytest.raises(ValueError) as caught:
        load(tmp_path, llama[1])
    message = str(caught.value)
    assert "missing: model.norm.weight" in message
    assert "unexpected: model.extra.weight" in message
    assert f"{UP} is [95, 64], expected [96, 64]" in message


def test_a_tensor_of_integers_is_named(llama: Any, rewrite: Any, tmp_path: Path) -> None:
    rewrite(lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)}))
    with pytest.raises(ValueError, match=f"tensor {UP} .* is I8; supported are BF16, F16, F32"):
        load(tmp_path, llama[1])


ROTARY_CACHES = [
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.7.self_attn.rotary_emb.cos_cached",
    "model.rotary_emb.inv_freq",
    "rotary_emb.original_inv_freq",
    "model.layers.1.self_attn.rotary_pos_emb.sin_cache",
    "rope.freqs",
    "model.layers.0.attention.freqs_cis",
]
BUFFERS = {
    "model.position_ids": torch.arange(4)[None],
    "model.layers.0.self_attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
    "model.layers.0.self_attn.mask": torch.ones(4, dtype=torch.uint8),
}


def test_rotary_caches_and_integer_buffers_are_left_unread(llama: Any, rewrite: Any, tmp_path: Path) -> None:
    caches = {name: torch.rand(8, dtype=torch.float64 if "inv" in name else torch.float32) for name in ROTARY_CACHES}
    rewrite(lambda tensors: tensors.update({**caches, **BUFFERS}))
    assert continuation(tmp_path, llama[1]) == llama[2]


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "rope_factors_long.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_other_tensors_without_a_use_are_still_named(
    llama: Any, rewrite: Any, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    rewrite(lambda tensors: tensors.update({name: torch.zeros(64, dtype=dtype)}))
    with pytest.raises(ValueError, match=f"unexpected: {name}"):
        load(tmp_path, llama[1])


def write_overlay(llama: Any, folder: Path, weight_map: dict[str, str]) -> None:
    """Two shards: all of the model, and one of its tensors again with other content."""
    tensors = load_file(llama[0] / "model.safetensors")
    save_file(tensors, folder / "base.safetensors")
    save_file({UP: tensors[UP] * 3}, folder / "overlay.safetensors")
    index = {"weight_map": {**dict.fromkeys(tensors, "base.safetensors"), **weight_map}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(("file", "factor"), [("overlay.safetensors", 3), ("base.safetensors", 1)])
def test_the_index_says_which_shard_a_tensor_is_from(llama: Any, tmp_path: Path, file: str, factor: int) -> None:
    write_overlay(llama, tmp_path, {UP: file, "model.norm.weight": "base.safetensors"})
    if file == "base.safetensors":  # the overlay is a shard of the index all the same
        save_file(
            {UP: torch.zeros(1), "model.layers.0.self_attn.bias": torch.ones(1, dtype=torch.bool)},
            tmp_path / "overlay.safetensors",
        )
        write_index(tmp_path, {"model.layers.0.self_attn.bias": "overlay.safetensors"})
    with open_checkpoint(str(tmp_path)) as source:
        up = source.read(UP, torch.float32)
    assert up.equal(load_file(llama[0] / "model.safetensors")[UP] * factor)
    assert len(continuation(tmp_path, llama[1])) == 8


def write_index(folder: Path, more: dict[str, str]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], **more}}))


def test_a_tensor_that_is_not_where_the_index_says_is_named(llama: Any, tmp_path: Path) -> None:
    write_overlay(llama, tmp_path, {UP: "overlay.safetensors", "model.norm.weight": "overlay.safetensors"})
    with pytest.raises(ValueError, match=r"overlay\.safetensors lacks tensor model\.norm\.weight"):
        load(tmp_path, llama[1])


@pytest.mark.parametrize("weight_map", [{}, {UP: 3}, {UP: None}, [UP], None], ids=str)
def test_an_index_that_is_none_is_named(llama: Any, tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="is not a safetensors index"):
        load(tmp_path, llama[1])


def test_a_tied_head_may_be_stored_as_well(llama: Any, tmp_path: Path) -> None:
    reference = build_tiny_model(tmp_path, "qwen2_tied")
    hf_config = json.loads((tmp_path / "config.json").read_text())
    expected = continuation(tmp_path, hf_config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = reference.lm_head.weight.detach().clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert continuation(tmp_path, hf_config) == expected


def test_a_model_too_large_is_refused_with_figures_before_loading(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_memory, "available_memory", lambda: 100 << 20)
    huge = {**llama[1], "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    with pytest.raises(ValueError, match=r"needs \d{2,}\.\d\d GiB .*float32, and only 0\.10 GiB"):
        load(llama[0], huge)


def test_an_unknown_architecture_is_named_with_the_known_ones(llama: Any) -> None:
    for name in ("MambaForCausalLM", "GemmaForCausalLM", "Gemma3nForCausalLM", "Gemma3ForConditionalGeneration"):
        with pytest.raises(ValueError, match=f"{name} is not supported; known are LlamaForCausalLM, Mistral"):
            resolve_model_spec({**llama[1], "architectures": [name]})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; Gemma 3 caps no scores"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; supported are"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object"),
    ],
)
def test_what_gemma3_does_not_do_is_refused_by_name(llama: Any, setting: dict[str, Any], message: str) -> None:
    config = {**llama[1], "model_type": "gemma3_text", "rope_parameters": None, **setting}
    with pytest.raises(ValueError, match=message):
        resolve_model_spec({**config, "architectures": ["Gemma3ForCausalLM"]})


def test_a_config_without_a_needed_key_is_refused_with_its_name(llama: Any) -> None:
    hf_config = {key: value for key, value in llama[1].items() if key != "intermediate_size"}
    with pytest.raises(ValueError, match="no 'intermediate_size', which LlamaForCausalLM needs"):
        resolve_model_spec(hf_config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type is 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(llama: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_model_spec({**llama[1], **change})


def test_older_rope_keys_mean_the_same_as_the_newer_ones(llama: Any) -> None:
    base = {key: value for key, value in llama[1].items() if key != "rope_parameters"}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    older = {**base, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    newer = {**base, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    assert resolve_model_spec(older) == resolve_model_spec(newer)


def test_expected_tensors_are_what_transformers_saves(llama: Any) -> None:
    saved = load_file(llama[0] / "model.safetensors")
    expected = expected_tensors(resolve_model_spec(llama[1]))
    assert expected == {name: tuple(tensor.shape) for name, tensor in saved.items()}
