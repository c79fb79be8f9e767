"""Whoever ends a request, the output that says so carries the request's trace headers."""

import msgspec
from bridge import request
from fake_executor import FAIL_REQUEST, KILL

from corespan.protocol.outputs import FinishReason

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def traced(*args, **options):
    return msgspec.structs.replace(request(*args, **options), trace_headers=HEADERS)


def ending(bridge, request_id):
    """The reason and the headers of the request's last output."""
    while True:
        for output in bridge.get_output().outputs:
            assert output.request_id == request_id
            if output.finished:
                return output.finish_reason, output.trace_headers
            assert output.trace_headers is None


def test_at_its_length(make_bridge):
    bridge = make_bridge()
    bridge.add(traced("long"))
    assert ending(bridge, "long") == (FinishReason.LENGTH, HEADERS)


def test_when_a_pause_aborts_it(make_bridge):
    bridge = make_bridge()
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(traced("frozen"))
    bridge.call("pause_scheduler", "abort", False)
    assert ending(bridge, "frozen") == (FinishReason.ABORT, HEADERS)


def test_when_it_cannot_be_prepared_or_run(make_bridge):
    bridge = make_bridge()
    for prompt in ([], [1000], [1, FAIL_REQUEST], range(1, 260)):
        bridge.add(traced("odd", prompt))
        assert ending(bridge, "odd") == (FinishReason.ERROR, HEADERS)


def test_when_the_core_leaves(make_mp_bridge):
    bridge = make_mp_bridge()
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(traced("unlucky"))
    bridge.client.shutdown(0.0)
    assert ending(bridge, "unlucky") == (FinishReason.ABORT, HEADERS)


def test_when_it_is_given_up(make_mp_bridge):
    bridge = make_mp_bridge(parallel={"engine_restart": 5})
    bridge.add(traced("killer", [1, KILL]))
    assert ending(bridge, "killer") == (FinishReason.ERROR, HEADERS)
