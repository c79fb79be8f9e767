"""Drawing tokens, penalties and log-probabilities with the native kernels. `core/sampling` has the same in torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from . import library
from .memory import Array, Buffer, as_buffer


def supports(logits: Array) -> bool:
    """Whether the kernels take these logits: [n, vocab] float32 on the CPU, each row contiguous."""
    on_cpu = isinstance(logits, Buffer) or logits.device.type == "cpu"
    return on_cpu and logits.stride(1) == 1 and library.is_available()


@dataclass(slots=True)
class DrawParams:
    """For each row: temperature [n] float64, 0: greedy; min_p [n] float64, 0: off; top_k [n] int64, 0: off; top_p [n]
    float64, 1: off; uniforms [n] float64 in [0, 1). `recorded`: the draw that reads these arrays, for its next time."""

    temperature: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    uniforms: np.ndarray
    recorded: Draw | None = None


@dataclass(slots=True)
class Allowed:
    """The tokens that some lines of logits may have. lines: [m] int64, distinct; bitmask: [m, ceil(vocab / 32)] uint32,
    bit set = allowed."""

    lines: np.ndarray
    bitmask: np.ndarray

    def addresses(self, num_lines: int) -> np.ndarray:
        """[num_lines] uint64: where each line's bits lie, 0 for one that may have all."""
        addresses = np.zeros(num_lines, dtype=np.uint64)
        places = np.arange(len(self.lines), dtype=np.uint64) * self.bitmask.strides[0]
        addresses[self.lines] = places + self.bitmask.ctypes.data
        return addresses


class Draw:
    """One token for each row of logits, and the row's largest logit. Reads its arrays anew each time.

    logits: [n, vocab] float32. processed: [n, vocab] float32, takes the logits that the tokens were drawn from. A row
    whose largest logit is not finite is not drawn from: its token is that entry's.
    """

    def __init__(
        self,
        logits: Array,
        params: DrawParams,
        processed: Array | None = None,
        allowed: Allowed | None = None,
    ) -> None:
        """The logits are not kept alive: they must be at `logits_at` at each run."""
        self.logits_at = logits.data_ptr()
        self._token_ids = np.empty(logits.shape[0], dtype=np.int64)
        self._largest = np.empty(logits.shape[0], dtype=np.float32)
        rows = library.Int(logits.shape[0])
        bits = None if allowed is None else allowed.addresses(logits.shape[0])
        operation = library.Draw(
            rows=ctypes.addressof(rows),
            logits=self.logits_at,
            stride=logits.stride(0),
            n=logits.shape[1],
            temperature=params.temperature.ctypes.data,
            min_p=params.min_p.ctypes.data,
            top_k=params.top_k.ctypes.data,
            top_p=params.top_p.ctypes.data,
            uniforms=params.uniforms.ctypes.data,
            token_ids=self._token_ids.ctypes.data,
            largest=self._largest.ctypes.data,
            processed=None if processed is None else processed.data_ptr(),
            allowed=None if bits is None else bits.ctypes.data,
        )
        arrays = params.temperature, params.min_p, params.top_k, params.top_p, params.uniforms
        self._recording = library.Recording([operation], (rows, arrays, processed, bits, allowed))

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """[n] int64, [n] float32; overwritten by the next run."""
        self._recording.run()
        return self._token_ids, self._largest


def masked(logits: Array, allowed: Allowed) -> Buffer:
    """A copy of the logits, [n, vocab] float32, with -inf where a token is not allowed: what a greedy draw reports."""
    rows = logits.shape[0]
    off, uniforms = np.zeros(rows), np.zeros(rows)
    out = as_buffer(np.empty(logits.shape, dtype=np.float32))
    greedy = DrawParams(off, off, np.zeros(rows, dtype=np.int64), np.ones(rows), uniforms)
    Draw(logits, greedy, out, allowed).run()
    return out


def penalise(logits: Array, lines: np.ndarray, seen: list[tuple[np.ndarray, np.ndarray]], settings: np.ndarray) -> None:
    """Penalise in place. logits: [n, vocab] float32; lines: [m] int64, those penalised; `seen`: for each of them its
    distinct token ids, int64, and how often each was generated, float32; settings: [3, m] float32: repetition,
    frequency and presence penalty."""
    rows = library.Int(len(lines))
    sizes = np.array([len(ids) for ids, _ in seen], dtype=np.int64)
    ids = np.array([ids.ctypes.data for ids, _ in seen], dtype=np.uint64)
    generated = np.array([counts.ctypes.data for _, counts in seen], dtype=np.uint64)
    library.run(
        library.Penalties(
            rows=ctypes.addressof(rows),
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            lines=lines.ctypes.data,
            sizes=sizes.ctypes.data,
            ids=ids.ctypes.data,
            generated=generated.ctypes.data,
            repetition=settings[0].ctypes.data,
            frequency=settings[1].ctypes.data,
            presence=settings[2].ctypes.data,
        )
    )


def logprobs(
    logits: Array, token_ids: np.ndarray, k: int, more_token_ids: np.ndarray | None, as_logits: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids [n, 1 + k] int32, their log-softmax values float32, and the ranks of the first, [n] int32.

    logits: [n, vocab] float32; token_ids: [n]; k <= vocab. Behind the first stand the k largest entries, largest first,
    or `more_token_ids`, [n, k].
    """
    num_rows, vocab_size = logits.shape
    ids = np.empty((num_rows, 1 + k), dtype=np.int32)
    ids[:, 0] = token_ids
    if more_token_ids is not None:
        ids[:, 1:] = more_token_ids
    values = np.empty(ids.shape, dtype=np.float32)
    ranks = np.empty(num_rows, dtype=np.int32)
    rows = library.Int(num_rows)
    library.run(
        library.Logprobs(
            rows=ctypes.addressof(rows),
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            n=vocab_size,
            width=1 + k,
            find_largest=int(more_token_ids is None),
            normalize=int(not as_logits),
            ids=ids.ctypes.data,
            values=values.ctypes.data,
            ranks=ranks.ctypes.data,
        )
    )
    return ids, values, ranks
