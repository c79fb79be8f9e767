"""The header of a GGUF file, and the Hugging Face configuration it amounts to."""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf

from corespan.core.models.gguf import GGUFSource
from corespan.engine.model_files.gguf_metadata import generation_config_from_gguf, hf_config_from_gguf, read_metadata

EMBEDDING = {"token_embd.weight": np.zeros((40, 16), dtype=np.float32)}


def config_of(tmp_path: Path, architecture: str, tensors: dict[str, np.ndarray], **extra: Any) -> dict[str, Any]:
    metadata = {key.replace("__", "."): value for key, value in extra.items()}
    path = write_gguf(tmp_path / "tiny.gguf", architecture, metadata, EMBEDDING | tensors)
    return hf_config_from_gguf(read_metadata(path))


def test_the_header_equals_what_the_gguf_package_reads(smollm2_gguf: str) -> None:
    from gguf import GGUFReader

    metadata = read_metadata(smollm2_gguf)
    reader = GGUFReader(smollm2_gguf)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert metadata[key] == field.contents(), key
    shapes = {tensor.name: list(reversed(tensor.shape.tolist())) for tensor in reader.tensors}
    assert metadata["GGUF.tensor_shapes"] == shapes


def test_smollm2_config_equals_transformers(smollm2_gguf: str) -> None:
    from transformers import AutoConfig

    path = Path(smollm2_gguf)
    theirs = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name).to_dict()
    ours = hf_config_from_gguf(read_metadata(path))
    for name in (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "hidden_act",
        "attention_bias",
    ):
        assert ours[name] == theirs[name], name
    assert ours["rope_theta"] == theirs["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_each_architecture_names_its_model_class(tmp_path: Path, architecture: str) -> None:
    config = config_of(tmp_path, architecture, {})
    assert config["model_type"] == architecture
    assert config["architectures"] == [f"{architecture.capitalize()}ForCausalLM"]
    assert (config["vocab_size"], config["head_dim"], config["num_key_value_heads"]) == (40, 8, 1)


def test_mistral_hides_under_the_llama_architecture(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", {}, general__name="Mistral 7B", llama__attention__sliding_window=64)
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 64


def test_a_file_that_names_no_window_has_none(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", {}, general__name="Mistral 7B v0.3")
    assert config["sliding_window"] is None


def test_tensors_tell_biases_and_untied_embeddings(tmp_path: Path) -> None:
    tied = config_of(tmp_path, "qwen2", {})
    tensors = {"output.weight": np.zeros((40, 16), np.float32), "blk.0.attn_q.bias": np.zeros(16, np.float32)}
    untied = config_of(tmp_path, "qwen2", tensors)
    assert (tied["tie_word_embeddings"], tied["attention_bias"]) == (True, False)
    assert (untied["tie_word_embeddings"], untied["attention_bias"]) == (False, True)


def test_linear_rope_scaling_is_read(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", {}, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def gemma3_config(tmp_path: Path, layers: int = 7, **extra: Any) -> dict[str, Any]:
    figures = {"block_count": layers, "attention__sliding_window": 8, "rope__freq_base": 1e6, **extra}
    return config_of(tmp_path, "gemma3", {}, **{f"gemma3__{name}": value for name, value in figures.items()})


def test_gemma3_gets_what_llama_cpp_knows_of_it(tmp_path: Path) -> None:
    config = gemma3_config(tmp_path)
    assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    full, sliding = (config["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
    assert full == {"rope_type": "default", "rope_theta": 1e6}
    assert sliding == {"rope_type": "default", "rope_theta": 1e4}
    assert (config["query_pre_attn_scalar"], config["hidden_activation"]) == (8, "gelu_pytorch_tanh")
    assert not {"rope_theta", "rope_scaling", "hidden_act"} & config.keys()


def test_what_a_file_of_gemma3_states_goes_before_that(tmp_path: Path) -> None:
    scaling = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base_swa": 2e4}
    config = gemma3_config(tmp_path, 4, attention__sliding_window_pattern=2, **scaling)
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    full, sliding = (config["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
    assert full == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert sliding == {"rope_type": "default", "rope_theta": 2e4}
    pattern = [False, True, True]
    by_layer = gemma3_config(tmp_path, 3, attention__sliding_window_pattern=pattern, final_logit_softcapping=30.0)
    assert by_layer["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    assert by_layer["final_logit_softcapping"] == 30.0
    with pytest.raises(ValueError, match="sliding_window_pattern has 3 entries for 4 layers"):
        gemma3_config(tmp_path, 4, attention__sliding_window_pattern=pattern)


def test_gemma3_without_a_window_and_the_27b_model(tmp_path: Path) -> None:
    assert set(gemma3_config(tmp_path, attention__sliding_window=0)["layer_types"]) == {"full_attention"}
    large = gemma3_config(tmp_path, 62, attention__key_length=12)
    assert (large["head_dim"], large["query_pre_attn_scalar"]) == (12, 8)


def llama3_factors(factor: float, theta: float, count: int) -> np.ndarray:
    """The divisors as llama.cpp's converter works them out of a llama3 configuration."""
    divisors = []
    for index in range(count):
        wavelength = 2 * math.pi * theta ** (index / count)
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / 1.0:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recovered_from_its_table(tmp_path: Path, factor: float) -> None:
    table = {"rope_freqs.weight": llama3_factors(factor, 500000.0, 64)}
    config = config_of(tmp_path, "llama", table, llama__rope__freq_base=500000.0, llama__rope__dimension_count=128)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_another_rope_table_is_refused(tmp_path: Path) -> None:
    table = {"rope_freqs.weight": np.linspace(1.0, 8.0, 64, dtype=np.float32)}
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        config_of(tmp_path, "llama", table, llama__rope__freq_base=500000.0)


@pytest.mark.parametrize("name", ["head_count", "head_count_kv"])
def test_a_list_of_figures_that_differ_is_refused_by_name_in_both_rooms(tmp_path: Path, name: str) -> None:
    key = f"llama.attention.{name}"
    tensors = EMBEDDING | {"blk.0.attn_k.weight": np.zeros((8, 16), dtype=np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", {key: [2, 1]}, tensors)
    with pytest.raises(ValueError, match=f"{key} differs from layer to layer"):
        hf_config_from_gguf(read_metadata(path))
    with pytest.raises(ValueError, match=f"{key} differs from layer to layer"):
        GGUFSource(str(path))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rope.dimension_count", 4, "is 4; only 8 is supported"),
        ("rope.dimension_count", [8, 4], "differs from layer to layer"),
        ("attention.value_length", 4, "is 4; only 8 is supported"),
        ("expert_count", 8, "is 8; only 0 is supported"),
        ("attention.causal", False, "is False; only True is supported"),
        ("attention.head_count", "2", "is '2'; it must be a whole number"),
        ("attention.head_count", 0, "is 0; it must be at least 1"),
        ("feed_forward_length", [32, 16], "differs from layer to layer"),
        ("rope.freq_base", "1e4", "is '1e4'; it must be a number"),
    ],
)
def test_a_figure_of_another_model_is_refused_by_name(tmp_path: Path, name: str, value: Any, message: str) -> None:
    extra = {"llama.attention.key_length": 8, f"llama.{name}": value}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", extra, EMBEDDING)
    with pytest.raises(ValueError, match=f"llama.{name} {message}"):
        hf_config_from_gguf(read_metadata(path))


def test_a_rope_table_beside_a_scaling_or_in_another_format_is_refused(tmp_path: Path) -> None:
    table = {"rope_freqs.weight": np.full(4, 2.0, dtype=np.float32)}
    with pytest.raises(ValueError, match=r"both rope_freqs\.weight and rope\.scaling\.type 'linear'"):
        config_of(tmp_path, "llama", table, llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight has shape \[4\] .* it must be a vector in F32"):
        config_of(tmp_path, "llama", {"rope_freqs.weight": np.full(4, 2.0, dtype=np.float16)})


@pytest.mark.parametrize("alignment", [0, 12, "32", -8])
def test_a_bad_alignment_is_named_in_both_rooms(tmp_path: Path, alignment: Any) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", {"general.alignment": 64}, EMBEDDING)
    key = struct.pack("<Q", 17) + b"general.alignment"
    if isinstance(alignment, str):
        changed = struct.pack("<IQ", 8, len(alignment)) + alignment.encode()
    else:
        changed = struct.pack("<Ii", 5, alignment)
    content = path.read_bytes()
    path.write_bytes(content.replace(key + struct.pack("<II", 4, 64), key + changed))
    assert path.read_bytes() != content
    for read in (read_metadata, GGUFSource):
        with pytest.raises(ValueError, match=f"general.alignment is {alignment!r}; it must be a power of two"):
            read(str(path))


def header(version: bytes, tensors: int = 0, pairs: bytes = b"", num_pairs: int = 0) -> bytes:
    return b"GGUF" + version + struct.pack("<QQ", tensors, num_pairs) + pairs + bytes(64)


NESTED = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
HUGE = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + struct.pack("<IQ", 0, 2**63)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(b"\x00\x00\x00\x03"), "is a big-endian GGUF file"),
        (header(b"\x01\x00\x00\x00"), "is GGUF version 1; versions 2 and 3 are supported"),
        (header(b"\x04\x00\x00\x00"), "is GGUF version 4; versions 2 and 3 are supported"),
        (header(b"\x03\x00\x00\x00", pairs=NESTED, num_pairs=1), "the GGUF header is damaged or cut short"),
        (header(b"\x03\x00\x00\x00", pairs=HUGE, num_pairs=1), "the GGUF header is damaged or cut short"),
        (header(b"\x03\x00\x00\x00", tensors=2**60), "the GGUF header is damaged or cut short"),
    ],
    ids=["big-endian", "v1", "v4", "nested", "huge", "many tensors"],
)
def test_a_header_that_cannot_be_read_is_a_named_error_in_both_rooms(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)
    for read in (read_metadata, GGUFSource):
        with pytest.raises(ValueError, match=rf"odd\.gguf.*{message}"):
            read(str(path))


def test_every_end_token_reaches_the_generation_config(tmp_path: Path) -> None:
    extra = {f"tokenizer.ggml.{name}_token_id": value for name, value in (("bos", 1), ("eos", 2), ("eot", 9))}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", extra, EMBEDDING)
    assert generation_config_from_gguf(read_metadata(path)) == {"bos_token_id": 1, "eos_token_id": [2, 9]}


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    for architecture in ("mamba", "gemma", "gemma3n", "gemma4"):
        path = write_gguf(tmp_path / "tiny.gguf", architecture, {}, EMBEDDING)
        with pytest.raises(ValueError, match=f"'{architecture}' is not supported; supported: .*'gemma3'"):
            hf_config_from_gguf(read_metadata(path))


def test_a_file_that_is_no_gguf_or_cut_short_is_refused(tmp_path: Path, smollm2_gguf: str) -> None:
    (tmp_path / "text.gguf").write_text("hello, this is no model")
    (tmp_path / "short.gguf").write_bytes(Path(smollm2_gguf).read_bytes()[:5000])
    (tmp_path / "empty.gguf").write_bytes(b"")
    for name in ("text", "short", "empty"):
        with pytest.raises(ValueError, match=f"{name}.gguf"):
            read_metadata(tmp_path / f"{name}.gguf")
