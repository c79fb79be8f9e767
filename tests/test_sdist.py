"""The source distribution holds what its tests need, and leaves no wheel without kernels in a cache."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    tree = folder / "checkout"
    unwanted = shutil.ignore_patterns(".git", ".venv", ".*_cache", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=unwanted)
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=tree, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_sdist_holds_every_file_of_tests_docs_examples_and_scripts(unpacked: Path) -> None:
    for folder in ("tests", "docs", "examples", "scripts"):
        files = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()]
        wanted = [path for path in files if "__pycache__" not in path.parts and not path.name.startswith(".")]

        assert [path for path in wanted if not (unpacked / path).exists()] == []


def test_tests_of_the_sdist_are_collected(unpacked: Path) -> None:
    command = ["pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/protocol", "tests/test_readme.py"]

    collected = subprocess.run([sys.executable, "-m", *command], cwd=unpacked, capture_output=True, text=True)

    assert collected.returncode == 0, collected.stdout[-2000:]


def test_sdist_without_a_compiler_fails_with_the_remedy(unpacked: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]

    failed = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
    without = subprocess.run(
        command, cwd=unpacked, env={**environment, "CORESPAN_NO_KERNELS": "1"}, capture_output=True
    )

    assert failed.returncode != 0
    assert "CORESPAN_NO_KERNELS=1 pip install --no-cache-dir" in failed.stderr
    assert without.returncode == 0


def test_changelog_tells_of_the_version() -> None:
    version = re.search(r'__version__ = "(.*)"', (ROOT / "__init__.py").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert version is not None and f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()
    assert project["keywords"] and project["authors"]
