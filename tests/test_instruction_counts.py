"""A guard against regressions that no clock is needed for: what fixed cases cost, beside what they cost when recorded.

The counts are of one compiler's code for one instruction set, or of one Python's byte code; others are skipped.
"""

import shutil

import instruction_counts
import pytest
from instruction_counts import INSTRUCTION_SETS, Counts, recorded

from corespan.core.kernels import library

TOLERANCE = 0.05
"""Two releases of one compiler differ by less, a lost optimisation by more."""


def compare(key: str, found: Counts) -> None:
    expected = recorded()[key]
    assert found.keys() == expected.keys(), "the cases changed: run scripts/record_instruction_counts"
    strayed = [
        f"{name}: {count:,} where {expected[name]:,} were recorded ({count / expected[name] - 1:+.1%})"
        for name, count in found.items()
        if abs(count - expected[name]) > TOLERANCE * expected[name]
    ]
    assert not strayed, "\n".join([*strayed, "Meant so? Run scripts/record_instruction_counts"])


def need_record(key: str) -> None:
    if key not in recorded():
        pytest.skip(f"no counts are recorded for {key}: scripts/record_instruction_counts adds them")


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_kernels_take_as_many_instructions_as_recorded(isa: str) -> None:
    if not shutil.which("valgrind"):
        pytest.skip("valgrind is missing: apt-get install valgrind")
    if not library.is_available() or isa not in library.ISA_LEVELS[: library.isa_level() + 1]:
        pytest.skip(f"no native kernels for {isa} here")
    key = instruction_counts.kernels_key(isa)
    need_record(key)
    compare(key, instruction_counts.count_kernels(isa))


def test_a_step_of_the_scheduler_takes_as_many_byte_codes_as_recorded() -> None:
    key = instruction_counts.scheduler_key()
    need_record(key)
    compare(key, instruction_counts.count_scheduler())


def test_a_step_of_the_scheduler_costs_the_same_however_many_wait() -> None:
    counts = instruction_counts.count_scheduler()
    few, many = (counts[f"decode step, 256 running, {waiting} waiting"] for waiting in (0, 1000))
    assert many <= 1.01 * few


def test_a_count_beyond_the_tolerance_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "recorded", lambda: {"key": {"case": 1000}})
    compare("key", {"case": 1049})
    for count in (1051, 949):
        with pytest.raises(AssertionError, match="case: .* where 1,000 were recorded"):
            compare("key", {"case": count})
