"""What strangers put on the sockets is logged and dropped: nothing is executed, nobody's request is touched."""

import contextlib
import glob
import os
import pickle
import stat

import msgspec
import psutil
import pytest
import zmq
from bridge import DEADLINE, Bridge, request, tokens_of
from zmtp import connect_raw, frame

from corespan.client import connection as connection_module
from corespan.protocol.codec import EXT_ARRAY, EXT_FUNCTION, MsgpackEncoder
from corespan.protocol.outputs import (
    ENGINE_CORE_DEAD,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    HandshakeReady,
)
from corespan.protocol.requests import EngineCoreRequestType
from corespan.protocol.sockets import TOKEN_BYTES


class Marker:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mknod, (self.path,))


@pytest.fixture(params=["sync_mp", "async_mp"])
def bridge(request, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    bridge = Bridge(request.param)
    yield bridge
    bridge.close()


@pytest.fixture
def socket_dir(bridge, tmp_path):
    (found,) = glob.glob(f"{tmp_path}/corespan-*")
    return found


@pytest.fixture
def send_as_stranger(socket_dir):
    """Sends frames to the client's output socket, and returns once they are on their way."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{socket_dir}/output-0")
    yield socket.send_multipart
    context.destroy(linger=0)


def hostile_frames(marker):
    payload = pickle.dumps(Marker(marker))
    encode = msgspec.msgpack.encode
    forged = EngineCoreOutputs(outputs=[EngineCoreOutput("victim", [1], finish_reason=FinishReason.STOP)])
    (genuine_looking,) = MsgpackEncoder().encode(forged)
    seal = bytes(TOKEN_BYTES + 8)
    return [
        [b""],
        [b"\xff" * 10],
        [payload],
        [seal, payload],
        [encode(msgspec.msgpack.Ext(EXT_FUNCTION, payload))],
        [seal, encode(msgspec.msgpack.Ext(EXT_FUNCTION, payload))],
        [seal, encode([0, [], None, 0.0, [1, None, msgspec.msgpack.Ext(EXT_FUNCTION, payload)]])],
        [seal, encode([0, [], None, 0.0, [1, None, msgspec.msgpack.Ext(EXT_ARRAY, payload)]])],
        [ENGINE_CORE_DEAD, b"not at all"],
        [seal, ENGINE_CORE_DEAD, b"not at all"],
        [genuine_looking],
        [seal, genuine_looking],
        [seal, genuine_looking[:-3]],
        [seal, genuine_looking, b"one frame too many"],
        [seal[:-1], genuine_looking],
        [seal],
    ]


def test_forged_outputs_are_dropped_and_nothing_is_unpickled(bridge, send_as_stranger, tmp_path):
    marker = tmp_path / "marker"
    victim = request("victim", max_tokens=20)
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(victim)
    for frames in hostile_frames(marker):
        send_as_stranger(frames)
    bridge.call("resume_scheduler")
    assert bridge.collect("victim")[0]["victim"] == tokens_of(victim)
    assert bridge.generate(request("next"))["next"] == tokens_of(request("next"))
    assert not marker.exists()
    assert not bridge.client.engine_dead


def test_a_message_sent_again_is_dropped(bridge, socket_dir, send_as_stranger):
    """Seen on the wire or not: the same bytes count once."""
    connection = bridge.client._connection
    replayed = []
    check = connection._seal.check

    def remember(frames):
        replayed.append([bytes(frame) for frame in frames])
        return check(frames)

    connection._seal.check = remember
    first = request("first")
    bridge.add(first)
    assert bridge.collect("first")[0]["first"] == tokens_of(first)
    again = request("first", max_tokens=9)
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(again)
    for frames in list(replayed):
        send_as_stranger(frames)
    bridge.call("resume_scheduler")
    assert bridge.collect("first")[0]["first"] == tokens_of(again)


def test_a_stranger_on_the_request_socket_changes_nothing(bridge, socket_dir):
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, bridge.client._connection._core_identity)  # should it ever learn it
    stranger.connect(f"ipc://{socket_dir}/input-0")
    for _ in range(100):
        stranger.send_multipart([b"\x00", b"garbage"])
    fine = request("fine")
    assert bridge.generate(fine)["fine"] == tokens_of(fine)
    assert not stranger.poll(0)
    context.destroy(linger=0)


@pytest.mark.parametrize("kind", ["sync_mp", "async_mp"])
def test_a_stranger_who_is_there_before_the_core_is_not_taken_for_it(kind, monkeypatch):
    context = zmq.Context()
    forged = HandshakeReady(pid=1, max_model_len=7, num_gpu_blocks=7, block_size=7, dtype="float32")
    genuine = connection_module.CoreProcess

    def start_behind_a_stranger(init):
        for name in (b"\x00\x00", b"\x00\x00" + bytes(TOKEN_BYTES)):
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, name)
            dealer.connect(init.input_addresses[0])
            dealer.send(msgspec.msgpack.encode(forged))
            dealer.send(b"garbage")
        pusher = context.socket(zmq.PUSH)
        pusher.connect(init.output_addresses[0])
        pusher.send_multipart([bytes(TOKEN_BYTES + 8), b"garbage"])
        return genuine(init)

    monkeypatch.setattr(connection_module, "CoreProcess", start_behind_a_stranger)
    bridge = Bridge(kind, num_gpu_blocks_override=20)
    assert bridge.client.vllm_config.cache_config.num_gpu_blocks == 20
    fine = request("fine")
    assert bridge.generate(fine)["fine"] == tokens_of(fine)
    bridge.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("socket_type", [b"PUB", b"SUB", b"PULL", b"PAIR", b"XPUB", b"nonsense", b""])
def test_sockets_of_other_types_are_cut_off(shared_bridge, socket_type):
    addresses = shared_bridge.client._connection.addresses
    for address in (addresses.input_address, addresses.output_address):
        with connect_raw(address, socket_type, DEADLINE) as stranger:
            with contextlib.suppress(OSError):  # cut off already
                stranger.sendall(frame(b"garbage"))
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
    fine = request("fine")
    assert shared_bridge.generate(fine)["fine"] == tokens_of(fine)


def test_the_core_unpickles_nothing_that_it_is_sent(shared_bridge, tmp_path):
    marker = tmp_path / "marker"
    payload = pickle.dumps(Marker(marker))
    wrapped = [msgspec.msgpack.Ext(code, payload) for code in (EXT_ARRAY, EXT_FUNCTION, 3)]
    for request_type in EngineCoreRequestType:
        send_raw(shared_bridge, request_type.value, payload)
        send_raw(shared_bridge, payload, request_type.value)
        for ext in wrapped:
            send_raw(shared_bridge, request_type.value, msgspec.msgpack.encode(ext))
            send_raw(shared_bridge, request_type.value, msgspec.msgpack.encode([0, 1, "collective_rpc", [ext]]))
            send_raw(shared_bridge, request_type.value, msgspec.msgpack.encode(["odd", [1], {"extra_args": ext}]))
    fine = request("fine")
    assert shared_bridge.generate(fine)["fine"] == tokens_of(fine)
    assert not marker.exists()


def send_raw(bridge, *frames):
    """Bytes straight to the core, as a client gone wrong would send them."""
    connection = bridge.client._connection
    with connection._send_lock:
        connection._input.send_multipart([connection._core_identity, *frames])


@pytest.fixture(scope="module", params=["sync_mp", "async_mp"])
def shared_bridge(request):
    bridge = Bridge(request.param)
    yield bridge
    bridge.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x00", b"\xc1"],
        [b"\x00", b""],
        [b"\x00"],
        [b"\x77", b"\x90"],
        [b"", b""],
        [b"\x05", b"\x90"],
        [b"\x01", msgspec.msgpack.encode([1, 2])],
        [b"\x03", msgspec.msgpack.encode("call me")],
        [b"\x03", msgspec.msgpack.encode([0, 1, "is_sleeping", msgspec.msgpack.Ext(EXT_FUNCTION, b"x")])],
        [b"\x00", b"\x91" * 100_000],
    ],
)
def test_a_frame_the_core_cannot_read_is_dropped(shared_bridge, frames):
    send_raw(shared_bridge, *frames)
    fine = request("fine")
    assert shared_bridge.generate(fine)["fine"] == tokens_of(fine)


def test_a_request_of_the_wrong_shape_ends_with_an_error(bridge):
    send_raw(bridge, EngineCoreRequestType.ADD.value, msgspec.msgpack.encode(["odd", "no list", ["sampling"]]))
    send_raw(
        bridge, EngineCoreRequestType.ADD.value, msgspec.msgpack.encode(["odder", [1, 2], ["sampling", 1.0, "high"]])
    )
    fine = request("fine")
    bridge.add(fine)
    tokens, reasons = bridge.collect("odd", "odder", "fine")
    assert reasons["odd"] is reasons["odder"] is FinishReason.ERROR
    assert tokens["fine"] == tokens_of(fine)


def test_a_request_the_core_cannot_prepare_ends_with_an_error(make_bridge):
    bridge = make_bridge()
    fine = request("fine", max_tokens=10)
    bridge.add(fine)
    odd = {f"odd {index}": prompt for index, prompt in enumerate([[], [-1], [1000], [2**40], list(range(1, 260))])}
    for name, prompt in odd.items():
        bridge.add(request(name, prompt))
    tokens, reasons = bridge.collect("fine", *odd)
    assert {reasons[name] for name in odd} == {FinishReason.ERROR}
    assert tokens["fine"] == tokens_of(fine)


def test_the_socket_folder_is_the_users_alone_and_no_port_is_open(bridge, socket_dir):
    assert stat.S_IMODE(os.stat(socket_dir).st_mode) == 0o700
    (core,) = bridge.call("collective_rpc", "pid")
    for pid in (os.getpid(), core):
        listening = [c for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert listening == []


def test_neither_arguments_nor_environment_of_the_core_carry_the_token(bridge):
    (pid,) = bridge.call("collective_rpc", "pid")
    core = psutil.Process(pid)
    visible = " ".join([*core.cmdline(), *core.environ().values()]).encode(errors="surrogateescape")
    assert bridge.client._connection._seal._token not in visible
    assert bridge.client._connection._seal._token.hex().encode() not in visible


def test_the_core_inherits_no_secrets_of_the_users_environment(make_mp_bridge, monkeypatch):
    secrets = {
        "HF_TOKEN": "hf_s3cret",
        "HUGGING_FACE_HUB_TOKEN": "hf_s3cret",
        "OPENAI_API_KEY": "sk-s3cret",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "AWS_ACCESS_KEY_ID": "s3cret",
        "PGPASSWORD_FILE_PASSWORD": "s3cret",
        "google_application_credentials": "/s3cret.json",
        "PIP_INDEX_URL": "https://me:s3cret@packages.example/simple",
    }
    harmless = {"TOKENIZERS_PARALLELISM": "false", "HF_HOME": "/models", "A_URL": "http://localhost:8080/x?at=a@b:c"}
    for name, text in (secrets | harmless).items():
        monkeypatch.setenv(name, text)
    bridge = make_mp_bridge()
    (pid,) = bridge.call("collective_rpc", "pid")
    with open(f"/proc/{pid}/environ") as environ, open(f"/proc/{pid}/cmdline") as cmdline:
        environment, arguments = environ.read(), cmdline.read()
    assert "s3cret" not in environment + arguments
    assert {f"{name}={text}" for name, text in harmless.items()} <= set(environment.split("\0"))
