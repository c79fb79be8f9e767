"""An engine that runs goes on where no further file can be opened, in the user's process or in the core's."""

import contextlib
import os
import resource
import signal
import socket

import pytest
from bridge import request, tokens_of
from fake_executor import HANG
from leftovers import Leftovers

from corespan.client.connection import ClientAddresses
from corespan.core.process_main import remove_socket_dir
from corespan.protocol.errors import EngineDeadError
from corespan.protocol.outputs import STACKS_FILE, HandshakeInit


@contextlib.contextmanager
def no_descriptor_left():
    """In this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def use_everything(bridge):
    """Requests side by side, one of them aborted, and calls."""
    requests = [request(f"r{index}", max_tokens=20, seed=index) for index in range(3)]
    bridge.call("pause_scheduler", "keep", False)
    for new in [*requests, request("aborted", max_tokens=200)]:
        bridge.add(new)
    bridge.abort("aborted")
    bridge.call("resume_scheduler")
    tokens, _ = bridge.collect(*(new.request_id for new in requests))
    assert tokens == {new.request_id: tokens_of(new) for new in requests}
    assert list(bridge.call("get_request_counts")) == [0, 0]


@pytest.mark.parametrize("core_address", [None, "tcp://127.0.0.1"], ids=["unix", "tcp"])
def test_a_program_out_of_descriptors_goes_on_with_its_engine(make_mp_bridge, core_address):
    leftovers = Leftovers()
    bridge = make_mp_bridge(parallel={"core_address": core_address})
    with no_descriptor_left():
        use_everything(bridge)
        bridge.client.shutdown()
        assert bridge.client.engine_dead
    assert leftovers.found() == []


def test_strangers_who_connect_then_over_tcp_change_nothing(make_mp_bridge):
    bridge = make_mp_bridge(parallel={"core_address": "tcp://127.0.0.1"})
    connection = bridge.client._connection
    ports = [int(ours.LAST_ENDPOINT.rpartition(b":")[2]) for ours in (connection._input, connection._output)]
    strangers = [socket.socket() for _ in range(20)]
    with no_descriptor_left():
        for index, stranger in enumerate(strangers):
            stranger.connect(("127.0.0.1", ports[index % 2]))
        use_everything(bridge)
    use_everything(bridge)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("engine_restart", [0, 1])
def test_a_core_that_dies_then_is_an_error_and_leaves_nothing(make_mp_bridge, engine_restart):
    """A new core cannot be started either."""
    leftovers = Leftovers()
    bridge = make_mp_bridge(parallel={"engine_restart": engine_restart})
    (pid,) = bridge.call("collective_rpc", "pid")
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(request("unfinished"))
    with no_descriptor_left():
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            bridge.get_output()
        bridge.client.shutdown()
    assert leftovers.found() == []


def test_a_core_that_does_not_leave_then_is_killed(make_mp_bridge, monkeypatch):
    monkeypatch.setattr("corespan.client.process.EXIT_GRACE", 0.2)
    leftovers = Leftovers()
    bridge = make_mp_bridge()
    bridge.add(request("hangs", [1, HANG]))
    with no_descriptor_left():
        bridge.client.shutdown()
    assert leftovers.found() == []


def test_a_core_out_of_descriptors_goes_on_and_leaves_in_order(make_mp_bridge):
    leftovers = Leftovers()
    bridge = make_mp_bridge()
    bridge.call("collective_rpc", "exhaust_file_descriptors")
    use_everything(bridge)
    bridge.client.shutdown()
    assert leftovers.found() == []


def test_a_core_out_of_descriptors_removes_its_socket_folder_when_the_program_is_gone(tmp_path):
    """Whatever becomes of the descriptors that its sockets give back meanwhile."""
    addresses = ClientAddresses(socket_dir=str(tmp_path / "sockets"), output_token=b"")
    clients = [addresses.of_client(index) for index in range(2)]
    init = HandshakeInit(
        config=b"",
        engine_index=0,
        socket_dir=addresses.socket_dir,
        output_token=b"",
        input_addresses=[client.input_address for client in clients],
        output_addresses=[client.output_address for client in clients],
        executor_class="",
        log_stats=False,
    )
    os.mkdir(addresses.socket_dir)
    bound = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    for ours, address in zip(bound, (*init.input_addresses, *init.output_addresses), strict=True):
        ours.bind(address.removeprefix("ipc://"))
        ours.close()
    (tmp_path / "sockets" / STACKS_FILE).write_bytes(b"")
    with no_descriptor_left():
        remove_socket_dir(init)
    assert not os.path.exists(addresses.socket_dir)
