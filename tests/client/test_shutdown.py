"""Shutting down: in order, in time, once."""

import threading

import pytest
from bridge import DEADLINE, request, tokens_of
from fake_executor import HANG
from leftovers import Leftovers

from corespan.protocol.errors import EngineDeadError
from corespan.protocol.outputs import FinishReason


def test_a_shutdown_leaves_nothing_and_may_be_repeated(make_bridge):
    leftovers = Leftovers()
    bridge = make_bridge()
    bridge.generate(request("fine"))
    bridge.close()
    bridge.close()
    assert bridge.client.engine_dead
    assert leftovers.found() == []
    with pytest.raises(EngineDeadError, match="shut down"):
        bridge.client.call_utility("is_sleeping") if bridge.kind == "inproc" else bridge.client._connection.add(
            request("late")
        )


@pytest.mark.parametrize("timeout", [DEADLINE, 0.0])
def test_a_shutdown_drains_what_is_in_flight_or_aborts_it(make_mp_bridge, timeout):
    bridge = make_mp_bridge(step_seconds=0.001)
    if not timeout:  # else it may be done before
        bridge.call("pause_scheduler", "keep", False)
    long = request("long", max_tokens=200)
    bridge.add(long)
    bridge.client.shutdown(timeout)
    tokens, reasons = bridge.collect("long")
    if timeout:
        assert tokens["long"] == tokens_of(long)
        assert reasons["long"] is FinishReason.LENGTH
    else:
        assert reasons["long"] is FinishReason.ABORT
    with pytest.raises(EngineDeadError, match="shut down"):
        while True:
            assert bridge.get_output().outputs == []


def test_nothing_is_waited_for_behind_the_last_message_of_a_core(make_mp_bridge, monkeypatch):
    connection = make_mp_bridge().client._connection
    at_its_end = []

    def noting(seconds):
        at_its_end.append(connection.drained)
        return 0

    monkeypatch.setattr("corespan.client.connection._milliseconds", noting)
    connection.stop(0.0)
    assert connection.drained and not any(at_its_end)


def test_without_a_timeout_the_configured_one_holds(make_mp_bridge):
    bridge = make_mp_bridge(step_seconds=0.001, parallel={"shutdown_timeout": DEADLINE})
    long = request("long", max_tokens=200)
    bridge.add(long)
    bridge.client.shutdown()
    assert bridge.collect("long") == ({"long": tokens_of(long)}, {"long": FinishReason.LENGTH})


def test_a_timeout_that_is_none_is_refused_and_the_engine_lives_until_it_is_shut_down_rightly(make_bridge):
    leftovers = Leftovers()
    bridge = make_bridge()
    for wrong in ("5", -1, float("nan"), float("inf"), [1], True):
        with pytest.raises(ValueError, match="^timeout must be a number of seconds .*, got "):
            bridge.client.shutdown(wrong)
    fine = request("fine")
    assert bridge.generate(fine)["fine"] == tokens_of(fine)
    bridge.close()
    assert leftovers.found() == []


def test_a_shutdown_wakes_a_thread_that_waits(make_mp_bridge):
    bridge = make_mp_bridge()
    bridge.call("is_sleeping")
    errors = []

    def wait():
        try:
            bridge.get_output()
        except EngineDeadError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    bridge.client.shutdown()
    waiter.join(DEADLINE)
    assert "shut down" in str(errors[0])


def test_threads_share_a_sync_client(make_bridge):
    """One waits for outputs while others call: every answer reaches its caller."""
    bridge = make_bridge()
    if bridge.kind == "inproc":
        pytest.skip("a core in process belongs to one thread")
    new = request("long", max_tokens=200)
    collected = []
    waiter = threading.Thread(target=lambda: collected.append(bridge.collect("long")))
    waiter.start()
    answers = {}

    def call(index):
        answers[index] = [bridge.call("collective_rpc", "echo", None, [index, turn]) for turn in range(20)]

    callers = [threading.Thread(target=call, args=(index,)) for index in range(6)]
    for caller in callers:
        caller.start()
    bridge.add(new)
    for thread in [*callers, waiter]:
        thread.join(DEADLINE)
    assert collected[0][0]["long"] == tokens_of(new)
    assert answers == {index: [[[index, turn]] for turn in range(20)] for index in range(6)}


def test_a_core_that_does_not_leave_is_killed(make_mp_bridge, monkeypatch):
    leftovers = Leftovers()
    monkeypatch.setattr("corespan.client.process.EXIT_GRACE", 0.2)
    bridge = make_mp_bridge()
    bridge.call("is_sleeping")
    bridge.add(request("hangs", [1, HANG]))
    bridge.client.shutdown()
    assert leftovers.found() == []
