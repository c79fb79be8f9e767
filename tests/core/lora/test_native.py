"""Adapters on the native kernels: the torch code's logits, and the same bits in any batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import write_adapter
from spec_models import BLOCK_SIZE, metadata_of_one

from corespan import LLM, LoRARequest, SamplingParams
from corespan.core.kernels import library
from corespan.core.kernels.memory import as_tensor
from corespan.core.lora.files import read_adapter
from corespan.core.models.loader import open_checkpoint
from corespan.core.models.registry import resolve_model_spec
from corespan.core.runtime.cpu_native import NativeRuntime
from corespan.core.runtime.cpu_torch import TorchRuntime
from corespan.core.runtime.interface import Runtime
from corespan.shared.json_files import read_json

pytestmark = pytest.mark.skipif(not library.is_available(), reason="needs the native kernels")

TOKENS = [0, 17, 99, 250, 3, 400, 41, 77, 5, 130, 222, 8, 19, 333, 62, 101, 12]


@torch.inference_mode()
def logits(runtime: Runtime[Any], model_dir: str, adapter_dir: str | None, wanted: list[int] | None) -> torch.Tensor:
    """Of all tokens, or of those wanted. Every other token has the adapter."""
    source = open_checkpoint(model_dir)
    runtime.load(runtime.plan(source), source)
    runtime.allocate_kv(8)
    adapters = []
    if adapter_dir is not None:
        adapter = runtime.keep_adapter(read_adapter(adapter_dir, runtime.spec, torch.bfloat16, 64))
        adapters = [(adapter, torch.arange(0, len(TOKENS), 2))]
    metadata = metadata_of_one(0, len(TOKENS), len(runtime.kv_groups))
    rows = None if wanted is None else torch.tensor(wanted)
    return as_tensor(runtime.logits(runtime.forward(torch.tensor(TOKENS), metadata, rows, adapters=adapters))).clone()


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("rank", [3, 16, 40])
def test_logits_are_those_of_the_torch_code(
    tiny_llama_dir: str, tmp_path: Path, rank: int, quantization: str | None
) -> None:
    spec = resolve_model_spec(read_json(Path(tiny_llama_dir) / "config.json"))
    folder = write_adapter(tmp_path, rank=rank, lora_alpha=rank, size=0.15)
    options = (spec, torch.bfloat16, BLOCK_SIZE, quantization)

    expected = logits(TorchRuntime(*options), tiny_llama_dir, folder, None)
    native = NativeRuntime(*options)
    got = logits(native, tiny_llama_dir, folder, None)

    # The torch code rounds to bfloat16 elsewhere, and quantises x with other scales.
    assert (got - expected).norm() / expected.norm() < (0.02 if quantization is None else 0.05)
    assert (logits(native, tiny_llama_dir, None, None) - expected).abs().max() > 1, "the adapter changes little"
    some = logits(native, tiny_llama_dir, folder, [4, 5, 16])
    assert torch.equal(some, got[[4, 5, 16]])


def test_requests_have_the_same_bits_alone_and_among_others(tiny_llama_dir: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 24, "num_gpu_blocks_override": 257}
    adapters = [
        None,
        *(LoRARequest(str(n), n, write_adapter(tmp_path / str(n), n, rank=8 * n)) for n in (1, 2)),
        LoRARequest("one", 3, write_adapter(tmp_path / "3", 3, rank=5)),
    ]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    prompts = [f"{n} wizards " + "mix potent jugs " * (n % 5 if n else 50) for n in range(20)]
    adapters = [adapters[n % 4] for n in range(20)]
    with LLM(
        tiny_llama_dir,
        enable_lora=True,
        max_loras=3,
        max_num_batched_tokens=200,
        enable_prefix_caching=False,
        **options,
    ) as llm:
        among = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        for prompt, adapter, output in zip(prompts, adapters, among, strict=True):
            (alone,) = llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)
            assert _bits(alone) == _bits(output)
    with LLM(tiny_llama_dir, **options) as plain:
        (alone,) = plain.generate(prompts[0], params, use_tqdm=False)
        assert _bits(alone) == _bits(among[0])


def _bits(output: Any) -> list[Any]:
    (answer,) = output.outputs
    return [(entry, logprob.logprob) for position in answer.logprobs for entry, logprob in position.items()]
