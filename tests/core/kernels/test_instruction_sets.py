"""No instruction of a higher set lies in what a CPU of a lower one may run."""

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from corespan.core.kernels import library

LIBRARY = Path(library.__file__).with_name("_native.so")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
BEYOND_AVX2 = re.compile(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])")
BEYOND_BASELINE = re.compile(r"%ymm|\tv[a-z]")


def instructions() -> Iterator[tuple[str, str]]:
    """(demangled function, disassembled instruction) of the whole library."""
    disassembler = subprocess.Popen(
        ["objdump", "-d", "-C", "--no-show-raw-insn", str(LIBRARY)], stdout=subprocess.PIPE, text=True
    )
    assert disassembler.stdout is not None
    function = ""
    for line in disassembler.stdout:
        if match := FUNCTION.match(line):
            function = match[1]
        elif function:
            yield function, line.rstrip()
    assert disassembler.wait() == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64's instruction sets")
@pytest.mark.skipif(not shutil.which("objdump"), reason="objdump is missing: apt-get install binutils")
def test_functions_keep_to_their_instruction_set() -> None:
    stray, found = set(), set()
    for function, instruction in instructions():
        if "avx512" in function:
            found.add("avx512")
        elif "avx2::" in function:
            found.add("avx2")
            if BEYOND_AVX2.search(instruction):
                stray.add(function)
        else:
            found.add("portable" if "portable::" in function else "shared")
            if BEYOND_BASELINE.search(instruction) or BEYOND_AVX2.search(instruction):
                stray.add(function)
    assert found == {"avx512", "avx2", "portable", "shared"}
    assert not stray
