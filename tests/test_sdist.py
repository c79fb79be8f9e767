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
        opened.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
    return folder / archive.name.removesuffix(".tar.gz")


def test_sdist_holds_every_file_of_tests_docs_examples_and_scripts(unpacked: Path) -> None:
    for folder in ("tests", "docs", "examples", "scripts"):
        files = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()]
        wanted = [path for path in files if "__pycache__" not in path.parts and not path.name.startswith(".")]

        assert [path for path in wanted if not (unpacked / path).exists()] == []


def test_tests_of_the_sdist_run_on_its_own_tree(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "corespan").symlink_to(unpacked)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    selection = ["tests/protocol/test_params.py", "tests/core/kv_cache", "tests/test_readme.py", "-k", "not example"]

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *arguments], cwd=unpacked, env=environment, capture_output=True, text=True
        )

    own = run("-P", "-c", "import corespan; print(corespan.__path__[0])")
    passed = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *selection)

    assert Path(own.stdout.strip()).resolve() == unpacked.resolve()
    assert passed.returncode == 0, passed.stdout[-2000:]


@pytest.mark.parametrize(
    ("folder", "environment"),
    [
        ("sdist", {}),
        ("pip-req-build-x1y2", {}),
        ("pip-install-x1y2/corespan_3f", {}),
        ("checkout", {"UV_INTERNAL__BUILD_DIR": "checkout"}),
    ],
)
def test_where_the_wheel_would_be_kept_a_missing_compiler_is_an_error_with_the_remedy(
    unpacked: Path, tmp_path: Path, folder: str, environment: dict[str, str]
) -> None:
    """pip keeps what it builds of an sdist, and of a repository that it has cloned; uv what it builds of anything."""
    tree = unpacked if folder == "sdist" else build_tree(unpacked, tmp_path / folder)

    failed = build_without_compiler(tree, **environment)
    without = build_without_compiler(tree, **environment, CORESPAN_NO_KERNELS="1")
    unkept = [
        build_without_compiler(tree, **environment, CORESPAN_NO_KERNELS="1", **{name: "1"})
        for name in ("PIP_NO_CACHE_DIR", "UV_NO_CACHE")
    ]

    for refused in (failed, without):
        assert refused.returncode != 0
        assert "PIP_NO_CACHE_DIR=1 CORESPAN_NO_KERNELS=1 pip install" in refused.stderr
        assert "UV_NO_CACHE=1 CORESPAN_NO_KERNELS=1 uv pip install" in refused.stderr
    assert [built.returncode for built in unkept] == [0, 0]


def test_in_a_checkout_a_missing_compiler_is_a_warning(unpacked: Path, tmp_path: Path) -> None:
    tree = build_tree(unpacked, tmp_path / "checkout")

    assert (
        build_without_compiler(tree).returncode == build_without_compiler(tree, CORESPAN_NO_KERNELS="1").returncode == 0
    )


def build_tree(unpacked: Path, folder: Path) -> Path:
    """What a build of the kernels needs, as a repository has it: without the sdist's PKG-INFO."""
    shutil.copytree(unpacked / "core", folder / "core")
    for name in ("setup.py", "pyproject.toml", "__init__.py", "README.md", "LICENSE"):
        shutil.copy(unpacked / name, folder)
    return folder


def build_without_compiler(tree: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Builds the kernels where there is no compiler."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV"))}
    environment = {**outer, "CC": "/nowhere/cc", "CXX": "/nowhere/c++", **environment}
    target = str(tree / "build")
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", target, "--build-temp", target]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def test_changelog_tells_of_the_version() -> None:
    version = re.search(r'__version__ = "(.*)"', (ROOT / "__init__.py").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert version is not None and f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()
    assert project["keywords"] and project["authors"]


def test_changelog_names_every_command_and_what_has_a_folder() -> None:
    """The commands are those of the command line's own help."""
    help_text = subprocess.run(
        [sys.executable, "-m", "corespan.server.cli", "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = re.findall(r"^    ([\w-]+)", help_text.partition("commands:")[2], re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text()

    assert len(commands) > 3
    missing = [name for name in (*commands, "examples/", "corespan.vllm", "tool calls") if name not in changelog]
    assert missing == []
