"""The wheel holds the rooms and nothing else, and works in an environment that holds nothing but its dependencies."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("protocol", "shared", "client", "core", "engine", "vllm", "server")
NATIVE = "corespan/core/kernels/_native.so"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the checkout: what an earlier build left there would find its way into the wheel."""
    copy = tmp_path_factory.mktemp("tree") / "checkout"
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=unwanted)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with the kernels of the checkout, which its installation has compiled, where there are any."""
    if (kernels := ROOT / "core" / "kernels" / "_native.so").exists():
        compiled = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / NATIVE
        compiled.parent.mkdir(parents=True)
        shutil.copyfile(kernels, compiled)  # it is newer than its sources, which keep their times
    target = tmp_path_factory.mktemp("wheel")
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(tree)]
    subprocess.run([sys.executable, "-m", *build], check=True)
    (built,) = target.glob("*.whl")
    return built


def test_wheel_holds_exactly_the_rooms(wheel: Path, tree: Path) -> None:
    python = [tree / "__init__.py", *(path for room in ROOMS for path in (tree / room).rglob("*.py"))]
    header = tree / "core" / "kernels" / "csrc" / "args.h"  # of the kernels' sources what Python reads too
    data = [tree / "py.typed", header, *(tree / "server" / "page").iterdir()]
    expected = {f"corespan/{path.relative_to(tree).as_posix()}" for path in [*python, *data]}

    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert names - {NATIVE} == expected


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_wheel_carries_the_native_kernels_where_there_is_a_compiler(wheel: Path) -> None:
    assert NATIVE in zipfile.ZipFile(wheel).namelist()
    assert "-py3-none-linux_" in wheel.name  # tied to no Python version


def test_wheel_carries_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith("licenses/LICENSE"))

        assert opened.read(name) == (ROOT / "LICENSE").read_bytes()


def test_wheel_generates_in_an_empty_environment(wheel: Path, tiny_llama_dir: str, tmp_path: Path) -> None:
    """Dependencies are lent by path, so that the checkout's editable install stays out of sight."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    purelib = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    install = ["pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True)
    lent = [path for path in sys.path if path.endswith("-packages")]
    Path(purelib, "dependencies.pth").write_text("\n".join(lent) + "\n")
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    where = subprocess.run(
        [python, "-c", "import corespan; print(corespan.__file__)"],
        cwd=tmp_path, env=outside, check=True, capture_output=True, text=True,
    )  # fmt: skip
    command = [environment / "bin" / "corespan", "generate", "--model", tiny_llama_dir, "--max-tokens", "8", "Once"]
    finished = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True)

    assert Path(where.stdout.strip()).is_relative_to(environment)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip()
