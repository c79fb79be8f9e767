"""A model that cannot be started is one error with its cause at the caller, and the next engine works."""

import gc
import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import CLIENT_KINDS, ClientKind, Runner
from leftovers import Leftovers

from corespan import AsyncEngineArgs, AsyncLLM, SamplingParams

MP = pytest.mark.parametrize("multiprocess", [False, True], ids=["inproc", "sync_mp"])


@pytest.fixture(autouse=True)
def own_socket_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that what other processes' tests start at the same time is not taken for this one's."""
    root = tempfile.mkdtemp(prefix="t")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", root)
    yield
    shutil.rmtree(root)


@pytest.fixture
def truncated_llama_dir(tiny_llama_dir: str, tmp_path: Path) -> str:
    folder = tmp_path / "truncated"
    shutil.copytree(tiny_llama_dir, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return str(folder)


@MP
def test_an_engine_starts_after_truncated_weights_and_after_too_small_a_cache(
    make_llm: Any,
    truncated_llama_dir: str,
    multiprocess: bool,
    reference: Any,
    recwarn: pytest.WarningsRecorder,
    capfd: pytest.CaptureFixture[str],
) -> None:
    warnings.simplefilter("always")
    leftovers = Leftovers()
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        make_llm(model=truncated_llama_dir, multiprocess=multiprocess)
    with pytest.raises(ValueError, match="max_model_len"):
        make_llm(num_gpu_blocks_override=4, multiprocess=multiprocess)
    gc.collect()

    assert leftovers.found() == []
    assert "Exception ignored" not in capfd.readouterr().err
    assert [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)] == []
    llm = make_llm(multiprocess=multiprocess)
    ids = llm.get_tokenizer().encode("Once upon a time")
    (output,) = llm.generate(ids, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == reference.greedy(ids, 8, eos_token_id=None)


def test_asyncllm_raises_what_its_core_raised_with_the_cores_traceback(truncated_llama_dir: str) -> None:
    leftovers = Leftovers()
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file") as caught:
        AsyncLLM.from_engine_args(AsyncEngineArgs(truncated_llama_dir))
    assert "loader.py" in "".join(caught.value.__notes__)
    gc.collect()

    assert leftovers.found() == []


def with_end_ids(source: str, folder: Path, file: str, end_ids: Any) -> str:
    """A copy of the model whose `file` names these end tokens."""
    shutil.copytree(source, folder)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, "eos_token_id": end_ids}))
    return str(folder)


@pytest.mark.parametrize("kind", CLIENT_KINDS)
@pytest.mark.parametrize("end_ids", [[1, -1], [1, -600], 512, 2**40, "1", [1, None], [1, True], 1.0], ids=str)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_token_that_the_model_does_not_have_is_refused_alike_by_all_clients(
    tiny_llama_dir: str, tmp_path: Path, kind: ClientKind, file: str, end_ids: Any
) -> None:
    model = with_end_ids(tiny_llama_dir, tmp_path / "model", file, end_ids)
    with pytest.raises(ValueError) as caught:
        Runner(kind, model=model)
    assert str(caught.value) == (
        f"the model's {file.removesuffix('.json')}: eos_token_id must be a token id of the model (0..511) or a list of "
        f"such ids, got {end_ids!r}"
    )


def test_an_end_token_of_the_tokenizer_beyond_the_model_is_warned_of_and_ends_nothing(
    tiny_llama_dir: str, tmp_path: Path, make_llm: Any, reference: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_end_ids(tiny_llama_dir, tmp_path / "model", "config.json", None)
    (tmp_path / "model" / "generation_config.json").unlink()
    path = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    end = next(token for token in tokenizer["added_tokens"] if token["id"] == 1)
    tokenizer["model"]["vocab"][end["content"]] = end["id"] = 600
    path.write_text(json.dumps(tokenizer))
    (output,) = make_llm(model=model).generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=20, min_tokens=3))
    assert output.outputs[0].token_ids == reference.greedy([5, 6, 7], 20, eos_token_id=None)
    warned = [record.getMessage() for record in caplog.records if "end token" in record.getMessage()]
    assert warned == ["the tokenizer's end token has the id 600, and the model's ids are 0..511: it will end nothing"]
