"""The core's process from within: its threads, its idleness, its shutdown."""

import os

import psutil
import pytest
from bridge import Bridge, request, tokens_of

from corespan.protocol.errors import EngineDeadError


@pytest.fixture
def bridge(real_cores):
    bridge = Bridge("sync_mp")
    yield bridge
    bridge.close()


def test_the_death_of_the_input_thread_is_the_core_s(bridge):
    bridge.call("collective_rpc", "break_thread", None, ["core-input", "_intake"])
    with pytest.raises(EngineDeadError, match="the input thread failed"):
        bridge.call("is_sleeping")


def test_the_death_of_the_output_thread_is_the_core_s(bridge):
    with pytest.raises(EngineDeadError, match="the output thread failed"):
        bridge.call("collective_rpc", "break_thread", None, ["core-output", "_encoder"])


def test_an_idle_core_sleeps(bridge):
    """No thread of it runs, and none wakes up by itself: the kernel counts no switch while nobody speaks to it."""
    bridge.generate(request("warm"))
    (pid,) = bridge.call("collective_rpc", "pid")
    threads = [psutil.Process(thread.id) for thread in psutil.Process(pid).threads()]
    while any(thread.status() != psutil.STATUS_SLEEPING for thread in threads):
        os.sched_yield()
    before = [thread.num_ctx_switches() for thread in threads]
    psutil.cpu_percent(interval=0.5)
    assert [thread.num_ctx_switches() for thread in threads] == before


def test_a_request_that_comes_during_shutdown_is_aborted(bridge):
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(request("first"))
    assert not bridge.client._connection.dead
    bridge.client.shutdown()
    _, reasons = bridge.collect("first")
    assert str(reasons["first"]) == "abort"


def test_the_core_has_no_torch_unless_its_executor_wants_it(bridge):
    (modules,) = bridge.call("collective_rpc", "modules")
    assert "torch" not in modules
    fine = request("fine")
    assert bridge.generate(fine)["fine"] == tokens_of(fine)
