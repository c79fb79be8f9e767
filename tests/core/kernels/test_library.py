"""Which native library is used at all."""

import ctypes
from types import SimpleNamespace

from corespan.core.kernels import library

SIZES = {operation.kind: ctypes.sizeof(operation) for operation in library.Operation.__subclasses__()}


def built_from(sizes: dict[int, int]) -> SimpleNamespace:
    """A library whose operations take arguments of these sizes."""

    def args_size(kind: int) -> int:
        return sizes.get(kind, 0)

    return SimpleNamespace(corespan_args_size=args_size)


def test_every_operation_has_a_kind_of_its_own() -> None:
    assert sorted(SIZES) == list(range(len(library.Operation.__subclasses__())))


def test_a_library_of_other_structs_is_not_used() -> None:
    assert library._is_of_this_version(built_from(SIZES))  # type: ignore[arg-type]
    for kind in SIZES:
        assert not library._is_of_this_version(built_from({**SIZES, kind: SIZES[kind] - 8}))  # type: ignore[arg-type]


def test_a_library_that_cannot_tell_its_version_is_not_used() -> None:
    assert not library._is_of_this_version(SimpleNamespace())  # type: ignore[arg-type]
