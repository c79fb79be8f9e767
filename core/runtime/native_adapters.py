"""LoRA adapters on the native kernels: how they lie in memory, and the operations that apply them in a recording."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..kernels import library, memory
from ..kernels.linear import PackedWeight, QuantizedRows
from ..kernels.memory import Buffer
from ..lazy_torch import torch
from ..lora.adapter import Adapter, AdapterRows, LowRank

_LANES = 16


@dataclass(frozen=True, slots=True)
class Parts:
    """The matrices of a product: where they stand in an adapter, their rows, and how many columns come before them."""

    first_place: int
    sizes: tuple[int, ...]
    skip: int = 0


def packed(part: LowRank) -> LowRank:
    """As `LoraPart` of csrc/args.h says."""
    a = torch.nn.functional.pad(part.a.bfloat16(), (0, 0, 0, -part.rank % _LANES))
    a = a.view(-1, _LANES, a.shape[1] // 2, 2).transpose(1, 2)
    b = part.b.bfloat16().view(-1, _LANES, part.rank).transpose(1, 2)
    return LowRank(a.contiguous(), b.contiguous())


class AdapterStep:
    """A step's rows by adapter, for the kernels. It keeps what `step` points to."""

    def __init__(self, num_places: int) -> None:
        self.step = library.LoraStep()
        self._num_places = num_places
        self._tables: weakref.WeakKeyDictionary[Adapter, ctypes.Array[library.LoraPart]] = weakref.WeakKeyDictionary()
        self._kept: tuple[object, ...] = ()

    def enter(self, adapters: Sequence[AdapterRows], tokens: np.ndarray) -> None:
        """tokens: [n] int64, ascending: the rows are these tokens of the step."""
        owners = np.full(len(tokens), len(adapters))  # those without an adapter come last
        for number, (_, own_tokens) in enumerate(adapters):
            owners[np.isin(tokens, np.asarray(own_tokens))] = number
        rows = np.argsort(owners, kind="stable")
        starts = np.searchsorted(owners[rows], np.arange(len(adapters) + 2))
        tables = [self._table(adapter) for adapter, _ in adapters]
        addresses = (ctypes.c_void_p * (len(tables) + 1))(*map(ctypes.addressof, tables), None)
        self._kept = (adapters, tables, addresses, rows, starts)
        self.step.groups = len(adapters) + 1
        self.step.starts, self.step.rows = starts.ctypes.data, rows.ctypes.data
        self.step.parts = ctypes.addressof(addresses)

    def _table(self, adapter: Adapter) -> ctypes.Array[library.LoraPart]:
        table = self._tables.get(adapter)
        if table is None:
            table = self._tables[adapter] = (library.LoraPart * self._num_places)()
            for place, part in adapter.parts.items():
                table[place] = library.LoraPart(part.a.data_ptr(), part.b.data_ptr(), part.rank)
        return table


class AdapterProducts:
    """Records products that adapters change: their sums stay in float32 until what is to be added has been."""

    def __init__(self, capacity: int, widest: int) -> None:
        self._base = memory.allocate((capacity, widest), np.float32)

    def record(
        self,
        weight: PackedWeight,
        rows: int,
        x: Buffer,
        out: Buffer,
        scratch: QuantizedRows,
        parts: Parts,
        step: AdapterStep,
    ) -> list[library.Operation]:
        """As `weight.operations`, with what the adapters of the step's rows add."""
        lora = library.Lora(
            rows=rows,
            step=ctypes.addressof(step.step),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            k=weight.k,
            base=self._base.data_ptr(),
            base_stride=self._base.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            n=weight.n,
            first_part=parts.first_place,
            parts=len(parts.sizes),
            skip=parts.skip,
            size0=parts.sizes[0],
            size1=sum(parts.sizes[1:2]),
            epilogue=weight.epilogue,
        )
        return [*weight.operations(rows, x, self._base, scratch), lora]
