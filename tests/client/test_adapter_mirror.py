"""Which adapters a new core is asked to read, and to pin."""

from typing import Any

import msgspec

from corespan.client.replay import AdapterMirror
from corespan.protocol.codec import MsgpackDecoder, MsgpackEncoder
from corespan.protocol.lora import LoadedAdapter, LoRARequest
from corespan.protocol.params import SamplingParams
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import resolved


def add(number: int, path: str = "/a") -> tuple[str, list[Any]]:
    return "add_lora", [msgspec.to_builtins(LoRARequest(f"a{number}", number, path))]


def test_a_new_core_reads_and_pins_what_the_old_one_had() -> None:
    mirror = AdapterMirror(capacity=2)
    for method, args in (
        add(1),
        ("pin_lora", [1]),
        add(2),
        add(3),
        ("list_loras", []),
        add(4),
        add(5),
        ("remove_lora", [5]),
        add(4, "/new"),
    ):
        mirror.record(method, args)
    assert mirror.calls() == [add(1), add(4, "/new"), ("pin_lora", [1])]
    mirror.record("remove_lora", [1])
    assert mirror.calls() == [add(4, "/new")]


def test_requests_carry_their_adapter_and_old_frames_decode_without() -> None:
    decode = MsgpackDecoder(EngineCoreRequest).decode
    request = EngineCoreRequest("a", [1], resolved(SamplingParams()), handle=7)
    old = MsgpackEncoder().encode(request)
    assert decode(old).adapter is None
    request.adapter = LoadedAdapter(LoRARequest("x", 3, "/x"), "digest")
    sent = decode(MsgpackEncoder().encode(request)).adapter
    assert sent is not None
    assert (sent.digest, sent.request.lora_int_id, sent.request.lora_path) == ("digest", 3, "/x")
