"""Adapters against PEFT, in float32: the same logits within 1e-4."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import peft_model
from spec_models import BLOCK_SIZE, metadata_of_one

from corespan.core.lora.files import read_adapter
from corespan.core.models.loader import open_checkpoint
from corespan.core.models.registry import resolve_model_spec
from corespan.core.runtime.cpu_torch import TorchRuntime
from corespan.shared.json_files import read_json

PROMPT = [0, 17, 99, 250, 3, 400, 41, 77, 5, 130, 222, 8]


@pytest.fixture(scope="module")
def runtime(tiny_llama_dir: str) -> TorchRuntime:
    runtime = TorchRuntime(
        resolve_model_spec(read_json(Path(tiny_llama_dir) / "config.json")), torch.float32, BLOCK_SIZE
    )
    source = open_checkpoint(tiny_llama_dir)
    runtime.load(runtime.plan(source), source)
    runtime.allocate_kv(8)
    return runtime


@torch.inference_mode()
def logits(runtime: TorchRuntime, folder: Path | None) -> torch.Tensor:
    adapters = []
    if folder is not None:
        adapter = runtime.keep_adapter(read_adapter(str(folder), runtime.spec, torch.float32, 64))
        adapters = [(adapter, torch.arange(len(PROMPT)))]
    metadata = metadata_of_one(0, len(PROMPT), len(runtime.kv_groups))
    return runtime.logits(runtime.forward(torch.tensor(PROMPT), metadata, adapters=adapters))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"r": 1},
        {"r": 48},
        {"target_modules": ["q_proj"]},
        {"target_modules": ["k_proj", "up_proj"]},
        {"layers_to_transform": [1]},
        {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 3}, "alpha_pattern": {"v_proj": 32}},
    ],
    ids=str,
)
def test_logits_are_those_of_peft(
    runtime: TorchRuntime, tiny_llama_dir: str, tmp_path: Path, config: dict[str, Any]
) -> None:
    model = peft_model(tiny_llama_dir, **config)
    model.save_pretrained(tmp_path)

    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]

    torch.testing.assert_close(logits(runtime, tmp_path), expected, atol=1e-4, rtol=1e-4)
    assert (logits(runtime, None) - expected).abs().max() > 0.01, "the adapter changes nothing"
