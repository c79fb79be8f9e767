"""What the README shows is so: its examples run, its table of variables is the code's, its links lead on."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from corespan.protocol.envs import VARIABLES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def environment_table() -> str:
    rows = ["| variable | unset | meaning |", "|---|---|---|"]
    for name, variable in VARIABLES.items():
        default = {None: "", True: "1", False: "0"}.get(variable.default, variable.default)
        rows.append(f"| `{name}` | {default} | {variable.meaning} |")
    return "\n".join(rows)


def test_environment_table_is_the_codes() -> None:
    assert environment_table() in README, f"README's table should read:\n{environment_table()}"


@pytest.mark.parametrize("number", [0, 1], ids=["sync", "asyncio"])
def test_example_runs(number: int, tiny_llama_dir: str, tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[number]
    script = tmp_path / "example.py"
    script.write_text(example.replace("smollm2-135m", tiny_llama_dir), encoding="utf-8")

    finished = subprocess.run([sys.executable, script], capture_output=True, text=True)

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))

    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_source_files_that_are_named_exist(page: Path) -> None:
    """Files are named as `room/path.py` or, inside a section about a room, by that path all the same."""
    rooms = "protocol|shared|client|core|engine|vllm|server|tests|scripts"
    named = re.findall(rf"`((?:{rooms})/[\w/.]*)`", page.read_text(encoding="utf-8"))

    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))

    assert [name for path, name in named if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")] == []
