"""vLLM's names at vLLM's paths: each leads somewhere, or says, when it is used, that it has no counterpart."""

import importlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from corespan import vllm
from corespan.engine.text.loading import load_tokenizer
from corespan.vllm._table import MISSING, NAMES


def module_of(path: str) -> ModuleType:
    return importlib.import_module(f"corespan.vllm.{path}" if path else "corespan.vllm")


def words(row: tuple[str, str, str]) -> list[str]:
    return [word.partition("=")[0] for word in row[2].split()]


@pytest.mark.parametrize("row", NAMES, ids=lambda row: f"{row[0]}-{row[1]}")
def test_every_name_is_the_one_of_this_package(row: tuple[str, str, str]) -> None:
    module = module_of(row[0])
    source = importlib.import_module(f"corespan.{row[1]}")

    if row[2] == "*":
        assert all(getattr(module, name) is getattr(source, name) for name in getattr(source, "__all__", ["VARIABLES"]))
        return
    for name, word in zip(words(row), row[2].split(), strict=True):
        assert getattr(module, name) is getattr(source, word.rpartition("=")[2])
        assert name in module.__all__


def test_environment_variables_are_read_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from corespan.vllm import envs

    for value in (3, 4):
        monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", str(value))
        assert envs.VLLM_MAX_N_SEQUENCES == value


@pytest.mark.parametrize("row", MISSING, ids=lambda row: f"{row[0]}-{row[1]}")
def test_a_name_without_a_counterpart_says_so_when_it_is_used(row: tuple[str, str, str]) -> None:
    for name in row[1].split():
        missing: Any = getattr(module_of(row[0]), name)
        assert not isinstance(3, missing) and missing | None
        for use in (missing, lambda missing=missing: missing.NAME, lambda missing=missing: type("Own", (missing,), {})):
            with pytest.raises(NotImplementedError, match=rf"^vllm\.?{row[0]}\.{name} has no counterpart .*: \w"):
                use()


def test_what_is_not_there_is_an_import_error_that_names_corespan() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"vllm\.multimodal\.image has no counterpart in corespan"):
        importlib.import_module("corespan.vllm.multimodal.image")
    with pytest.raises(ImportError, match=r"'NoSuchConfig' from 'corespan\.vllm\.config'"):
        exec("from corespan.vllm.config import NoSuchConfig")
    assert not hasattr(vllm, "no_such_name")


def test_importing_the_names_loads_none_of_what_they_stand_for() -> None:
    program = "import sys, corespan.vllm.v1.sample.logits_processor; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert not {"torch", "numpy", "msgspec", "corespan.engine.llm", "corespan.core.sampling"} & set(loaded)


def test_the_functions_of_scripts_do_what_they_are_for(tiny_llama_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    from corespan.vllm.distributed import cleanup_dist_env_and_memory
    from corespan.vllm.platforms import current_platform
    from corespan.vllm.tokenizers import get_tokenizer
    from corespan.vllm.utils import FlexibleArgumentParser, get_open_port, random_uuid, set_random_seed

    assert len({random_uuid() for _ in range(3)}) == 3
    assert 0 < get_open_port() < 2**16
    drawn = [(set_random_seed(5), random.random())[1] for _ in range(2)]
    assert drawn[0] == drawn[1]
    cleanup_dist_env_and_memory()
    assert current_platform.is_cpu() and not current_platform.is_cuda()
    assert get_tokenizer(tiny_llama_dir).encode("one") == load_tokenizer(tiny_llama_dir).encode("one")
    parser = FlexibleArgumentParser()
    parser.add_argument("--max-len", type=int)
    parser.add_argument("--own_name")
    args = parser.parse_args(["--max_len=3", "--own_name", "a_b"])
    assert (args.max_len, args.own_name) == (3, "a_b")
