"""When the core dies, everybody who waits learns of it at once, with the cause, and nothing is left behind."""

import contextlib
import os
import signal
import threading

import pytest
from bridge import DEADLINE, request, tokens_of
from fake_executor import EXIT, FAIL_REQUEST, HANG, KILL, RAISE, SEGFAULT
from leftovers import Leftovers

from corespan.protocol.errors import EngineDeadError
from corespan.protocol.outputs import FinishReason


@pytest.fixture
def leftovers():
    return Leftovers()


def core_pid(bridge):
    (pid,) = bridge.call("collective_rpc", "pid")
    return pid


@pytest.mark.parametrize(
    ("trigger", "cause"),
    [
        (RAISE, "told to raise in the step"),
        (EXIT, "exited with code 3"),
        (KILL, "SIGKILL"),
        (SEGFAULT, "SIGSEGV"),
    ],
)
def test_death_in_a_step_reaches_the_waiter_with_its_cause(make_mp_bridge, leftovers, trigger, cause):
    bridge = make_mp_bridge()
    bridge.add(request("fatal", [1, trigger]))
    with pytest.raises(EngineDeadError, match=cause):
        bridge.get_output()
    assert bridge.client.engine_dead
    with pytest.raises(EngineDeadError, match=cause):
        bridge.add(request("late"))
    with pytest.raises(EngineDeadError, match=cause):
        bridge.call("is_sleeping")
    bridge.abort("fatal")
    assert leftovers.found() == []


def test_a_segfault_leaves_the_stack_of_where_it_happened(make_mp_bridge):
    bridge = make_mp_bridge()
    bridge.add(request("fatal", [1, SEGFAULT]))
    with pytest.raises(EngineDeadError, match="execute_model"):
        bridge.get_output()


def test_a_failing_step_is_an_engine_death_in_process_too(make_bridge):
    bridge = make_bridge()
    bridge.add(request("fatal", [1, RAISE]))
    with pytest.raises(EngineDeadError, match="told to raise in the step"):
        bridge.get_output()
    with pytest.raises(EngineDeadError, match="told to raise in the step"):
        bridge.add(request("late"))


def test_a_core_killed_while_idle_wakes_a_blocked_waiter(make_mp_bridge, leftovers):
    bridge = make_mp_bridge()
    pid = core_pid(bridge)
    errors = []
    waiting = threading.Event()

    def wait():
        waiting.set()
        try:
            bridge.get_output()
        except EngineDeadError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiting.wait(DEADLINE)
    os.kill(pid, signal.SIGKILL)
    waiter.join(DEADLINE)
    assert "SIGKILL" in str(errors[0])
    assert leftovers.found() == []


def test_a_death_nobody_waits_for_is_noticed_at_the_next_call(make_mp_bridge):
    bridge = make_mp_bridge()
    pid = core_pid(bridge)
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # the client has noticed, and reaped it, already
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert bridge.client.engine_dead
    assert "SIGKILL" in str(bridge.client.dead_error())
    with pytest.raises(EngineDeadError):
        bridge.add(request("late"))


def test_death_in_a_utility_call_fails_that_call(make_mp_bridge):
    bridge = make_mp_bridge()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        bridge.call("collective_rpc", "die")


def test_outputs_sent_before_the_death_still_arrive(make_mp_bridge):
    bridge = make_mp_bridge()
    fine = request("fine", max_tokens=3)
    bridge.add(fine)
    assert bridge.collect("fine")[0] == {"fine": tokens_of(fine)}
    bridge.add(request("fatal", [1, RAISE]))
    with pytest.raises(EngineDeadError, match="told to raise"):
        bridge.collect("fatal")


def test_a_request_that_fails_in_the_runner_fails_alone(make_bridge):
    bridge = make_bridge()
    neighbour = request("neighbour", max_tokens=8)
    bridge.add(neighbour)
    bridge.add(request("poisoned", [1, FAIL_REQUEST]))
    tokens, reasons = bridge.collect("neighbour", "poisoned")
    assert reasons["poisoned"] is FinishReason.ERROR
    assert tokens["neighbour"] == tokens_of(neighbour)


def test_a_step_that_hangs_beyond_its_limit_ends_the_core_and_says_where(make_mp_bridge):
    bridge = make_mp_bridge(parallel={"step_timeout": 1.0})
    fine = request("fine")
    assert bridge.generate(fine)["fine"] == tokens_of(fine)
    bridge.add(request("hangs", [1, HANG]))
    with pytest.raises(EngineDeadError, match="in obey"):
        bridge.collect("hangs")


def test_sigterm_to_the_core_alone_ends_requests_in_order(make_mp_bridge, leftovers):
    bridge = make_mp_bridge()
    pid = core_pid(bridge)
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(request("long"))
    assert list(bridge.call("get_request_counts")) == [0, 1]
    os.kill(pid, signal.SIGTERM)
    assert bridge.collect("long")[1] == {"long": FinishReason.ABORT}
    with pytest.raises(EngineDeadError, match="told to leave"):
        bridge.get_output()
    assert leftovers.found() == []


def test_sigterm_to_the_core_alone_leaves_requests_the_time_configured(make_mp_bridge):
    bridge = make_mp_bridge(step_seconds=0.001, parallel={"shutdown_timeout": DEADLINE})
    pid = core_pid(bridge)
    long = request("long", max_tokens=200)
    bridge.add(long)
    bridge.call("is_sleeping")  # so that it is there
    os.kill(pid, signal.SIGTERM)
    assert bridge.collect("long") == ({"long": tokens_of(long)}, {"long": FinishReason.LENGTH})
    with pytest.raises(EngineDeadError, match="told to leave"):
        while True:
            assert bridge.get_output().outputs == []


def test_sigterm_that_is_repeated_does_not_begin_the_drain_anew(make_mp_bridge):
    bridge = make_mp_bridge(step_seconds=0.02, max_model_len=10_000, parallel={"shutdown_timeout": 0.2})
    pid = core_pid(bridge)
    bridge.add(request("long", max_tokens=9_000))  # for minutes
    bridge.call("is_sleeping")  # so that it is there
    ended = threading.Event()

    def terminate_again_and_again():
        with contextlib.suppress(ProcessLookupError):
            while not ended.wait(0.01):
                os.kill(pid, signal.SIGTERM)

    terminator = threading.Thread(target=terminate_again_and_again)
    terminator.start()
    assert bridge.collect("long")[1] == {"long": FinishReason.ABORT}
    ended.set()
    terminator.join(DEADLINE)


@pytest.fixture
def ignored_sigchld():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("system_tells", [True, False])
@pytest.mark.parametrize("trigger", [EXIT, KILL, signal.SIGRTMIN + 1])
def test_the_cause_is_told_rightly_where_the_program_ignores_its_children(
    make_mp_bridge, ignored_sigchld, monkeypatch, leftovers, trigger, system_tells
):
    """The system keeps an exit status for whoever asks later only since Linux 6.15."""
    if not system_tells:
        monkeypatch.setattr("corespan.client.child._PIDFD_GET_INFO", 0)
    bridge = make_mp_bridge()
    if trigger in (EXIT, KILL):
        bridge.add(request("fatal", [1, trigger]))
    else:
        os.kill(core_pid(bridge), trigger)
    with pytest.raises(EngineDeadError) as caught:
        bridge.get_output()
    known = {EXIT: "exited with code 3", KILL: "SIGKILL"}.get(trigger, f"signal {int(trigger)}")
    assert known in str(caught.value) or "took its exit status" in str(caught.value)
    if not system_tells:
        assert "took its exit status" in str(caught.value)
    assert leftovers.found() == []


def test_a_program_that_ignores_its_children_ends_its_engine_in_order(make_mp_bridge, ignored_sigchld, leftovers):
    bridge = make_mp_bridge()
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(request("held"))
    bridge.client.shutdown()
    assert bridge.collect("held")[1] == {"held": FinishReason.ABORT}
    with pytest.raises(EngineDeadError, match="shut down"):
        bridge.get_output()
    assert leftovers.found() == []


def test_every_call_that_is_pending_at_the_death_fails(make_mp_bridge):
    bridge = make_mp_bridge()
    pid = core_pid(bridge)
    assert bridge.call("is_sleeping") is False
    bridge.add(request("hangs", [1, HANG]))
    errors, begun = [], threading.Barrier(7)

    def call():
        begun.wait(DEADLINE)
        with pytest.raises(EngineDeadError, match="SIGKILL") as caught:
            bridge.call("is_sleeping")
        errors.append(caught.value)

    callers = [threading.Thread(target=call) for _ in range(6)]
    for caller in callers:
        caller.start()
    begun.wait(DEADLINE)
    os.kill(pid, signal.SIGKILL)
    for caller in callers:
        caller.join(DEADLINE)
    assert len(errors) == 6


def test_several_engines_live_and_die_apart(make_mp_bridge):
    first, second = make_mp_bridge(), make_mp_bridge()
    first.add(request("fatal", [1, KILL]))
    with pytest.raises(EngineDeadError):
        first.get_output()
    fine = request("fine")
    assert second.generate(fine)["fine"] == tokens_of(fine)
