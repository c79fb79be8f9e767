"""What a load has packed is mapped by the next one: the same bytes, and packed anew wherever there is any doubt."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from step_driver import StepDriver, make_vllm_config
from tiny_models import build_tiny_model

from corespan.core import packed_cache
from corespan.core.kernels import library
from corespan.core.kernels.linear import PackedWeight
from corespan.core.kernels.memory import Buffer
from corespan.core.runtime.cpu_native import NativeRuntime
from corespan.core.worker.worker import Worker

pytestmark = pytest.mark.skipif(not library.is_available(), reason="no native kernels")

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_tiny_model(folder, "llama_tied_with_biases_and_llama3_rope")
    return folder


@pytest.fixture(autouse=True)
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CORESPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CORESPAN_PACKED_CACHE_GIB", "1")
    yield tmp_path / "cache" / "packed"
    until_saved()


def until_saved() -> None:
    for thread in threading.enumerate():
        if thread.name == "core-packed-cache":
            thread.join()


def worker_of(model: Path, quantization: str | None = None) -> Worker:
    config = json.loads((model / "config.json").read_text())
    worker = Worker(make_vllm_config(str(model), config, dtype="bfloat16", quantization=quantization))
    until_saved()
    return worker


def buffers_of(worker: Worker) -> list[Buffer]:
    assert isinstance(worker.runtime, NativeRuntime) and worker.runtime.weights is not None
    weights, tables = worker.runtime.weights, worker.runtime._tables
    matrices = [weights.head, *(each for layer in weights.layers for each in (layer.qkv, layer.o, layer.gate_up))]
    parts = [getattr(matrix, name, None) for matrix in matrices for name in ("packed", "bias", "weight_scales")]
    norms = [norm for layer in weights.layers for norm in (layer.attention_norm, layer.mlp_norm)]
    everything = [*parts, *norms, weights.norm, weights.embedding, *tables.values()]
    return [each for each in everything if isinstance(each, Buffer)]


def answer(worker: Worker) -> list[int]:
    driver = StepDriver(worker, num_blocks=32)
    driver.add("r", PROMPT)
    driver.run(8)
    return driver.requests["r"].output


@pytest.fixture
def num_packed(monkeypatch: pytest.MonkeyPatch) -> list[PackedWeight]:
    """The matrices that were packed."""
    matrices: list[PackedWeight] = []
    fill = PackedWeight._fill

    def counted(self: PackedWeight, *arguments: object) -> None:
        matrices.append(self)
        fill(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedWeight, "_fill", counted)
    return matrices


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_mapped_weights_are_the_packed_ones_and_answer_alike(
    model: Path, quantization: str | None, num_packed: list[PackedWeight]
) -> None:
    first = worker_of(model, quantization)
    assert num_packed and not first.runtime.shared_bytes
    num_packed.clear()
    second = worker_of(model, quantization)
    assert not num_packed and second.runtime.shared_bytes

    one, other = buffers_of(first), buffers_of(second)
    assert len(one) == len(other) > 20
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))
    assert not any(buffer.flags.writeable for buffer in other)
    assert answer(first) == answer(second)


def test_mapped_weights_go_in_sleep_and_come_back(model: Path) -> None:
    worker_of(model)
    worker = worker_of(model)
    expected = answer(worker)
    worker.sleep(2)
    assert not worker.runtime.shared_bytes
    worker.wake_up()
    assert worker.runtime.shared_bytes
    assert answer(worker) == expected


def test_without_a_cache_nothing_is_kept(model: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORESPAN_PACKED_CACHE_GIB", "0")
    worker_of(model)
    assert not packed.exists()


@pytest.mark.parametrize("damage", ["truncated", "a byte", "the head", "empty"])
def test_a_damaged_file_is_noticed_and_made_again(
    model: Path, packed: Path, damage: str, num_packed: list[PackedWeight], caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer(worker_of(model))
    largest = max(packed.iterdir(), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    middle = len(whole) // 2
    largest.write_bytes(
        {
            "truncated": whole[:middle],
            "a byte": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "the head": b"{" + whole,
            "empty": b"",
        }[damage]
    )
    num_packed.clear()
    assert answer(worker_of(model)) == expected
    assert num_packed and "is damaged and made again" in caplog.text
    assert largest.read_bytes() == whole


@pytest.mark.parametrize("change", ["content", "settings", "kernels", "instruction set"])
def test_what_was_packed_of_something_else_is_not_taken(
    model: Path, tmp_path: Path, change: str, num_packed: list[PackedWeight], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_of(model)
    num_packed.clear()
    if change == "content":
        weights = model / "model.safetensors"
        status = weights.stat()
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    if change == "kernels":
        monkeypatch.setattr(library, "built_from", lambda: 1)
    if change == "instruction set":
        monkeypatch.setenv("CORESPAN_CPU_ISA", "portable")
    worker_of(model, "int8" if change == "settings" else None)
    assert num_packed


def test_what_was_not_used_for_longest_makes_room(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed.mkdir(parents=True)
    for age, name in enumerate(("newest", "older", "oldest")):
        (packed / name).write_bytes(bytes(1000))
        os.utime(packed / name, (1e9 - age, 1e9 - age))
    monkeypatch.setenv("CORESPAN_PACKED_CACHE_GIB", str(2500 / (1 << 30)))
    packed_cache._make_room(packed, 1000)
    assert [path.name for path in packed.iterdir()] == ["newest"]
    with pytest.raises(OSError, match="CORESPAN_PACKED_CACHE_GIB"):
        packed_cache._make_room(packed, 3000)


@pytest.mark.parametrize("obstacle", ["a file in the way", "no room"])
def test_a_cache_that_takes_nothing_costs_a_line(
    model: Path, packed: Path, obstacle: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if obstacle == "no room":
        monkeypatch.setenv("CORESPAN_PACKED_CACHE_GIB", "0.000001")
    else:
        packed.parent.mkdir()
        packed.write_text("")
    assert len(answer(worker_of(model))) == 8
    assert "Packed weights" in caplog.text
    assert packed.is_file() or not list(packed.glob("*"))


LOADS_NO_TORCH = """
import json, sys
from pathlib import Path
from step_driver import StepDriver, make_vllm_config
from corespan.core.runtime.cpu_native import NativeRuntime
from corespan.core.worker.worker import Worker
from corespan.protocol.params import SamplingParams
model = Path(sys.argv[1])
worker = Worker(make_vllm_config(str(model), json.loads((model / "config.json").read_text()), dtype="bfloat16"))
driver = StepDriver(worker, num_blocks=32)
shaping = {"logprobs": 3, "prompt_logprobs": 2, "logit_bias": {5: 1.5}, "presence_penalty": 0.5, "min_tokens": 4}
driver.add("greedy", list(range(40)))
driver.add("shaped", list(range(90)), SamplingParams(temperature=1.0, seed=1, top_p=0.9, min_p=0.1, **shaping))
driver.run(20)
print("torch" in sys.modules)
"""


def test_a_mapped_model_runs_without_torch(model: Path) -> None:
    """Importing it takes longer than all else of a start."""
    worker_of(model)
    done = subprocess.run(
        [sys.executable, "-c", LOADS_NO_TORCH, str(model)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == "False", done.stdout + done.stderr
