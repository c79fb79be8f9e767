"""The files that benchmarks are made of: blocks that the gguf package reads back as what was written."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from corespan.core.kernels.linear import BLOCK_FORMATS, BlockWeight, MixedWeight
from corespan.protocol.params import SamplingParams

BENCHMARKS = Path(__file__).parents[3] / "scripts" / "benchmarks"


@pytest.mark.parametrize(("kind", "bound"), [("Q4_K", 0.1), ("Q5_K", 0.05), ("Q6_K", 0.025)])
def test_quantised_matrices_stay_close_to_what_they_were(
    kind: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from quantize import quantize

    values = np.random.default_rng(0).standard_normal((40, 512), dtype=np.float32)
    values[0] = 0

    blocks = quantize(values, gguf.GGMLQuantizationType[kind])

    assert blocks.shape == (40, 2 * BLOCK_FORMATS[kind].file_bytes)
    read = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.sqrt(np.square(read - values).mean()) < bound
    assert not read[0].any()
    found = BlockWeight(kind, torch.from_numpy(blocks), None).lookup(torch.arange(40), torch.float32)
    assert torch.equal(found, torch.from_numpy(read))


def test_a_shape_is_written_once_and_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import shapes
    from step_driver import StepDriver, make_vllm_config

    from corespan.core.worker.worker import Worker
    from corespan.engine.model_files.model_source import resolve_model

    small = {"vocab_size": 300, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = []
    for name in shapes.SHAPES:
        monkeypatch.setitem(shapes.SHAPES, name, shapes.SHAPES[name] | small)
        for file in ("folder", "Q4_K_M"):
            path = shapes.shape_model(name, file, tmp_path)
            written = path.stat().st_mtime_ns
            assert shapes.shape_model(name, file, tmp_path).stat().st_mtime_ns == written
            source = resolve_model(str(path), with_tokenizer=False)
            driver = StepDriver(Worker(make_vllm_config(source.path, source.hf_config, dtype="bfloat16")))
            driver.add("r", [5, 7, 11])
            driver.run(2, chunk=3)
            tokens.append(len(driver.requests["r"].output))
    assert tokens == [2] * 4


def test_a_model_of_several_kinds_gives_the_same_bits_in_any_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import shapes
    from step_driver import StepDriver, make_vllm_config

    from corespan.core.worker.worker import Worker
    from corespan.engine.model_files.model_source import resolve_model

    small = {"vocab_size": 300, "hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 512}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(shapes.SHAPES, "1b", shapes.SHAPES["1b"] | small)
    source = resolve_model(str(shapes.shape_model("1b", "Q4_K_M", tmp_path)), with_tokenizer=False)
    worker = Worker(make_vllm_config(source.path, source.hf_config, dtype="bfloat16", max_model_len=1024))
    weights = worker.runtime.weights
    assert weights is not None and any(isinstance(layer.qkv, MixedWeight) for layer in weights.layers)
    prompt, found = [11 * i % 300 for i in range(800)], []
    for chunk in (800, 50):  # rows taken through all operations by one thread, and not
        driver = StepDriver(worker, num_blocks=64)
        driver.add("r", prompt, SamplingParams(temperature=0, prompt_logprobs=0))
        for _ in range(0, 800, chunk):
            driver.step({"r": chunk})
        found.append(np.concatenate([part.logprobs[:, 0] for part in driver.requests["r"].prompt_logprobs]))
        driver.remove("r")
        driver.flush()
    assert np.array_equal(*found)
