"""An interpreter that is started ahead of its engine: taken by that, and gone where no engine comes."""

import os

import pytest

from corespan.client import spawn


def is_running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def ahead() -> spawn.Interpreter:
    assert spawn._ahead is not None
    return spawn._ahead


def test_an_interpreter_that_was_started_ahead_is_taken_by_the_next_core_alone() -> None:
    with spawn.core_ahead():
        waiting = ahead()
        with spawn.core_ahead():
            assert ahead() is waiting
        first, second = spawn.start_core(), spawn.start_core()
        assert first is waiting and second is not waiting
    assert is_running(first.process.pid)
    first.discard()
    second.discard()


def test_one_that_nobody_takes_ends_with_the_error_that_no_engine_came_of() -> None:
    with pytest.raises(ValueError, match="no such model"), spawn.core_ahead():
        pid = ahead().process.pid
        raise ValueError("no such model")
    assert spawn._ahead is None and not is_running(pid)


def test_one_of_another_environment_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with spawn.core_ahead():
        waiting = ahead()
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        taken = spawn.start_core()
    assert taken is not waiting and not is_running(waiting.process.pid)
    taken.discard()


def test_in_process_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with spawn.core_ahead():
        assert spawn._ahead is None
