"""Messages from the shell to the core: one type byte and one struct each, written by clients, read by the core."""

import enum

import msgspec
import numpy as np

from .lora import LoadedAdapter
from .multimodal import MultiModalFeatureSpec
from .pooling import ResolvedPooling
from .resolved_sampling import ResolvedSampling


class EngineCoreRequestType(enum.Enum):
    """The one-byte frame that precedes a message and says how to decode it."""

    ADD = b"\x00"  # EngineCoreRequest
    ABORT = b"\x01"  # list of request ids
    UTILITY = b"\x03"  # (client_index, call_id, method, args)
    WAKEUP = b"\x05"  # never on the wire: rouses the busy loop


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request, to generate or to pool, tokenised and validated.

    `request_id` is the internal id, unique in the engine; `external_req_id` is the caller's.
    `noise_seed` decides every random choice of the request, whether or not the caller gave a seed, so that a request
    which is preempted or moved to a new core goes on with the tokens it would have had.
    `params` says what is asked for, by their tag: tokens that are sampled, or the prompt's states, pooled.
    `output_token_ids` are tokens generated before (by a core that has since died); generation continues behind them.
    `handle` is the shell's number for the request, by which short outputs name it (see `EngineCoreOutputs`): another
    one for each request, even if one has the id that another had before. 0: it has none.
    `adapter`: the LoRA adapter that answers it; None: the model as it is.
    `prompt_embeds`: [num_prompt_tokens, hidden_size] float32, in place of token ids.
    `mm_features`: the pictures of the prompt, in the order of their tokens.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: ResolvedSampling | ResolvedPooling
    arrival_time: float = 0.0  # wall clock, seconds
    noise_seed: int = 0  # 0 .. 2**64 - 1
    client_index: int = 0
    priority: int = 0  # smaller runs first
    cache_salt: str | None = None
    external_req_id: str | None = None
    trace_headers: dict[str, str] | None = None
    prompt_embeds: np.ndarray | None = None
    output_token_ids: list[int] = []
    resumable: bool = False  # more prompt may follow under the same id
    handle: int = 0
    adapter: LoadedAdapter | None = None
    mm_features: list[MultiModalFeatureSpec] = []


REQUEST_SHUTDOWN = "request_shutdown"
"""A utility without an answer, for the client that owns the core: leave, after at most so many seconds of draining."""


class UtilityRequest(msgspec.Struct, array_like=True, gc=False):
    """A call of an `EngineCore` method by name. The answer is a `UtilityOutput` with the same `call_id`."""

    client_index: int
    call_id: int
    method: str
    args: list[object]
