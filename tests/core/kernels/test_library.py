"""Which native library is used at all."""

import ctypes
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from corespan.core.kernels import library
from corespan.core.kernels.source_hash import source_hash

SIZES = {operation.kind: ctypes.sizeof(operation) for operation in library.Operation.__subclasses__()}


HASH = source_hash(library._SOURCES)


def built_from(sizes: dict[int, int], built_hash: int | None = HASH) -> SimpleNamespace:
    """A library whose operations take arguments of these sizes, built from sources of this hash."""

    def args_size(kind: int) -> int:
        return sizes.get(kind, 0)

    def own_hash() -> int | None:
        return built_hash

    return SimpleNamespace(corespan_args_size=args_size, corespan_source_hash=own_hash)


def test_every_operation_has_a_kind_of_its_own() -> None:
    assert sorted(SIZES) == list(range(len(library.Operation.__subclasses__())))


def test_a_library_of_other_structs_is_not_used() -> None:
    assert library._is_of_this_version(built_from(SIZES))  # type: ignore[arg-type]
    for kind in SIZES:
        assert not library._is_of_this_version(built_from({**SIZES, kind: SIZES[kind] - 8}))  # type: ignore[arg-type]


@pytest.mark.skipif(library._load() is None, reason="no native kernels")
def test_the_kernels_are_not_used_once_a_source_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = ctypes.CDLL(str(Path(library.__file__).with_name("_native.so")))
    sources = tmp_path / "csrc"
    shutil.copytree(library._SOURCES, sources)
    monkeypatch.setattr(library, "_SOURCES", sources)
    assert library._is_of_this_version(built)

    args = sources / "args.h"
    args.write_text(args.read_text() + "// Two fields of the same size are swapped.\n")
    assert not library._is_of_this_version(built)

    shutil.rmtree(sources)  # a wheel holds no sources: its kernels and its Python come from one build
    assert library._is_of_this_version(built)


def test_a_library_that_cannot_tell_its_version_is_not_used() -> None:
    assert not library._is_of_this_version(SimpleNamespace())  # type: ignore[arg-type]


def test_where_there_are_no_kernels_the_warning_names_a_remedy_that_does_without_kept_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))

    assert library._load.__wrapped__() is None

    assert "pip install --force-reinstall --no-deps --no-cache-dir" in caplog.text
    assert "apt-get install g++" in caplog.text
