"""How much memory is left: the host's, or what the tightest control group leaves."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from corespan.core.runtime import cpu_memory as memory
from corespan.shared import cgroups

HOST = 64 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where control groups are looked for, on a host with 64 GiB to spare; still without any."""
    monkeypatch.setattr(cgroups, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=HOST))
    return tmp_path


def write_group(folder: Path, **files: object) -> None:
    """memory_max="5" is a file `memory.max`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{text}\n")


def test_without_control_groups_the_host_s_memory_counts(groups: Path) -> None:
    assert memory.available_memory() == HOST
    (groups / "own").write_text("0::/../../elsewhere\n")
    assert memory.available_memory() == HOST


def test_the_tightest_group_around_the_process_counts(groups: Path) -> None:
    (groups / "own").write_text("0::/user.slice/run-4711.scope\n")
    scope = groups / "cgroup" / "user.slice" / "run-4711.scope"
    write_group(scope, memory_max=2 << 30, memory_current=1 << 30, memory_stat=f"anon 5\ninactive_file {1 << 20}")
    assert memory.available_memory() == (1 << 30) + (1 << 20)

    write_group(scope.parent, memory_max="max", memory_high=3 << 30, memory_current=(3 << 30) - 4096)
    assert memory.available_memory() == 4096

    write_group(scope.parent, memory_current=4 << 30)
    assert memory.available_memory() == 0


@pytest.mark.parametrize("seen_at", ["", "docker/4711"], ids=["in the container", "on the host"])
def test_groups_of_the_first_version_count_too(groups: Path, seen_at: str) -> None:
    (groups / "own").write_text("3:cpu,cpuacct:/docker/4711\n2:memory:/docker/4711\n")
    unlimited, folder = 9223372036854771712, groups / "cgroup" / "memory"
    write_group(folder, memory_limit_in_bytes=unlimited, memory_usage_in_bytes=5 << 30, memory_stat="cache 5")
    assert memory.available_memory() == HOST

    statistics = "inactive_file 0\ntotal_inactive_file 4096"
    write_group(folder / seen_at, memory_limit_in_bytes=2 << 30, memory_usage_in_bytes=1 << 30, memory_stat=statistics)
    assert memory.available_memory() == (1 << 30) + 4096
