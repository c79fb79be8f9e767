"""Messages of every kind that crosses the bridge, and what becomes of them when their bytes are changed."""

import random
from typing import Any

import numpy as np

from corespan.protocol.codec import Buffer, MsgpackDecoder, MsgpackEncoder
from corespan.protocol.errors import ProtocolError
from corespan.protocol.outputs import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EventType,
    FinishReason,
    LogprobsArrays,
    PrefillStats,
    SchedulerStats,
)
from corespan.protocol.requests import EngineCoreRequest, UtilityRequest
from corespan.protocol.resolved_sampling import ResolvedSampling

INTERESTING = bytes([0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xC0, 0xC1, 0xC6, 0xC7, 0xC9, 0xD4, 0xDB, 0xDD, 0xDF, 0xFF])
"""First bytes of msgpack's types, at the ends of their ranges."""


def logprobs(num_positions: int) -> LogprobsArrays:
    return LogprobsArrays(
        np.arange(num_positions * 3, dtype=np.int32).reshape(num_positions, 3),
        np.linspace(-9, 0, num_positions * 3, dtype=np.float32).reshape(num_positions, 3),
        np.ones(num_positions, np.int32),
    )


def full_outputs() -> EngineCoreOutputs:
    return EngineCoreOutputs(
        engine_index=3,
        outputs=[
            EngineCoreOutput("a", [1, 2], new_logprobs=logprobs(2), events=[EngineCoreEvent(EventType.QUEUED, 1.5)]),
            EngineCoreOutput(
                "b",
                [],
                finish_reason=FinishReason.STOP,
                stop_reason="END",
                new_prompt_logprobs=logprobs(500),
                prefill_stats=PrefillStats(9, 0),
                trace_headers={"traceparent": "00"},
            ),
        ],
        scheduler_stats=SchedulerStats(num_running_reqs=2, kv_cache_usage=0.5),
        timestamp=12.25,
    )


def full_request() -> EngineCoreRequest:
    return EngineCoreRequest(
        "request",
        list(range(300)),
        ResolvedSampling(temperature=0.5, stop_token_ids=(5,), logit_bias={3: -1.0}, max_tokens=9),
        arrival_time=1.0,
        noise_seed=2**64 - 1,
        cache_salt="salt",
        trace_headers={"traceparent": "00"},
        prompt_embeds=np.random.default_rng(0).standard_normal((40, 64), np.float32),
        output_token_ids=[7, 8],
    )


def frames_of(message: object) -> list[bytes]:
    return [bytes(frame) for frame in MsgpackEncoder().encode(message)]


MESSAGES: list[tuple[object, Any]] = [  # with the type that their receiver decodes
    (full_outputs(), EngineCoreOutputs),
    (full_request(), EngineCoreRequest),
    (UtilityRequest(0, 1, "sleep", [np.arange(5), 1, "abort", {"a": None}]), UtilityRequest),
    (["one request", "another"], list[str]),
]
DECODERS: list[MsgpackDecoder[Any]] = [MsgpackDecoder(message_type) for _, message_type in MESSAGES]
FRAMES = [frames_of(message) for message, _ in MESSAGES]


def is_accepted(which: int, frames: list[Buffer]) -> bool:
    """Whether the frames decode as that kind of message; any error but ProtocolError gets out."""
    try:
        DECODERS[which].decode(frames)
    except ProtocolError:
        return False
    return True


def mutate(rng: random.Random, frame: bytes) -> bytes:
    """The frame with a few bytes changed, cut out, doubled or put in."""
    changed = bytearray(frame)
    for _ in range(rng.randrange(1, 5)):
        position = rng.randrange(len(changed) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            changed[position : position + 1] = rng.randbytes(1)
        elif kind == 1:
            changed[position : position + 1] = bytes((rng.choice(INTERESTING),))
        elif kind == 2:
            del changed[position : position + rng.randrange(1, 9)]
        elif kind == 3:
            changed[position:position] = changed[position : position + rng.randrange(1, 40)]
        else:
            changed[position:position] = rng.randbytes(rng.randrange(1, 9))
    return bytes(changed)


def fuzz(seed: int, rounds: int) -> int:
    """How many of so many mutated messages still decode."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(rounds):
        which = rng.randrange(len(FRAMES))
        frames: list[Buffer] = list(FRAMES[which])
        target = 0 if rng.random() < 0.9 else rng.randrange(len(frames))
        frames[target] = mutate(rng, FRAMES[which][target])
        accepted += is_accepted(which, frames)
    return accepted
