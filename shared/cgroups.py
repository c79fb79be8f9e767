"""Where this process's control groups lie, of either version: what may limit its cores and its memory."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

OWN_GROUPS = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def own_groups(controller: str) -> Iterator[Path]:
    """The folders of the groups that may set a limit of `controller` ("cpu", "memory"): the process's own and all
    around it, the innermost first. Some may not exist: within a container the outer groups are out of sight.
    """
    for line in read(OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        own = PurePosixPath(path.lstrip("/"))
        if not controllers:  # version 2: one tree for all
            yield from (ROOT / group for group in (own, *own.parents))
        elif controller in controllers.split(","):
            yield from (ROOT / controller / group for group in (own, *own.parents))


def read(file: Path) -> str:
    """A file's text; empty where there is none."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
