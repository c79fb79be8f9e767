"""Where the cache is: models and what was worked out of them, by the shell; packed weights, by the core."""

import os
from pathlib import Path

from ..protocol import envs


class CacheNotWritableError(OSError):
    """Nothing can be kept in the cache; the message says why."""


def cache_dir() -> Path:
    """`$CORESPAN_CACHE`, or `~/.cache/corespan`. It need not exist yet.

    Raises CacheNotWritableError where there is no home folder.
    """
    if configured := envs.CORESPAN_CACHE:
        return Path(os.path.expanduser(configured))
    home = os.path.expanduser("~")
    if home == "~":
        raise CacheNotWritableError(
            f"there is no home folder for it (HOME is not set, and user {os.getuid()} has no passwd entry)"
        )
    return Path(home) / ".cache" / "corespan"
