"""The dtypes of weights and activations by name, for code that does without torch."""

from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from .lazy_torch import torch


class DType(Enum):
    """`str()` gives the name that configurations have."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @classmethod
    def of(cls, dtype: "AnyDType") -> "DType":
        """Also of torch's, and of numpy's, where uint16 stands for bfloat16. Raises ValueError for any other."""
        name = str(dtype).removeprefix("torch.")
        return cls.BFLOAT16 if name == "uint16" else cls(name)

    def __str__(self) -> str:
        return self.value

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize

    @property
    def numpy(self) -> np.dtype[Any]:
        """numpy has no bfloat16: its bits stand in uint16."""
        return np.dtype(np.uint16 if self is DType.BFLOAT16 else self.value)

    @property
    def torch(self) -> "torch.dtype":
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype


AnyDType: TypeAlias = "DType | torch.dtype | np.dtype[Any]"
