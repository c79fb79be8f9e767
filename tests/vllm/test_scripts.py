"""Scripts of the usual kinds, written for vLLM, run unmodified by `corespan run-vllm`."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corespan.server.cli import main

SCRIPTS = Path(__file__).parent / "scripts"
SMALL = "--max_model_len=512 --num-gpu-blocks-override 64"
EXPECTED = {
    "basic_generate.py": r"(Prompt: '.*'\nGenerated text: ['\"].*['\"]\n){2}",
    "chat.py": r"(Prompt: 'system: You are a helpful assistant\\nuser: Hello\\nassistant:', Generated text: .*\n){4}",
    "metrics.py": r"(?s).*vllm:generation_tokens \(counter\) = 16\n.*seconds \(histogram\) sum = [0-9.]+ count = 2\n.*",
    "prefix_caching.py": r"Generated answers are the same: True\nAll prompts hit the cache: True\n",
    "structured_outputs.py": (
        r"Choice: (Positive|Negative)\nRegex: [a-z]{3}@[a-z]{4}\.com\n"
        r'JSON: \{"brand":"(Audi|BMW)","sold":(true|false)\}\nGrammar: SELECT col_[12]\n'
    ),
    "async_streaming.py": r"((.*\n)+?Generation complete: 12 tokens\n){2}",
    "pause_resume.py": r"Paused: True\nPaused: False\nTotal tokens: 200\n",
    "reproducibility.py": r"The same twice: True\n",
    "profiling.py": r"Generated text: .*\nTraces: 1\n",
    "llm_engine.py": r"0: 5 tokens\n1: 7 tokens\n",
}


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Runs a script in this process, and its core too if it may; returns what it prints."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run(script: Path, *arguments: str) -> str:
        assert main(["run-vllm", str(script), *arguments]) == 0
        return capfd.readouterr().out

    yield run
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_script_prints_what_it_would(
    run_here: Callable[..., str], tiny_llama_dir: str, tmp_path: Path, name: str
) -> None:
    arguments = [tiny_llama_dir, str(tmp_path)]
    if "parse_args" in (SCRIPTS / name).read_text():
        arguments = ["--model", tiny_llama_dir, *SMALL.split()]
    if name == "basic_generate.py":
        arguments += ["--max_tokens", "5"]

    printed = run_here(SCRIPTS / name, *arguments)

    assert re.fullmatch(EXPECTED[name], printed), printed


def test_every_script_is_run() -> None:
    assert {path.name for path in SCRIPTS.iterdir() if path.suffix == ".py"} == {
        *EXPECTED,
        "custom_logits_processor.py",
    }


def test_a_core_elsewhere_finds_the_scripts_processors_and_what_they_import(tiny_llama_dir: str) -> None:
    script = str(SCRIPTS / "custom_logits_processor.py")
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, "-m", "corespan.server.cli", "run-vllm", script, tiny_llama_dir]

    done = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    first, _, third = done.stdout.splitlines()
    assert (first, third) == ("[128, 128, 128]", "[67, 67, 67]")


def test_a_script_is_main_and_its_end_is_the_commands(run_here: Callable[..., str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    (tmp_path / "beside.py").write_text("from vllm import SamplingParams\n")
    script.write_text(
        "import sys, beside, vllm, corespan\n"
        "import __main__\n"
        "assert beside.SamplingParams is corespan.SamplingParams is vllm.sampling_params.SamplingParams\n"
        "assert __main__.__dict__ is globals() and __name__ == '__main__' and __file__ == sys.argv[0]\n"
        "print(*sys.argv[1:])\n"
        "try:\n    import vllm.multimodal.image\nexcept ImportError as error:\n    assert 'in corespan' in str(error)\n"
        "if '--fail' in sys.argv: raise ValueError('its own')\n"
        "sys.exit(7)\n"
    )

    with pytest.raises(SystemExit) as ended:
        run_here(script, "--model", "x", "-h")
    assert ended.value.code == 7
    with pytest.raises(ValueError, match="its own"):
        run_here(script, "--fail")
    with pytest.raises(SystemExit, match=r"there is no file .*none\.py"):
        run_here(tmp_path / "none.py")
