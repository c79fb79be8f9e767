"""Fixtures of the kernel tests: every instruction set that this CPU has, and one or several threads."""

from collections.abc import Iterator

import pytest
import torch

from corespan.core.kernels import library


def _instruction_sets() -> list[str]:
    if not library.is_available():
        return []
    return list(library.ISA_LEVELS[: library.isa_level() + 1])


@pytest.fixture(autouse=True)
def need_native_kernels() -> None:
    if not library.is_available():
        pytest.skip("the native kernels are not built")


@pytest.fixture(params=_instruction_sets() or ["none"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels forced to one instruction set."""
    monkeypatch.setenv("CORESPAN_CPU_ISA", request.param)
    return str(request.param)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
