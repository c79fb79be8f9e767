"""The matrices behind pooled states: classifiers, and the dense layers of sentence-transformers' models."""

from contextlib import nullcontext

import numpy as np

from ...protocol.pooling import DenseActivation, DenseLayer, PoolerSpec
from ..lazy_torch import torch
from ..models.loader import open_checkpoint
from ..models.tensor_names import EMBEDDING
from ..models.tensor_source import TensorSource


class Dense:
    """activation(weight @ x + bias) in float32, each row by itself, so that it does not depend on those beside it."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None, activation: DenseActivation) -> None:
        """weight: [rows, columns] float32; bias: [rows]."""
        self._weight, self._bias, self._activation = weight, bias, activation

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """states: [n, columns] float32. Returns [n, rows] float32."""
        result = np.stack([self._weight @ state for state in states])
        if self._bias is not None:
            result += self._bias
        if self._activation == "identity":
            return result
        function = torch.nn.functional.gelu if self._activation == "gelu" else getattr(torch, self._activation)
        activated: np.ndarray = function(torch.from_numpy(result)).numpy()
        return activated


def load_dense(spec: PoolerSpec, model: TensorSource) -> list[Dense]:
    """Raises ValueError naming the tensors that are missing or of another shape."""
    layers = [_layer(layer, model) for layer in spec.dense]
    if spec.head_token_ids:
        name = "lm_head.weight" if "lm_head.weight" in model.shapes else EMBEDDING
        rows = torch.cat([model.read(name, torch.float32, slice(each, each + 1)) for each in spec.head_token_ids])
        weight = rows.numpy()
        layers.append(Dense(weight[1:] - weight[:1] if spec.difference else weight, None, "identity"))
    return layers


def _layer(layer: DenseLayer, model: TensorSource) -> Dense:
    with open_checkpoint(layer.folder) if layer.folder else nullcontext(model) as source:
        shapes: dict[str, tuple[int, ...]] = {f"{layer.name}.weight": (layer.rows, layer.columns)}
        if layer.bias:
            shapes[f"{layer.name}.bias"] = (layer.rows,)
        for name, shape in shapes.items():
            found = source.shapes.get(name)
            if found != shape:
                is_ = "missing" if found is None else f"of shape {list(found)}"
                raise ValueError(f"tensor {name} of {source.path} is {is_}; expected is the shape {list(shape)}")
        weight, *bias = [source.read(name, torch.float32).numpy().copy() for name in shapes]
    return Dense(weight, bias[0] if bias else None, layer.activation)
