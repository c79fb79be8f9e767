"""Adapters on the native kernels: the torch code's logits, and the same bits in any batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import TINY_LLAMA, Shapes, linear_shapes, write_adapter
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


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["bfloat16", "blocks of several kinds"])
def model(
    request: pytest.FixtureRequest, tiny_llama_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Shapes]:
    """A model, and the shapes of its matrices."""
    if request.param == "bfloat16":
        return tiny_llama_dir, TINY_LLAMA
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "scripts" / "benchmarks")
    import shapes

    small = {"vocab_size": 300, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(shapes.SHAPES, "1b", shapes.SHAPES["1b"] | small)
    return str(shapes.shape_model("1b", "Q4_K_M", tmp_path)), linear_shapes(hidden=256, inner=512, kv=128)


def test_requests_have_the_same_bits_alone_and_among_others(
    model: tuple[str, Shapes], threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the threads are those of this process
    path, shapes = model
    options: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 24, "num_gpu_blocks_override": 257}
    options |= {"skip_tokenizer_init": True, "max_model_len": 512}
    adapters = [
        None,
        *(LoRARequest(str(n), n, write_adapter(tmp_path / str(n), n, 8 * n, 0.15, shapes)) for n in (1, 2)),
        LoRARequest("one", 3, write_adapter(tmp_path / "3", 3, 5, 0.15, shapes)),
    ]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, detokenize=False)
    lengths = [250 if n % 5 == 0 else 3 + 6 * (n % 5) for n in range(16)]
    prompts = [{"prompt_token_ids": [(n + 11 * i) % 300 for i in range(length)]} for n, length in enumerate(lengths)]
    wanted = [adapters[n % 4] for n in range(16)]
    with LLM(
        path, enable_lora=True, max_loras=3, max_num_batched_tokens=200, enable_prefix_caching=False, **options
    ) as llm:
        among = llm.generate(prompts, params, use_tqdm=False, lora_request=wanted)
        assert (
            len(
                {
                    str(_bits(output))
                    for output in llm.generate(prompts[:1] * 4, params, use_tqdm=False, lora_request=adapters)
                }
            )
            == 4
        )
        for prompt, adapter, output in zip(prompts, wanted, among, strict=True):
            (alone,) = llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)
            assert _bits(alone) == _bits(output)
    with LLM(path, **options) as plain:
        (alone,) = plain.generate(prompts[0], params, use_tqdm=False)
        assert _bits(alone) == _bits(among[0])


def _bits(output: Any) -> list[Any]:
    (answer,) = output.outputs
    return [(entry, logprob.logprob) for position in answer.logprobs for entry, logprob in position.items()]
