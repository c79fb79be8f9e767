"""How often and how soon a dead core is replaced, shown with connections to no core at all."""

import threading

import pytest
from bridge import fake_config, request

from corespan.client import restart as module
from corespan.client.restart import RestartingConnection
from corespan.protocol.errors import EngineDeadError
from corespan.protocol.outputs import EngineCoreOutput, EngineCoreOutputs


class FakeConnection:
    """To a core that is dead when it is told so."""

    was_killed = False
    released = False
    is_fork = False
    descriptors = ()

    def __init__(self):
        self.dead = self.drained = self.closed = False
        self.outputs = []

    def dead_error(self):
        return EngineDeadError("killed")

    def add(self, request):
        pass

    def wait(self):
        pass

    def receive_nowait(self):
        return self.outputs.pop() if self.outputs else None

    def stop(self, drain_timeout):
        self.dead = self.drained = True

    def release(self):
        self.released = True

    def close(self):
        self.closed = True


class FakeCores:
    """Starts cores that cannot be told from real ones, unless told to fail."""

    def __init__(self):
        self.connections = []
        self.fails = False

    def __call__(self):
        if self.fails:
            raise RuntimeError("no core today")
        self.connections.append(FakeConnection())
        return self.connections[-1]


@pytest.fixture
def clock(monkeypatch):
    """The connection's clock, which only a test moves."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def delays(monkeypatch):
    """The waits before restarts, none of which is waited for."""
    delays = []

    class Event(threading.Event):
        def wait(self, timeout=None):
            if timeout is None:  # for a thread that starts
                return super().wait()
            delays.append(timeout)
            return self.is_set()

    monkeypatch.setattr(module.threading, "Event", Event)
    return delays


def kill(connection):
    """And waits until its successor is there, or it is clear that there is none."""
    dead = connection.current
    dead.dead = dead.drained = True
    while connection.current is dead and not connection.drained:
        assert connection.receive_nowait() is None
        connection.wait()


def progress(connection):
    connection.current.outputs.append(EngineCoreOutputs(outputs=[EngineCoreOutput("any", [1])]))
    assert connection.receive_nowait() is not None


def test_restarts_without_progress_between_them_are_delayed_more_and_more(clock, delays):
    connection = RestartingConnection(FakeCores(), fake_config(), 20)
    for _ in range(9):
        kill(connection)
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    progress(connection)
    kill(connection)
    assert delays[-1] == 0.0


def test_restarts_count_only_for_so_long(clock, delays):
    connection = RestartingConnection(FakeCores(), fake_config(), 2)
    kill(connection)
    clock.now += module.RESTART_WINDOW / 2
    kill(connection)
    assert not connection.dead
    clock.now += module.RESTART_WINDOW / 2 + 1
    kill(connection)
    assert not connection.dead
    kill(connection)
    assert connection.dead and connection.drained


def test_a_core_that_does_not_start_costs_a_restart(clock, delays):
    cores = FakeCores()
    connection = RestartingConnection(cores, fake_config(), 3)
    cores.fails = True
    kill(connection)
    assert delays == [0.0, 0.5, 1.0]
    assert connection.dead
    with pytest.raises(EngineDeadError):
        connection.add(request("late"))


def test_a_core_that_comes_up_after_the_end_is_closed_at_once(clock, delays):
    cores = FakeCores()
    connection = RestartingConnection(
        lambda: (cores.connections and connection.stop(0.0), cores())[1], fake_config(), 3
    )
    kill(connection)
    for thread in threading.enumerate():
        if thread.name == "core-restart":
            thread.join()
    assert [each.closed for each in cores.connections] == [False, True]


def test_nothing_is_restarted_after_the_end(clock, delays):
    connection = RestartingConnection(FakeCores(), fake_config(), 3)
    connection.stop(0.0)
    kill(connection)
    assert connection.dead and delays == []
