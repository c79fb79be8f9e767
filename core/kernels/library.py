"""Loads the native kernels and runs lists of their operations. The faces in this package call it; nothing else does.

Every operation is a struct of 8-byte fields; what they mean stands in csrc/args.h. A list of operations runs in one
parallel region on OpenMP's threads. Kernels and torch share one OpenMP runtime, which is torch's where it has its own.
"""

import contextlib
import ctypes
import functools
import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ...protocol import envs
from .. import lazy_torch
from ..dtypes import AnyDType, DType
from .header import NUMBERS, STRUCTS
from .source_hash import source_hash

logger = logging.getLogger("corespan.core")

ISA_LEVELS = ("portable", "avx2", "avx512", "avx512vnni", "avx512bf16")
"""Instruction sets, each including those before it. `CORESPAN_CPU_ISA` names one of them, or "none"."""

Pointer = ctypes.c_void_p
Int = ctypes.c_int64

_SOURCES = Path(__file__).with_name("csrc")


class Operation(ctypes.Structure):
    """The arguments of one operation, as csrc/args.h describes them. `kind` is its place in `Kind` there."""

    kind: int


class Step(ctypes.Structure):
    _fields_ = STRUCTS["Step"]


class Embed(Operation):
    kind, _fields_ = NUMBERS["EMBED"], STRUCTS["EmbedArgs"]


class RmsNorm(Operation):
    kind, _fields_ = NUMBERS["RMS_NORM"], STRUCTS["RmsNormArgs"]


class Gemm(Operation):
    kind, _fields_ = NUMBERS["GEMM"], STRUCTS["GemmArgs"]


class Pack(Operation):
    kind, _fields_ = NUMBERS["PACK"], STRUCTS["PackArgs"]


class Rotary(Operation):
    kind, _fields_ = NUMBERS["ROTARY"], STRUCTS["RotaryArgs"]


class WriteKv(Operation):
    kind, _fields_ = NUMBERS["WRITE_KV"], STRUCTS["WriteKvArgs"]


class Attention(Operation):
    kind, _fields_ = NUMBERS["ATTENTION"], STRUCTS["AttentionArgs"]


class Draw(Operation):
    kind, _fields_ = NUMBERS["DRAW"], STRUCTS["DrawArgs"]


class Quantize(Operation):
    kind, _fields_ = NUMBERS["QUANTIZE"], STRUCTS["QuantizeArgs"]


class Logprobs(Operation):
    kind, _fields_ = NUMBERS["LOGPROBS"], STRUCTS["LogprobsArgs"]


class RowBlocks(Operation):
    kind, _fields_ = NUMBERS["ROW_BLOCKS"], STRUCTS["RowBlocksArgs"]


class Prologue(Operation):
    kind, _fields_ = NUMBERS["PROLOGUE"], STRUCTS["PrologueArgs"]


class Place(Operation):
    kind, _fields_ = NUMBERS["PLACE"], STRUCTS["PlaceArgs"]


class Penalties(Operation):
    kind, _fields_ = NUMBERS["PENALTIES"], STRUCTS["PenaltiesArgs"]


class LoraPart(ctypes.Structure):
    _fields_ = STRUCTS["LoraPart"]


class LoraStep(ctypes.Structure):
    _fields_ = STRUCTS["LoraStep"]


class Lora(Operation):
    kind, _fields_ = NUMBERS["LORA"], STRUCTS["LoraArgs"]


class EmbedBlocks(Operation):
    kind, _fields_ = NUMBERS["EMBED_BLOCKS"], STRUCTS["EmbedBlocksArgs"]


class _Entry(ctypes.Structure):
    _fields_ = STRUCTS["Op"]


class Recording:
    """Operations in the order they run, with whatever their pointers point to; may be run any number of times."""

    def __init__(self, operations: Sequence[Operation], keep_alive: object = None) -> None:
        self._operations = operations
        self._keep_alive = keep_alive
        self._entries = (_Entry * len(operations))(
            *(_Entry(operation.kind, ctypes.addressof(operation)) for operation in operations)
        )
        self._address = ctypes.addressof(self._entries)
        self._count = len(operations)
        self._run = _library().corespan_run
        self._level = isa_level()

    def run(self, first: int = 0) -> int:
        """Runs all operations, or those from `first` on, in one parallel region, without the GIL.

        Returns how often the threads waited for each other.
        """
        address = self._address + first * ctypes.sizeof(_Entry)
        num_syncs: int = self._run(self._level, address, self._count - first, num_threads())
        return num_syncs


def run(*operations: Operation) -> None:
    """Runs operations once, in one parallel region."""
    Recording(operations).run()


def is_available() -> bool:
    """Whether the native kernels are built, load, and are not switched off."""
    return envs.CORESPAN_CPU_ISA != "none" and _load() is not None


def isa_level() -> int:
    """Index into ISA_LEVELS of the set in use: the CPU's best, or the lower one that CORESPAN_CPU_ISA names.

    Raises ValueError for an unknown name or a set that this CPU lacks.
    """
    best = int(_library().corespan_isa_level())
    name = envs.CORESPAN_CPU_ISA
    if name is None:
        return best
    usable = ISA_LEVELS[: best + 1]
    if name not in usable:
        raise ValueError(f"CORESPAN_CPU_ISA is {name!r}; this CPU runs {', '.join(usable)}, or 'none' for torch alone")
    return usable.index(name)


def built_from() -> int:
    """The hash of the C++ sources that the kernels were built from."""
    return int(_library().corespan_source_hash())


def num_threads() -> int:
    """On how many threads operations run: torch's number where it is loaded, as users may set that, else OpenMP's."""
    torch = sys.modules.get("torch")
    count = getattr(torch, "get_num_threads", lambda: lazy_torch.thread_limit or _library().omp_get_max_threads())
    return int(count())


def dtype_code(dtype: AnyDType) -> int:
    """The `Dtype` of csrc/args.h. Raises KeyError for a type the kernels do not take."""
    return {DType.FLOAT32: NUMBERS["FLOAT32"], DType.BFLOAT16: NUMBERS["BFLOAT16"]}[DType.of(dtype)]


def _library() -> ctypes.CDLL:
    library = _load()
    if library is None:
        raise RuntimeError("the native kernels are not built; install corespan with a C++17 compiler at hand")
    return library


@functools.cache
def _load() -> ctypes.CDLL | None:
    path = Path(__file__).with_name("_native.so")
    if not path.exists():
        logger.warning(
            "native kernels are not built: torch serves alone, slower; with a C++17 compiler at hand (apt-get install "
            "g++), run pip install --force-reinstall --no-deps --no-cache-dir on what corespan was installed from"
        )
        return None
    _load_openmp_of_torch()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("native kernels do not load, torch serves alone, slower: %s", error)
        return None
    if not _is_of_this_version(library):
        logger.warning(
            "native kernels were built from other sources, torch serves alone, slower: install corespan again"
        )
        return None
    library.corespan_run.argtypes = [ctypes.c_int, Pointer, Int, ctypes.c_int]
    library.corespan_run.restype = Int
    return library


def _load_openmp_of_torch() -> None:
    """Whoever loads libgomp first decides which it is: the one that torch brings along would else be a second one."""
    torch = importlib.util.find_spec("torch")
    for folder in (torch and torch.submodule_search_locations) or ():
        with contextlib.suppress(OSError):  # it has none, and takes the system's
            ctypes.CDLL(str(Path(folder, "lib", "libgomp.so.1")), mode=ctypes.RTLD_GLOBAL)


def _is_of_this_version(library: ctypes.CDLL) -> bool:
    """Whether the library was built from the C++ sources that lie beside it, where there are any, and from structs of
    the same sizes; running one that was not would crash or compute something else.
    """
    if not hasattr(library, "corespan_source_hash"):
        return False
    library.corespan_source_hash.restype = Int
    if source_hash(_SOURCES) not in (None, library.corespan_source_hash()):
        return False
    library.corespan_args_size.argtypes = [Int]
    library.corespan_args_size.restype = Int
    return all(
        library.corespan_args_size(operation.kind) == ctypes.sizeof(operation)
        for operation in Operation.__subclasses__()
    )
