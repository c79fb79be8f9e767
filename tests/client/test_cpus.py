"""How many cores a process may use: its affinity and every quota around it; and who decides about torch's threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import corespan
from corespan.client import cpus, spawn
from corespan.shared import cgroups

V1 = "3:cpu,cpuacct:{}\n2:memory:{}"
V2 = "0::{}"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of control groups, still without any, of a process that may run on 8 cores."""
    monkeypatch.setattr(cgroups, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def test_without_control_groups_the_affinity_counts(groups: Path) -> None:
    assert cpus.available_cores() == 8


@pytest.mark.parametrize(
    ("quota", "count"), [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("290000 100000", 2),
                         ("9900000 100000", 8)]
)  # fmt: skip
def test_a_quota_cuts_the_affinity_down(groups: Path, quota: str, count: int) -> None:
    write(groups / "own", V2.format("/"))
    write(groups / "cgroup" / "cpu.max", quota)
    assert cpus.available_cores() == count


def test_the_least_quota_around_the_process_counts(groups: Path) -> None:
    write(groups / "own", V2.format("/a.slice/b.service"))
    write(groups / "cgroup" / "a.slice" / "cpu.max", "300000 100000")
    write(groups / "cgroup" / "a.slice" / "b.service" / "cpu.max", "max 100000")
    assert cpus.available_cores() == 3


def test_groups_of_the_first_version_count_too(groups: Path) -> None:
    write(groups / "own", V1.format("/docker/4711", "/docker/4711"))
    write(groups / "cgroup" / "cpu" / "cpu.cfs_quota_us", "-1")
    write(groups / "cgroup" / "cpu" / "cpu.cfs_period_us", "100000")
    assert cpus.available_cores() == 8
    write(groups / "cgroup" / "cpu" / "cpu.cfs_quota_us", "400000")
    assert cpus.available_cores() == 4


NODES = {"0": "0-1,4-5", "1": "2-3,6-7", "2": ""}
PLACES = "{0,1,4,5},{2,3,6,7}"


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The memory nodes of a machine with two sockets and one node without processors."""
    monkeypatch.setattr(cpus, "_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name in ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    for node, processors in NODES.items():
        write(tmp_path / f"node{node}" / "cpulist", processors)
    return tmp_path


def test_threads_of_a_core_stay_on_their_memory_nodes(nodes: Path) -> None:
    environment = spawn.core_environment()
    assert (environment["OMP_PLACES"], environment["OMP_PROC_BIND"]) == (PLACES, "close")


def test_threads_are_left_alone_on_one_node_or_where_somebody_has_placed_them(
    nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert "OMP_PLACES" not in spawn.core_environment()
    monkeypatch.delenv("OMP_PROC_BIND")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4})
    assert not {"OMP_PLACES", "OMP_PROC_BIND"} & set(spawn.core_environment())


PROGRAM = """
from corespan.client import cpus
cpus.available_cores = lambda: 1
{before}
cpus.limit_threads()
from corespan.core.kernels import library
from corespan.core.lazy_torch import torch
count = library.num_threads() if library.is_available() else torch.get_num_threads()
print(count, torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("before", "variable", "threads"),
    [("", None, 1), ("import torch; torch.set_num_threads(3)", None, 3), ("", "2", 2)],
    ids=["undecided", "torch loaded before", "OMP_NUM_THREADS"],
)
def test_kernels_and_torch_get_the_cores_there_are_unless_somebody_decided(
    before: str, variable: str | None, threads: int
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(corespan.__file__).parent.parent), *filter(None, sys.path)])
    if variable is not None:
        environment["OMP_NUM_THREADS"] = variable
    program = [sys.executable, "-c", PROGRAM.format(before=before)]
    finished = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert finished.stdout.split() == [str(threads)] * 2
