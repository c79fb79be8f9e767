"""Shell completion: the scripts are sound to their shells, and bash offers what the parser takes."""

import shutil
import subprocess

import pytest
from deadlines import DEADLINE

from corespan.server import cli
from corespan.server.completion import SHELLS


def _script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--completion", shell])
    assert ended.value.code == 0
    return capsys.readouterr().out


def _offered(script: str, *words: str) -> set[str]:
    typed = " ".join(f"'{word}'" for word in words)
    program = f'{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}\n_corespan; echo "${{COMPREPLY[*]}}"'
    shown = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE)
    return set(shown.stdout.split())


def test_bash_offers_commands_options_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    script = _script("bash", capsys)

    assert {"serve", "chat", "bench", "--version"} <= _offered(script, "corespan", "")
    assert {"latency", "throughput", "serve"} <= _offered(script, "corespan", "bench", "")
    assert {"--served-model-name", "--max-model-len"} <= _offered(script, "corespan", "serve", "--")
    assert {"--request-rate"} == _offered(script, "corespan", "bench", "serve", "--request")
    assert {"both", "reasoning", "reasoning_content"} == _offered(script, "corespan", "serve", "--reasoning-field", "")
    assert "int8" in _offered(script, "corespan", "chat", "hello", "--quantization", "")
    assert "--request-rate" not in _offered(script, "corespan", "serve", "--")


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_sound(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(shell, capsys)

    assert "served-model-name" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=DEADLINE)


def test_only_the_wanted_commands_options_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench serve` is not `serve`, and neither makes the others slower."""
    built = []
    monkeypatch.setattr(cli.importlib, "import_module", lambda name, package: built.append(name) or _NoOptions)
    for arguments in (["bench", "serve", "--help"], ["--version"], ["serve", "bench", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)

    assert built == [".bench.command", ".serve_command"]


class _NoOptions:
    @staticmethod
    def add_arguments(parser: object) -> None:
        pass
