"""However a core falls silent while it starts, its client waits only so long, says that it waits, and ends it."""

import os
import tempfile

import pytest
from bridge import DEADLINE, FAKE_EXECUTOR, Bridge, fake_config
from leftovers import Leftovers

from corespan.client import make_async_client
from corespan.client.connection import ClientAddresses
from corespan.protocol.errors import ProtocolError
from corespan.protocol.sockets import TOKEN_BYTES

PRELUDE = """
import sys; sys.path[:] = sys.argv[3:]
import socket, time
from corespan.protocol.channel import Channel
from corespan.protocol.outputs import HandshakeHello, HandshakeReady
line = socket.socket(fileno=int(sys.argv[1]))
channel = Channel(line)
"""
HELLO = "channel.send(HandshakeHello())\n"
READY = "channel.receive(); channel.send(HandshakeReady(1, 256, 257, 16, 'float32'))\n"
STAY = "time.sleep(600)\n"
MP_CLIENTS = pytest.mark.parametrize("kind", ["sync_mp", "async_mp"])


@pytest.fixture
def core_does(monkeypatch):
    """Puts a program in the place of the core's."""
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "1")
    monkeypatch.setattr("corespan.client.connection.READY_WAIT", 0.5)
    return lambda program: monkeypatch.setattr("corespan.client.spawn._BOOTSTRAP", PRELUDE + program)


@MP_CLIENTS
@pytest.mark.parametrize(
    ("program", "options"),
    [
        (STAY, {}),
        (HELLO + STAY, {}),
        (HELLO + STAY, {"padding": "x" * (8 << 20)}),
        ("line.send(b'\\x10\\x00')\n" + STAY, {}),
        (HELLO + "channel.receive(); line.send(b'\\xff\\x00\\x00\\x00half')\n" + STAY, {}),
    ],
    ids=["mute", "hello only", "reads nothing", "half a length", "half a message"],
)
def test_a_core_that_falls_silent_is_given_up(kind, program, options, core_does):
    leftovers = Leftovers()
    core_does(program)
    with pytest.raises(TimeoutError, match="VLLM_ENGINE_READY_TIMEOUT_S"):
        Bridge(kind, **options)
    assert leftovers.found() == []


@MP_CLIENTS
@pytest.mark.parametrize(
    "program",
    [HELLO + HELLO + STAY, "line.send(b'\\x03\\x00\\x00\\x00abc')\n" + STAY, "line.send(b'\\xff' * 8)\n" + STAY],
    ids=["wrong message", "garbage", "endless message"],
)
def test_a_core_that_makes_no_sense_is_ended(kind, program, core_does, monkeypatch):
    leftovers = Leftovers()
    core_does(program)
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", str(DEADLINE))
    with pytest.raises(ProtocolError):
        Bridge(kind)
    assert leftovers.found() == []


@MP_CLIENTS
def test_a_core_that_does_not_connect_its_sockets_is_ended(kind, core_does, monkeypatch):
    leftovers = Leftovers()
    core_does(HELLO + READY + STAY)
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", str(DEADLINE))
    with pytest.raises(TimeoutError, match="did not connect"):
        Bridge(kind)
    assert leftovers.found() == []


def test_a_process_that_is_no_core_cannot_be_joined(core_does, socket_root):
    leftovers = Leftovers()
    with tempfile.TemporaryDirectory(dir=socket_root) as folder:  # its owner's, who removes it
        addresses = ClientAddresses(
            socket_dir=folder, output_token=bytes(TOKEN_BYTES), client_index=1, core_pid=os.getpid()
        )
        with pytest.raises(TimeoutError, match="did not connect"):
            make_async_client(fake_config(), FAKE_EXECUTOR, False, addresses, client_count=2, client_index=1)
    assert leftovers.found() == []


@MP_CLIENTS
def test_a_long_start_is_reported(kind, monkeypatch, caplog):
    monkeypatch.setattr("corespan.client.process.PROGRESS_INTERVAL", 0.01)
    with caplog.at_level("INFO", logger="corespan.client"):
        Bridge(kind).close()
    assert "The engine core has been starting for 0 s" in caplog.text
