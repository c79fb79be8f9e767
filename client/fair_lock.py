"""A lock that serves callers in turn. The in-process client and the sync engines hold it through each call."""

import threading


class FairLock:
    """Reentrant. A thread that releases it and wants it again at once waits behind whoever is waiting already, so a
    loop of calls in one thread does not starve the others.
    """

    def __init__(self) -> None:
        self._next_in_line = threading.Lock()
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            self._lock.acquire()
        else:
            with self._next_in_line:
                self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
        self._lock.release()
