"""Where the configuration asks for TCP, one address listens, everything is encrypted, and only the core gets in."""

import contextlib
import os
import threading
from collections.abc import Callable

import msgspec
import psutil
import pytest
import zmq
from bridge import FAKE_EXECUTOR, Bridge, fake_config, request, tokens_of
from fake_executor import KILL, RAISE
from leftovers import Leftovers
from zmq.utils.monitor import recv_monitor_message

from corespan.client import make_async_client, zap
from corespan.protocol.config import ParallelConfig
from corespan.protocol.errors import EngineDeadError
from corespan.protocol.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason
from corespan.protocol.sockets import OutputSeal, make_curve_keys

LOOPBACK = "tcp://127.0.0.1"
REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


@pytest.fixture
def keys_made(monkeypatch):
    """The keys of every engine, the shell's and the core's."""
    made = []

    def make_and_remember():
        made.append(make_curve_keys())
        return made[-1]

    monkeypatch.setattr(zap, "make_curve_keys", make_and_remember)
    return made


@pytest.fixture(params=["sync_mp", "async_mp"])
def bridge(request, keys_made):
    bridge = Bridge(request.param, parallel={"core_address": LOOPBACK})
    yield bridge
    bridge.close()


def listening(pid):
    return [c.laddr for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]


def core_pid(bridge):
    (pid,) = bridge.call("collective_rpc", "pid")
    return pid


def test_an_engine_over_tcp_gives_the_same_tokens_and_leaves_nothing(make_mp_bridge):
    leftovers = Leftovers()
    bridge = make_mp_bridge(parallel={"core_address": LOOPBACK})
    requests = [request(f"r{index}", max_tokens=20, seed=index) for index in range(20)]
    assert bridge.generate(*requests) == {new.request_id: tokens_of(new) for new in requests}
    (array,) = bridge.call("collective_rpc", "array", None, [100_000])
    assert array.tolist() == list(range(100_000))
    bridge.close()
    assert leftovers.found() == []


def test_exactly_the_configured_address_listens(make_mp_bridge):
    before = listening(os.getpid())
    bridge = make_mp_bridge(parallel={"core_address": "tcp://127.0.0.2"})
    opened = [address for address in listening(os.getpid()) if address not in before]
    assert [address.ip for address in opened] == ["127.0.0.2"] * 2
    assert listening(core_pid(bridge)) == []


def test_each_engine_has_keys_of_its_own(keys_made):
    for kind in ("sync_mp", "async_mp"):
        Bridge(kind, parallel={"core_address": LOOPBACK}).close()
    keys = [key for pair in keys_made for own in pair for key in (own.public_key, own.secret_key)]
    assert len(set(keys)) == len(keys) == 8


def no_keys(socket, shell):
    pass


def a_password(socket, shell):
    socket.plain_username, socket.plain_password = b"core", b"let me in"


def keys_of_its_own(socket, shell):
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey, _ = zmq.curve_keypair()


def keys_of_its_own_and_the_shells_public_key(socket, shell):
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = shell.public_key


def the_cores_public_key_without_the_secret_one(socket, shell):
    socket.curve_publickey, (_, socket.curve_secretkey) = shell.peer_key, zmq.curve_keypair()
    socket.curve_serverkey = shell.public_key


def connect_and_be_refused(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Returns once the other end has refused this socket; fails if it takes it."""
    monitor = socket.get_monitor_socket(REFUSALS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(address)
    assert monitor.poll(30_000)
    event = recv_monitor_message(monitor)["event"]
    socket.disable_monitor()
    assert event & REFUSALS


@pytest.mark.parametrize(
    "credentials",
    [
        no_keys,
        a_password,
        keys_of_its_own,
        keys_of_its_own_and_the_shells_public_key,
        the_cores_public_key_without_the_secret_one,
    ],
)
def test_a_peer_without_the_cores_keys_can_neither_send_nor_receive(
    bridge, keys_made, credentials: Callable[..., None]
):
    """Not even one that knows everything else."""
    ((shell, _),) = keys_made
    connection = bridge.client._connection
    context = zmq.Context()
    pusher, dealer = context.socket(zmq.PUSH), context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, b"somebody")
    for socket, shells_end in ((pusher, connection._output), (dealer, connection._input)):
        credentials(socket, shell)
        connect_and_be_refused(socket, shells_end.LAST_ENDPOINT.decode())
    seal = OutputSeal(connection.addresses.output_token)
    seal._count = 1 << 32
    forged = EngineCoreOutputs(outputs=[EngineCoreOutput("victim", [1], finish_reason=FinishReason.STOP)])
    victim = request("victim", max_tokens=20)
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(victim)
    for socket, frames in ((pusher, [seal.next(), msgspec.msgpack.encode(forged)]), (dealer, [b"\x00", b"garbage"])):
        with contextlib.suppress(zmq.Again):  # nobody takes them, and the queue ends somewhere
            for _ in range(10_000):
                socket.send_multipart(frames, zmq.NOBLOCK)
    bridge.call("resume_scheduler")
    assert bridge.collect("victim")[0]["victim"] == tokens_of(victim)
    assert not dealer.poll(0)
    context.destroy(linger=0)


def test_the_core_shows_neither_its_keys_nor_the_token(bridge, keys_made):
    ((shell, core),) = keys_made
    process = psutil.Process(core_pid(bridge))
    visible = " ".join([*process.cmdline(), *process.environ().values()]).encode(errors="surrogateescape")
    secrets = [shell.public_key, shell.secret_key, core.public_key, core.secret_key]
    assert [secret for secret in secrets if secret in visible] == []


def test_death_and_restart_are_as_over_unix_sockets(make_mp_bridge):
    leftovers = Leftovers()
    bridge = make_mp_bridge(parallel={"core_address": LOOPBACK})
    bridge.add(request("fatal", [1, RAISE]))
    with pytest.raises(EngineDeadError, match="told to raise in the step"):
        bridge.get_output()
    bridge.close()
    bridge = make_mp_bridge(parallel={"core_address": LOOPBACK, "engine_restart": 3})
    fine = request("fine", max_tokens=30)
    bridge.add(fine)
    bridge.add(request("fatal", [1, KILL]))
    tokens, reasons = bridge.collect("fine", "fatal")
    assert tokens["fine"] == tokens_of(fine)
    assert reasons["fatal"] is FinishReason.ERROR
    bridge.close()
    assert leftovers.found() == []


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0",
        "tcp://[::]",
        "tcp://[::ffff:0.0.0.0]",
        "tcp://255.255.255.255",
        "tcp://224.0.0.1",
        "tcp://*",
        "tcp://",
        "tcp://localhost",
        "tcp://eth0",
        "tcp://::1",
        "tcp://127.0.0.1:5555",
        "tcp://127.0.0.1;127.0.0.2",
        "127.0.0.1",
        "ipc:///tmp/x",
        "",
    ],
)
def test_an_address_that_is_not_one_interfaces_is_refused(address):
    with pytest.raises(ValueError, match="core_address is .* without a port"):
        ParallelConfig(core_address=address)


@pytest.mark.parametrize("kind", ["sync_mp", "async_mp"])
def test_an_address_of_another_machine_is_refused_before_any_start(kind):
    leftovers = Leftovers()
    with pytest.raises(ValueError, match="core_address is 'tcp://192.0.2.1'.*Cannot assign requested address"):
        Bridge(kind, parallel={"core_address": "tcp://192.0.2.1"})
    assert leftovers.found() == []


@pytest.mark.parametrize("kind", ["sync_mp", "async_mp"])
def test_without_encryption_there_is_no_tcp(kind, monkeypatch):
    leftovers = Leftovers()
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(ValueError, match="core_address is 'tcp://127.0.0.1'; this build of ZMQ has no encryption"):
        Bridge(kind, parallel={"core_address": LOOPBACK})
    assert leftovers.found() == []


@pytest.mark.parametrize("kind", ["sync_mp", "async_mp"])
def test_without_a_thread_for_the_authenticator_the_start_fails_at_once(kind, monkeypatch):
    leftovers = Leftovers()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Bridge(kind, parallel={"core_address": LOOPBACK})
    assert leftovers.found() == []


def test_several_clients_have_unix_sockets_only():
    config = fake_config(parallel={"core_address": LOOPBACK})
    with pytest.raises(ValueError, match="core_address is 'tcp://127.0.0.1'"):
        make_async_client(config, FAKE_EXECUTOR, False, client_count=2)
