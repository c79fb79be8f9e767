"""With `engine_restart`, a core that dies is replaced, and callers see a pause instead of an error."""

import contextlib
import os
import signal
import threading

import pytest
from bridge import DEADLINE, request, tokens_of
from fake_executor import KILL, RAISE, RAISE_LATER
from leftovers import Leftovers

from corespan.protocol.errors import EngineDeadError
from corespan.protocol.outputs import FinishReason


def restarting(make_mp_bridge, restarts=20, **options):
    return make_mp_bridge(parallel={"engine_restart": restarts}, **options)


def kill_core(bridge):
    (pid,) = bridge.call("collective_rpc", "pid")
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # the client has noticed, and reaped it, already
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_requests_go_on_with_the_tokens_they_would_have_had(make_mp_bridge):
    leftovers = Leftovers()
    bridge = restarting(make_mp_bridge)
    requests = [request(f"r{index}", range(1, 4 + index), 100 + index, seed=index) for index in range(8)]
    bridge.call("pause_scheduler", "keep", False)
    for new in requests:
        bridge.add(new)
    kill_core(bridge)
    assert bridge.call("is_scheduler_paused") is True
    assert list(bridge.call("get_request_counts")) == [0, 8]
    bridge.call("resume_scheduler")
    tokens, reasons = bridge.collect(*(new.request_id for new in requests))
    assert tokens == {new.request_id: tokens_of(new) for new in requests}
    assert set(reasons.values()) == {FinishReason.LENGTH}
    bridge.close()
    assert leftovers.found() == []


def test_many_kills_among_two_hundred_requests_show_in_no_token(make_mp_bridge):
    bridge = restarting(make_mp_bridge, max_num_seqs=16, step_seconds=0.001)
    num_kills = 20 if bridge.kind == "async_mp" else 4
    connection = bridge.client._connection
    requests = [request(f"r{index}", range(1, 3 + index % 30), 60 + index % 50, seed=index) for index in range(200)]
    for new in requests:
        bridge.add(new)
    tokens = {new.request_id: [] for new in requests}
    unfinished = set(tokens)
    kills, killed = 0, None
    while unfinished:
        num_from_core = 0
        core = connection.current
        while unfinished and connection.current is core:
            for output in bridge.get_output().outputs:
                tokens[output.request_id] += output.new_token_ids
                num_from_core += len(output.new_token_ids)
                if connection.num_held > 0:  # one is in quarantine, and would be given up if its core were killed
                    num_from_core = 0
                if output.finish_reason is not None:
                    assert output.finish_reason is FinishReason.LENGTH, output
                    unfinished.remove(output.request_id)
            if num_from_core > 200 and kills < num_kills and core is not killed:
                os.kill(core.process.ready.pid, signal.SIGKILL)
                kills, killed = kills + 1, core
    assert kills == num_kills
    assert tokens == {new.request_id: tokens_of(new) for new in requests}


@pytest.mark.parametrize("trigger", [KILL, RAISE, RAISE_LATER])
def test_a_request_that_kills_twice_is_given_up_and_the_others_finish(make_mp_bridge, trigger):
    bridge = restarting(make_mp_bridge)
    requests = [request(f"r{index}", max_tokens=50, seed=index) for index in range(5)]
    for new in [*requests[:3], request("killer", [1, trigger], max_tokens=50), *requests[3:]]:
        bridge.add(new)
    tokens, reasons = bridge.collect("killer", *(new.request_id for new in requests))
    assert reasons.pop("killer") is FinishReason.ERROR
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert {new.request_id: tokens[new.request_id] for new in requests} == {
        new.request_id: tokens_of(new) for new in requests
    }
    assert len(bridge.client._connection._restarts) == 2


def test_an_idle_core_that_dies_is_replaced_for_the_next_caller(make_mp_bridge):
    bridge = restarting(make_mp_bridge)
    kill_core(bridge)
    fine = request("fine")
    assert bridge.generate(fine)["fine"] == tokens_of(fine)
    kill_core(bridge)
    assert bridge.call("is_sleeping") is False
    assert not bridge.client.engine_dead


def test_a_call_the_core_died_in_fails_and_the_next_one_works(make_mp_bridge):
    bridge = restarting(make_mp_bridge)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        bridge.call("collective_rpc", "die")
    assert bridge.call("is_sleeping") is False


def test_an_aborted_request_does_not_come_back(make_mp_bridge):
    bridge = restarting(make_mp_bridge)
    bridge.call("pause_scheduler", "keep", False)
    kept = request("kept")
    bridge.add(kept)
    bridge.add(request("gone"))
    bridge.abort("gone")
    kill_core(bridge)
    bridge.call("resume_scheduler")
    tokens, _ = bridge.collect("kept")
    assert tokens == {"kept": tokens_of(kept)}
    assert list(bridge.call("get_request_counts")) == [0, 0]


def test_the_successor_of_a_core_that_slept_sleeps_as_it_did(make_mp_bridge):
    bridge = restarting(make_mp_bridge)
    bridge.call("sleep", 2, "abort")
    bridge.call("wake_up", ["kv_cache"])
    queued = request("queued")
    bridge.add(queued)
    kill_core(bridge)
    assert bridge.call("collective_rpc", "asleep") == [["weights"]]
    assert bridge.call("is_sleeping") is True
    assert list(bridge.call("get_request_counts")) == [0, 1]
    bridge.call("wake_up", None)
    assert bridge.call("is_sleeping") is False
    assert bridge.collect("queued")[0] == {"queued": tokens_of(queued)}
    kill_core(bridge)
    assert bridge.call("is_sleeping") is False


def test_the_successor_of_a_core_that_was_resumed_runs(make_mp_bridge):
    bridge = restarting(make_mp_bridge)
    bridge.call("pause_scheduler", "abort", True)
    bridge.call("resume_scheduler")
    with pytest.raises(ValueError):
        bridge.call("sleep", 7, "abort")
    kill_core(bridge)
    assert bridge.call("is_scheduler_paused") is False


def test_what_comes_while_the_last_allowed_core_starts_waits_for_it(make_mp_bridge, monkeypatch):
    bridge = restarting(make_mp_bridge, restarts=1)
    connection = bridge.client._connection
    start, starting, go = connection._start, threading.Event(), threading.Event()

    def start_when_told():
        starting.set()
        assert go.wait(DEADLINE)
        return start()

    monkeypatch.setattr(connection, "_start", start_when_told)
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(request("gone"))
    kill_core(bridge)
    answers = []
    caller = threading.Thread(target=lambda: answers.append(bridge.call("is_scheduler_paused")))
    caller.start()
    assert starting.wait(DEADLINE)
    assert not bridge.client.engine_dead
    late = request("late")
    bridge.add(late)
    bridge.abort("gone")
    go.set()
    caller.join(DEADLINE)
    assert answers == [True]
    assert list(bridge.call("get_request_counts")) == [0, 1]
    bridge.call("resume_scheduler")
    assert bridge.collect("late")[0] == {"late": tokens_of(late)}
    kill_core(bridge)
    with pytest.raises(EngineDeadError):
        bridge.call("is_sleeping")


def test_when_the_restarts_are_used_up_the_death_is_final(make_mp_bridge):
    bridge = restarting(make_mp_bridge, restarts=1)
    kill_core(bridge)
    assert bridge.call("is_sleeping") is False
    bridge.add(request("fatal", [1, RAISE]))
    with pytest.raises(EngineDeadError, match="told to raise"):
        bridge.collect("fatal")
    assert bridge.client.engine_dead
    with pytest.raises(EngineDeadError):
        bridge.add(request("late"))


@pytest.mark.parametrize("others_wait", [False, True])
def test_calls_of_a_dead_core_fail_at_once_and_not_when_the_next_is_up(make_mp_bridge, others_wait):
    bridge = restarting(make_mp_bridge)
    connection = bridge.client._connection
    start, may_start = connection._start, threading.Event()

    def start_when_allowed():
        assert may_start.wait(DEADLINE)
        return start()

    connection._start = start_when_allowed
    bridge.call("pause_scheduler", "keep", False)
    held = request("held")
    bridge.add(held)
    collected = []
    waiter = threading.Thread(target=lambda: collected.append(bridge.collect("held")[0]))
    if others_wait:
        waiter.start()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        bridge.call("collective_rpc", "die")
    assert not may_start.is_set()
    if not others_wait:
        waiter.start()
    may_start.set()
    bridge.call("resume_scheduler")
    waiter.join(DEADLINE)
    assert collected == [{"held": tokens_of(held)}]
