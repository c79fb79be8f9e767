"""From the states of a prompt's tokens to its vectors. Owned by the model runner of an engine that pools."""

import numpy as np

from ...protocol.pooling import PoolerSpec, PoolingActivation, ResolvedPooling
from ..worker.input_batch import StepInputs
from .dense import Dense


class Pooler:
    """What each row of the batch asks for, and what its chunks so far have come to.

    A request's vectors do not depend on the batch, nor on the chunks: tokens are taken in one by one, in their order.
    """

    def __init__(self, spec: PoolerSpec, dense: list[Dense]) -> None:
        self._spec, self._dense = spec, dense
        self._params: dict[int, ResolvedPooling] = {}
        self._sums: dict[int, np.ndarray] = {}  # [hidden_size] float64, over the tokens so far
        self._states: dict[int, list[np.ndarray]] = {}  # chunks of [n, hidden_size] float32

    def add(self, row: int, params: ResolvedPooling) -> None:
        self.remove(row)
        self._params[row] = params

    def remove(self, row: int) -> None:
        """Nothing, where no request has the row."""
        for table in (self._params, self._sums, self._states):
            table.pop(row, None)

    def lines(self, inputs: StepInputs) -> np.ndarray:
        """The tokens of the step whose states are wanted, [n] int64, ascending."""
        wanted = np.ones(len(inputs.token_ids), dtype=bool)
        for row, start, end in _spans(inputs):
            if self._params[row].pooling == "LAST":
                wanted[start : end - 1] = False
            elif self._params[row].pooling == "CLS":
                wanted[start + (inputs.positions[start] == 0) : end] = False
        return np.flatnonzero(wanted)

    def token_types(self, inputs: StepInputs) -> np.ndarray | None:
        """[num_tokens] int64, 1 in the second text of a pair; None where there are no pairs."""
        types = np.zeros(len(inputs.token_ids), dtype=np.int64)
        for row, start, end in _spans(inputs):
            if second := self._params[row].second_start:
                types[start + second : end] = 1
        return types if types.any() else None

    def pool(
        self, inputs: StepInputs, lines: np.ndarray, states: np.ndarray, num_tokens: np.ndarray
    ) -> dict[int, np.ndarray]:
        """states: [len(lines), hidden_size] float32; num_tokens: [rows] int64, of each row's request. The vectors, by
        row, of those whose last token was computed."""
        result = {}
        for row, start, end in _spans(inputs):
            first, stop = np.searchsorted(lines, (start, end))
            self._take_in(row, states[first:stop])
            if inputs.positions[start] + end - start >= num_tokens[row]:
                result[row] = self._finished(row, int(num_tokens[row]))
        return result

    def _take_in(self, row: int, states: np.ndarray) -> None:
        """states: [n, hidden_size], of the chunk's tokens that `lines` asked for."""
        pooling = self._params[row].pooling
        if pooling == "MEAN":
            before = self._sums.get(row, np.zeros(states.shape[1]))
            self._sums[row] = np.add.reduce(np.concatenate((before[None], states)), axis=0, dtype=np.float64)
        elif pooling == "LAST":
            self._states[row] = [states.copy()]
        else:
            self._states.setdefault(row, []).append(states.copy())

    def _finished(self, row: int, num_tokens: int) -> np.ndarray:
        """[size], of "ALL" [num_tokens, size]."""
        params = self._params[row]
        if params.pooling == "MEAN":
            vectors = (self._sums.pop(row) / num_tokens).astype(np.float32)[None]
        else:
            vectors = np.concatenate(self._states.pop(row))
        for layer in self._dense:
            vectors = layer(vectors)
        if self._spec.task == "classify":
            vectors = (vectors - np.float32(self._spec.logit_mean)) / np.float32(self._spec.logit_sigma)
        if params.dimensions is not None:
            vectors = vectors[:, : params.dimensions]
        vectors = activated(vectors, params.activation)
        return np.ascontiguousarray(vectors if params.pooling == "ALL" else vectors[0])


def activated(vectors: np.ndarray, activation: PoolingActivation) -> np.ndarray:
    """vectors: [n, size] float32; row by row."""
    if activation == "normalize":
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    if activation == "softmax":
        exponentials = np.exp(vectors - vectors.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)
    if activation == "sigmoid":
        return 1.0 / (1.0 + np.exp(-vectors))
    return vectors


def _spans(inputs: StepInputs) -> list[tuple[int, int, int]]:
    """(row, first token, end) of the step's requests."""
    starts = inputs.starts.tolist()
    return list(zip(inputs.rows.tolist(), starts[:-1], starts[1:], strict=True))
