"""GGUF tensors: every format to the bit with the `gguf` package, and files written by it read back whole."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from corespan.core.models.gguf import GGUFSource
from corespan.core.models.gguf_quants import QUANT_TYPES, dequantize

QUANTISED = {number: known for number, known in QUANT_TYPES.items() if known.block_size > 1}
WRITABLE = [known.name for known in QUANT_TYPES.values() if not known.name.endswith("_K")]


def random_blocks(name: str, num_blocks: int) -> np.ndarray:
    """Blocks of random quants whose float16 scales are ordinary numbers. [num_blocks, block_bytes] uint8."""
    block_bytes = next(known.block_bytes for known in QUANT_TYPES.values() if known.name == name)
    rng = np.random.default_rng(11)
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    scale_places = {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0]}.get(name, [0, 2])
    for place in scale_places:
        scales = rng.normal(0, 0.01, num_blocks).astype(np.float16)
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    return blocks


@pytest.mark.parametrize("number", QUANTISED, ids=lambda number: QUANTISED[number].name)
def test_every_quantised_format_is_decoded_to_the_bit(number: int) -> None:
    quant_type = QUANTISED[number]
    blocks = random_blocks(quant_type.name, 3000)
    with ThreadPoolExecutor(2) as pool:
        values = dequantize(torch.from_numpy(blocks), quant_type, torch.float32, pool)
    expected = gguf.quants.dequantize(blocks, GGMLQuantizationType(number))
    np.testing.assert_array_equal(values.numpy(), expected)


@pytest.mark.parametrize("number", QUANT_TYPES, ids=lambda number: QUANT_TYPES[number].name)
def test_block_sizes_are_those_of_the_format(number: int) -> None:
    quant_type = QUANT_TYPES[number]
    assert quant_type.name == GGMLQuantizationType(number).name
    assert (quant_type.block_size, quant_type.block_bytes) == gguf.GGML_QUANT_SIZES[GGMLQuantizationType(number)]


def write_gguf(path: Path, architecture: str, tensors: dict[str, tuple[np.ndarray, str]]) -> None:
    """tensors: name -> (float32 values, format). Four query heads, two key/value heads."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "bc", "déf"])
    writer.add_array("test.flags", [True, False])
    for name, (values, quant_name) in tensors.items():
        quant_type = GGMLQuantizationType[quant_name]
        writer.add_tensor(name, gguf.quants.quantize(values, quant_type), raw_dtype=quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(64, 96)).astype(np.float32)


@pytest.mark.parametrize("quant_name", WRITABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_written_tensor_is_read_back(tmp_path: Path, values: np.ndarray, quant_name: str, dtype: torch.dtype) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", {"blk.3.ffn_up.weight": (values, quant_name)})
    quant_type = GGMLQuantizationType[quant_name]
    expected = gguf.quants.dequantize(gguf.quants.quantize(values, quant_type), quant_type)
    with GGUFSource(str(tmp_path / "m.gguf")) as source:
        assert source.shapes == {"model.layers.3.mlp.up_proj.weight": (64, 96)}
        tensor = source.read("model.layers.3.mlp.up_proj.weight", dtype)
    assert tensor.equal(torch.from_numpy(np.ascontiguousarray(expected)).to(dtype))


def to_llama_cpp_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the query and key rows of the Llama architecture."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def test_query_and_key_rows_of_llama_are_put_back_in_order(tmp_path: Path, values: np.ndarray) -> None:
    keys = values[:32]
    tensors = {
        "blk.0.attn_q.weight": (to_llama_cpp_order(values, 4), "F32"),
        "blk.0.attn_k.weight": (to_llama_cpp_order(keys, 2), "F32"),
        "blk.0.attn_v.weight": (keys, "F32"),
    }
    write_gguf(tmp_path / "m.gguf", "llama", tensors)
    with GGUFSource(str(tmp_path / "m.gguf")) as source:
        read = {part: source.read(f"model.layers.0.self_attn.{part}_proj.weight", torch.float32) for part in "qkv"}
    assert read["q"].equal(torch.from_numpy(values))
    assert read["k"].equal(torch.from_numpy(keys))
    assert read["v"].equal(torch.from_numpy(keys))


def test_rows_of_other_architectures_stay_as_they_are(tmp_path: Path, values: np.ndarray) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen2", {"blk.0.attn_q.weight": (values, "F32")})
    with GGUFSource(str(tmp_path / "m.gguf")) as source:
        assert source.read("model.layers.0.self_attn.q_proj.weight", torch.float32).equal(torch.from_numpy(values))


@pytest.mark.parametrize("kept", [0, 3, 20, 60, 200, -100], ids=lambda kept: f"{kept}_bytes")
def test_a_truncated_file_is_named(tmp_path: Path, values: np.ndarray, kept: int) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", {"blk.0.ffn_up.weight": (values, "F32")})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"m\.gguf.*(empty|damaged|cut short|truncated|not a GGUF)"):
        GGUFSource(str(path))


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    blocks = np.zeros((4, 84), dtype=np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight has ggml type number 10; supported are F32"):
        GGUFSource(str(tmp_path / "m.gguf"))
