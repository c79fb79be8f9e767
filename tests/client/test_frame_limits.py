"""Frames have a longest length. Who sends a longer one gets an error; a stranger who claims one is cut off."""

import pytest
from bridge import DEADLINE, Bridge, request, tokens_of
from leftovers import Leftovers
from zmtp import connect_raw, frame

from corespan.protocol import channel, codec
from corespan.protocol.outputs import FinishReason

LIMIT = 4096


def assert_works(bridge):
    fine = request("fine")
    assert bridge.generate(fine)["fine"] == tokens_of(fine)


@pytest.mark.parametrize("parallel", [{}, {"engine_restart": 1}], ids=["alone", "supervised"])
def test_what_is_too_long_to_send_is_an_error_at_the_caller(make_mp_bridge, monkeypatch, parallel):
    bridge = make_mp_bridge(parallel=parallel)
    neighbour = request("neighbour", max_tokens=30)
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(neighbour)
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", LIMIT)
    with pytest.raises(ValueError, match=f"at most {LIMIT} can cross"):
        bridge.call("collective_rpc", "echo", None, ["x" * LIMIT])
    with pytest.raises(ValueError, match=f"at most {LIMIT} can cross"):
        bridge.add(request("large", [9] * LIMIT))
    bridge.call("resume_scheduler")
    assert bridge.collect("neighbour")[0] == {"neighbour": tokens_of(neighbour)}
    assert list(bridge.call("get_request_counts")) == [0, 0]


@pytest.mark.parametrize("kind", ["sync_mp", "async_mp"])
def test_a_configuration_too_long_to_send_is_an_error_at_the_caller(kind, monkeypatch):
    leftovers = Leftovers()
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", LIMIT)
    with pytest.raises(ValueError, match=f"a configuration of .* bytes; at most {LIMIT}"):
        Bridge(kind, remark="x" * LIMIT)
    assert leftovers.found() == []


def test_a_result_too_long_to_send_is_that_calls_error(make_mp_bridge):
    bridge = make_mp_bridge()
    bridge.call("collective_rpc", "limit_frames", None, [LIMIT])
    with pytest.raises(ValueError, match=f"at most {LIMIT} can cross"):
        bridge.call("collective_rpc", "array", None, [LIMIT])
    assert_works(bridge)


def test_outputs_too_long_to_send_end_their_request_alone(make_mp_bridge):
    bridge = make_mp_bridge()
    bridge.call("collective_rpc", "limit_frames", None, [212])
    bridge.call("pause_scheduler", "keep", False)
    neighbour = request("neighbour", max_tokens=30)
    bridge.add(neighbour)
    bridge.add(request("large", max_tokens=200, logprobs=20))
    bridge.call("resume_scheduler")
    tokens, reasons = bridge.collect("neighbour", "large")
    assert tokens["neighbour"] == tokens_of(neighbour)
    assert reasons["large"] is FinishReason.ERROR
    assert list(bridge.call("get_request_counts")) == [0, 0]


@pytest.mark.parametrize(("which", "socket_type"), [("input", b"DEALER"), ("output", b"PUSH")])
def test_a_stranger_that_claims_a_longer_frame_loses_the_connection(make_mp_bridge, which, socket_type):
    bridge = make_mp_bridge()
    neighbour = request("neighbour", max_tokens=30)
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(neighbour)
    addresses = bridge.client._connection.addresses
    with connect_raw(getattr(addresses, f"{which}_address"), socket_type, DEADLINE) as stranger:
        stranger.sendall(frame(b"the first of them", claimed_length=codec.MAX_FRAME_BYTES + 1000))
        while stranger.recv(4096):
            pass
    bridge.call("resume_scheduler")
    assert bridge.collect("neighbour")[0] == {"neighbour": tokens_of(neighbour)}
    assert_works(bridge)
