"""The workflow and the hooks run what the checkout has: its scripts, its tools, its wheels."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
HOOKS: dict[str, Any] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps(job: str) -> list[dict[str, Any]]:
    return WORKFLOW["jobs"][job]["steps"]


def test_every_push_and_pull_request_runs_the_tests_on_the_pythons_that_are_declared() -> None:
    triggers = WORKFLOW[True]  # YAML 1.1 takes `on` for a truth value
    declared = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    tested = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"]

    assert {"push", "pull_request"} <= triggers.keys()
    assert (tested[0], tested[-1]) == (declared[0], declared[-1])
    (script,) = (step["run"] for step in steps("test") if "run" in step)
    assert script == "scripts/test" and (ROOT / script).stat().st_mode & 0o100


def test_wheels_are_manylinux_with_the_kernels_in_them_and_are_built_once_the_tests_have_passed() -> None:
    commands = [step.get("run", "") for step in steps("wheels")]
    (built,) = (step for step in steps("wheels") if step.get("run", "").startswith("cibuildwheel"))

    assert WORKFLOW["jobs"]["wheels"]["needs"] == "test"
    assert "manylinux" in built["env"]["CIBW_BUILD"]
    assert any(command.startswith("unzip") and command.endswith("grep _native.so") for command in commands)
    assert any(command.startswith("python -m build --sdist") for command in commands)
    assert WORKFLOW["permissions"] == {"contents": "read"}


def test_hooks_are_the_checks_of_scripts_test() -> None:
    hooks = {hook["id"]: hook for repo in HOOKS["repos"] for hook in repo["hooks"]}
    script = (ROOT / "scripts" / "test").read_text()

    assert hooks.keys() == {"ruff-check", "ruff-format", "mypy"}
    assert all(command in script for command in ("ruff check", "ruff format", "mypy"))
    assert all(hook["language"] == "system" for hook in hooks.values())  # the versions that the project installs
    for name in ("ruff-check", "ruff-format"):
        tool, *arguments = hooks[name]["entry"].split()
        program = shutil.which(tool, path=os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"])))
        assert program is not None
        subprocess.run(
            [program, *arguments, *(["--check"] if "format" in name else []), "setup.py"], cwd=ROOT, check=True
        )
