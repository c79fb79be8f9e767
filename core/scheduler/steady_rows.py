"""Running requests that go on by one plain token a step, as arrays: what most requests of most steps are.

Owned by `RequestTable`. The scheduler plans such requests and takes their tokens in with a few array operations; a
request that reads its own tokens or progress settles with these arrays first.
"""

from collections.abc import Collection

import numpy as np

MAX_END_TOKENS = 8
"""A request with more of them never is in steady decode."""


class SteadyRows:
    """Of each request in *steady decode*, by row of the batch: all arrays are [max_num_seqs] and more.

    Such a request has all its tokens computed but the one sampled last, and its next output says no more than a token,
    unless that is an end token or the last that the length allows. What steps add to it is noted here and reaches the
    request when it is settled, at the latest when its last block is full.
    """

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self._block_size = block_size
        self._is_steady = np.zeros(max_num_seqs, dtype=bool)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._check_from = np.zeros(max_num_seqs, dtype=np.int64)  # tokens; before, only an end token ends it
        self._end_token_ids = np.full((max_num_seqs, MAX_END_TOKENS), -1, dtype=np.int64)
        self._clients = np.zeros(max_num_seqs, dtype=np.int64)
        self._handles = np.zeros(max_num_seqs, dtype=np.int64)
        # Since the request was settled: tokens sampled, and how many tokens were planned.
        self._sampled = np.zeros((max_num_seqs, block_size), dtype=np.int64)
        self._num_sampled = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_planned = np.zeros(max_num_seqs, dtype=np.int64)

    def enter(
        self, row: int, num_tokens: int, check_from: int, end_token_ids: Collection[int], client_index: int, handle: int
    ) -> None:
        """A request with so many tokens; from `check_from` on, more than an end token may end it."""
        self._num_tokens[row] = num_tokens
        self._check_from[row] = check_from
        self._end_token_ids[row] = -1
        if end_token_ids:
            self._end_token_ids[row, : len(end_token_ids)] = list(end_token_ids)
        self._clients[row] = client_index
        self._handles[row] = handle
        self._is_steady[row] = True

    def leave(self, row: int) -> None:
        """The request, settled, is one like any other."""
        self._is_steady[row] = False

    def settle(self, row: int) -> tuple[list[int], int]:
        """The tokens sampled since the last call, and how many were computed or planned."""
        num_sampled, num_planned = int(self._num_sampled[row]), int(self._num_planned[row])
        self._num_sampled[row] = self._num_planned[row] = 0
        return self._sampled[row, :num_sampled].tolist(), num_planned

    def undisturbed(self, rows: np.ndarray) -> np.ndarray:
        """Which of these requests need no more in a step than to be in it: no block ends or begins. [n] bool."""
        return self._is_steady[rows] & (self._num_tokens[rows] % self._block_size > 1)

    def plan(self, rows: np.ndarray) -> None:
        """A token of each of these requests counts as computed."""
        self._num_planned[rows] += 1

    def still_here(self, rows: np.ndarray) -> np.ndarray:
        """Those that have not left."""
        return rows[self._is_steady[rows]]

    def take_in(self, rows: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Add the tokens sampled by these rows where there is nothing more to it; where that is, [n] bool."""
        plain: np.ndarray = self._is_steady[rows]
        plain &= self._num_tokens[rows] + 1 < self._check_from[rows]
        plain &= (self._end_token_ids[rows] != token_ids[:, None]).all(axis=1)
        rows = rows[plain]
        num_sampled = self._num_sampled[rows]
        self._sampled[rows, num_sampled] = token_ids[plain]
        self._num_sampled[rows] = num_sampled + 1
        self._num_tokens[rows] += 1
        return plain

    def by_client(self, rows: np.ndarray, token_ids: np.ndarray) -> list[tuple[int, list[int], list[int]]]:
        """(client index, handles, token ids) of plain tokens."""
        clients, handles = self._clients[rows], self._handles[rows]
        if len(rows) and (clients == clients[0]).all():
            return [(int(clients[0]), handles.tolist(), token_ids.tolist())]
        # Not np.unique, which imports a module when it is first called: a core out of descriptors cannot.
        shares = [(client, clients == client) for client in sorted(set(clients.tolist()))]
        return [(client, handles[own].tolist(), token_ids[own].tolist()) for client, own in shares]
