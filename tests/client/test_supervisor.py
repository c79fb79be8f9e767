"""How often and how soon a dead core is replaced, shown with links to no core at all."""

import threading

import pytest
from bridge import fake_config, request

from corespan.client import supervisor as module
from corespan.client.supervisor import Supervisor
from corespan.protocol.errors import EngineDeadError
from corespan.protocol.outputs import EngineCoreOutput, EngineCoreOutputs


class FakeLink:
    """A core that is dead when `dead_cause` says so."""

    def __init__(self):
        self.dead_cause = None
        self.was_killed = False
        self.closed = False

    def check_death(self):
        return self.dead_cause is not None

    def dead_error(self):
        return EngineDeadError(self.dead_cause)

    def send(self, request_type, message):
        pass

    def stop(self, drain_timeout):
        return []

    def release(self):
        pass

    def close(self):
        self.closed = True


class FakeCores:
    """Starts cores that cannot be told from real ones, unless told to fail."""

    def __init__(self):
        self.links = []
        self.fails = False

    def __call__(self):
        if self.fails:
            raise RuntimeError("no core today")
        self.links.append(FakeLink())
        return self.links[-1]


@pytest.fixture
def clock(monkeypatch):
    """The supervisor's clock, which only a test moves."""

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
            delays.append(timeout)
            return self.is_set()

    monkeypatch.setattr(module.threading, "Event", Event)
    return delays


def kill(supervisor):
    supervisor.link.dead_cause = "killed"
    supervisor.revive()


def progress(supervisor):
    supervisor.record(EngineCoreOutputs(outputs=[EngineCoreOutput("any", [1])]))


def test_restarts_without_progress_between_them_are_delayed_more_and_more(clock, delays):
    supervisor = Supervisor(FakeCores(), fake_config(), 20)
    for _ in range(9):
        kill(supervisor)
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    progress(supervisor)
    kill(supervisor)
    assert delays[-1] == 0.0


def test_restarts_count_only_for_so_long(clock, delays):
    supervisor = Supervisor(FakeCores(), fake_config(), 2)
    kill(supervisor)
    clock.now += module.RESTART_WINDOW / 2
    kill(supervisor)
    assert not supervisor.may_restart
    clock.now += module.RESTART_WINDOW / 2 + 1
    kill(supervisor)
    with pytest.raises(EngineDeadError):
        kill(supervisor)
    assert supervisor.dead


def test_a_core_that_does_not_start_costs_a_restart(clock, delays):
    cores = FakeCores()
    supervisor = Supervisor(cores, fake_config(), 3)
    cores.fails = True
    with pytest.raises(EngineDeadError, match="killed"):
        kill(supervisor)
    assert delays == [0.0, 0.5, 1.0]
    assert supervisor.dead
    with pytest.raises(EngineDeadError):
        supervisor.add(request("late"))


def test_a_core_that_comes_up_after_the_end_is_closed_at_once(clock, delays):
    cores = FakeCores()
    supervisor = Supervisor(lambda: (cores.links and supervisor.stop(0.0), cores())[1], fake_config(), 3)
    kill(supervisor)
    assert [link.closed for link in cores.links] == [False, True]


def test_nothing_is_restarted_after_the_end(clock, delays):
    supervisor = Supervisor(FakeCores(), fake_config(), 3)
    supervisor.stop(0.0)
    with pytest.raises(EngineDeadError):
        kill(supervisor)
    assert supervisor.dead
