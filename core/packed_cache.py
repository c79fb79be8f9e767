"""What a load packs, kept in the cache: the first load of a model writes it beside serving, later ones map it, and
engines that map the same file share its pages. `NativeRuntime` keeps its weights and tables here.

A file is a line of JSON (`_Head`), padded to whole pages, then the buffers in the order in which they were asked for,
each from a page's beginning. Every start checks its size, and of each mebibyte the sum.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedRandom
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from ..protocol import envs
from ..shared.cache_folder import CacheNotWritableError, cache_dir
from .kernels import library
from .kernels.memory import Buffer, Fill, Keep, allocate, as_buffer, keep_new

logger = logging.getLogger("corespan.core")

_FORMAT = 1
_PAGE = 4096
_SUMMED = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 256, 4096
_GIB = 1 << 30
_STAGED = ".writing-"
_LEFTOVER_AGE = 3600.0  # seconds, after which whoever was writing a file is gone
_NODES = Path("/sys/devices/system/node")

T = TypeVar("T")


class _Head(msgspec.Struct):
    """`sums`: of the 8-byte words of each mebibyte of the buffers, modulo 2**64."""

    key: str
    num_bytes: int
    sums: list[int]


def kept(files: Sequence[str], settings: object, make: Callable[[Keep], T]) -> tuple[T, int]:
    """What `make` returns, and how many bytes of it other engines may share. It gets all of its buffers from the
    function that it is given, in an order and of sizes that follow from the content of `files`, the settings' `repr`,
    the instruction set, and the kernels' and our code.
    """
    if envs.CORESPAN_PACKED_CACHE_GIB <= 0:
        return make(keep_new), 0
    try:
        path = cache_dir() / "packed" / _key_of(files, settings)
        mapped = _MappedBuffers.open(path)
    except (CacheNotWritableError, OSError) as error:
        logger.warning("Packed weights are not taken from the cache (CORESPAN_CACHE): %s", error)
        return make(keep_new), 0
    if mapped is not None:
        return make(mapped), mapped.num_shared
    new = _NewBuffers()
    value = make(new)
    threading.Thread(target=_save, args=(path, new.buffers), name="core-packed-cache").start()
    return value, 0


def _key_of(files: Iterable[str], settings: object) -> str:
    """A file counts as the same where its size, its time of modification and 256 samples of its bytes are."""
    digest = hashlib.sha256(repr((_FORMAT, library.isa_level(), library.built_from(), settings)).encode())
    digest.update(_code())
    for path in files:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            digest.update(repr((status.st_size, status.st_mtime_ns)).encode())
            for sample in range(_SAMPLES):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, status.st_size * sample // _SAMPLES))
    return digest.hexdigest()[:32]


class _NewBuffers:
    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike, fill: Fill, place: Fill | None = None) -> Buffer:
        self.buffers.append(keep_new(shape, dtype, fill, place))
        return self.buffers[-1]


class _MappedBuffers:
    """On several memory nodes, weights are copied to where the threads are that read them."""

    def __init__(self, content: Buffer) -> None:
        self._left = content
        self._copies = len(list(_NODES.glob("node[0-9]*"))) > 1
        self.num_shared = 0 if self._copies else content.nbytes

    @classmethod
    def open(cls, path: Path) -> _MappedBuffers | None:
        """None where there is no such file, or no whole one."""
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            content = _checked(mapped, path.name)
            with contextlib.suppress(OSError):  # it is another user's
                os.utime(path)  # used just now
            return cls(content)
        except FileNotFoundError:
            return None
        except (ValueError, msgspec.MsgspecError) as error:
            logger.warning("%s is damaged and made again: %s", path, error)
            return None

    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike, fill: Fill, place: Fill | None = None) -> Buffer:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        taken = self._left[:size].view(dtype).reshape(shape).view(Buffer)
        self._left = self._left[_whole_pages(size) :]
        if not self._copies or place is None:
            return taken
        copy = allocate(shape, dtype)
        place(copy)
        copy[:] = taken
        return copy


def _checked(mapped: mmap.mmap, key: str) -> Buffer:
    """What lies behind the head. Raises ValueError, or msgspec's errors, for a file that is not as it was written."""
    line = mapped.readline()
    head = msgspec.json.decode(line, type=_Head)
    content = np.frombuffer(mapped, dtype=np.uint8)[_whole_pages(len(line)) :]
    if head.key != key or content.nbytes != head.num_bytes:
        raise ValueError(f"it holds {content.nbytes} bytes of {head.key}, not {head.num_bytes} of {key}")
    if _sums(content) != head.sums:
        raise ValueError("the sums of its bytes are others")
    return as_buffer(content)


def _sums(content: np.ndarray) -> list[int]:
    """content: [n] uint8, n a multiple of 8. The pages are read on the way, by several threads."""

    def add(start: int) -> int:
        return int(content[start : start + _SUMMED].view(np.uint64).sum(dtype=np.uint64))

    with ThreadPoolExecutor(library.num_threads(), thread_name_prefix="packed-cache") as pool:
        return list(pool.map(add, range(0, content.nbytes, _SUMMED)))


def _save(path: Path, buffers: Sequence[Buffer]) -> None:
    """What goes wrong costs a line of log, and the next start its time."""
    staged: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_room(path.parent, sum(_whole_pages(buffer.nbytes) for buffer in buffers))
        descriptor, staged = tempfile.mkstemp(prefix=_STAGED, dir=path.parent)
        with open(descriptor, "r+b") as file:
            _write(file, path.name, buffers)
            os.fchmod(descriptor, 0o644)
        os.replace(staged, path)
    except OSError as error:
        logger.warning("Packed weights cannot be kept in the cache, and are packed at each start: %s", error)
    finally:
        if staged is not None:
            Path(staged).unlink(missing_ok=True)


def _write(file: BufferedRandom, key: str, buffers: Sequence[Buffer]) -> None:
    num_bytes = sum(_whole_pages(buffer.nbytes) for buffer in buffers)
    start = _whole_pages(200 + 22 * (num_bytes // _SUMMED + 1))  # of 20 digits a sum at most
    file.truncate(start + num_bytes)
    file.seek(start)
    for buffer in buffers:
        file.write(buffer.data.cast("B"))
        file.seek(-buffer.nbytes % _PAGE, os.SEEK_CUR)
    file.flush()
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    head = msgspec.json.encode(_Head(key, num_bytes, _sums(np.frombuffer(mapped, dtype=np.uint8)[start:])))
    file.seek(0)
    file.write(head.ljust(start - 1) + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _make_room(folder: Path, needed: int) -> None:
    """Removes what was not used for longest, until all fits into CORESPAN_PACKED_CACHE_GIB. Engines that map a removed
    file go on with it. Raises OSError where there is no room.
    """
    limit = int(envs.CORESPAN_PACKED_CACHE_GIB * _GIB)
    if needed > limit:
        raise OSError(f"they take {needed / _GIB:.2f} GiB, and CORESPAN_PACKED_CACHE_GIB is {limit / _GIB:g}")
    files = [(entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(folder)]
    total = needed
    for last_used, size, path in sorted(files, reverse=True):
        if Path(path).name.startswith(_STAGED):
            if last_used < time.time() - _LEFTOVER_AGE:
                os.unlink(path)
            continue
        total += size
        if total > limit:
            os.unlink(path)
    if (free := shutil.disk_usage(folder).free) < 2 * needed:
        raise OSError(
            f"they take {needed / _GIB:.2f} GiB, as much again is to stay free, and {folder} has {free / _GIB:.2f} left"
        )


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


@functools.cache
def _code() -> bytes:
    """A hash of the modules that decide what is packed, and how."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for room in ("kernels", "models", "runtime") for path in (folder / room).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()
