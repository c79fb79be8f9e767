"""Which native library is used at all."""

import ctypes
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from corespan.core.kernels import header, library
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


def test_the_header_s_structs_are_read_field_by_field() -> None:
    numbers, structs = header.read(
        "constexpr int SIZE = 48;  // struct Lost { int64_t a; };\n"
        "enum Kind : int64_t {\n    ADD = 3,\n    SUBTRACT = 7,\n};\n"
        "struct bf16 {\n    uint16_t bits;\n};\n"
        "struct AddArgs {\n    const int64_t* rows;  // [n]; of x\n    double eps;\n"
        "    const uint32_t* const* ids;\n    int64_t n;\n};\n"
    )
    assert numbers == {"SIZE": 48, "ADD": 3, "SUBTRACT": 7}
    pointer = ctypes.c_void_p
    fields = [("rows", pointer), ("eps", ctypes.c_double), ("ids", pointer), ("n", ctypes.c_int64)]
    assert structs == {"AddArgs": fields}


def test_a_field_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cannot read the field 'int32_t n'"):
        header.read("struct AddArgs {\n    int32_t n;\n};\n")


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

    for source in sources.iterdir():  # a wheel holds the arguments alone: its kernels and Python come from one build
        if source != args:
            source.unlink()
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
