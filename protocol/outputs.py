"""Messages from the core to the shell, and the handshake that starts a core process."""

import enum

import msgspec
import numpy as np

from .user_classes import UserMain


class FinishReason(enum.IntEnum):
    """Why a request ended. The name in lower case is what users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class LogprobsArrays(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of consecutive positions, column 0 the sampled (or actual prompt) token, then the top k.

    token_ids: [num_positions, k + 1] int32; logprobs: [num_positions, k + 1] float32;
    ranks: [num_positions] int32, the rank (from 1) of column 0 in the whole vocabulary.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray

    def take(self, positions: np.ndarray | list[int]) -> "LogprobsArrays":
        """Those positions alone, copied."""
        return LogprobsArrays(self.token_ids[positions], self.logprobs[positions], self.ranks[positions])

    @staticmethod
    def concatenated(parts: "list[LogprobsArrays]") -> "LogprobsArrays":
        """Of consecutive positions, all with the same number of columns."""
        if len(parts) == 1:
            return parts[0]
        return LogprobsArrays(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )


class EventType(enum.IntEnum):
    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True, gc=False):
    """Something that happened to a request, on the core's monotonic clock (seconds)."""

    type: EventType
    timestamp: float


class PrefillStats(msgspec.Struct, array_like=True, gc=False):
    """How the prompt was obtained, fixed when the request is first scheduled."""

    num_prompt_tokens: int
    num_cached_tokens: int


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step added to one request.

    `stop_reason` is the stop token's id, or what went wrong (`FinishReason.ERROR`), or "repetition_detected"
    (`FinishReason.REPETITION`). `handle` is the request's own; so are `trace_headers`, on the output that ends it.
    `pooling_output`: [hidden_size] or, token by token, [num_tokens, hidden_size] float32.
    `resend`: the core lacks a picture that the request leaves out, and has dropped it; it is to come again, whole.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    new_logprobs: LogprobsArrays | None = None
    new_prompt_logprobs: LogprobsArrays | None = None
    events: list[EngineCoreEvent] | None = None
    prefill_stats: PrefillStats | None = None
    trace_headers: dict[str, str] | None = None
    handle: int = 0
    pooling_output: np.ndarray | None = None
    resend: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class UtilityOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The answer to a `UtilityRequest`: a result, or the text of what went wrong and its exception's class name."""

    call_id: int
    failure_message: str | None = None
    result: object = None
    failure_type: str = "RuntimeError"


class PrefixCacheStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Counts since the last snapshot; `queries` and `hits` are in tokens. `reset`: the cache was emptied meanwhile."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0


class SpecDecodingStats(msgspec.Struct, array_like=True, gc=False):
    """Drafts since the last snapshot: how many, their tokens, those kept, and those kept by place in the draft."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The scheduler's state after a step; `num_preemptions` counts since the last snapshot.

    `num_skipped_waiting_reqs`: those of the waiting that could not run if there were room, for want of a compiled
    grammar or of more prompt.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0  # 0..1
    num_preemptions: int = 0
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    spec_decoding_stats: SpecDecodingStats | None = None
    running_lora_adapters: list[str] = []  # names
    waiting_lora_adapters: list[str] = []


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One frame from the core: the outputs of a step, or the answer to a utility call, or both.

    A request that got one token in the step, and of which there is nothing else to say, has no entry in `outputs`: its
    handle and its token stand in `handles` and `token_ids`, [n] each, at the same place.
    """

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0  # the core's monotonic clock, seconds
    utility_output: UtilityOutput | None = None
    handles: list[int] = []
    token_ids: list[int] = []


ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""In place of `EngineCoreOutputs`, followed by a frame with the cause as UTF-8: the core is about to exit."""


STACKS_FILE = "core.stacks"
"""In the socket folder: where every thread of the core stood when it crashed or hung."""


class HandshakeHello(msgspec.Struct, tag="HELLO"):
    """core -> launcher: the process runs and waits for its configuration."""


class CurveKeys(msgspec.Struct, frozen=True):
    """What one end of an engine's TCP sockets holds, each as 40 characters: its own pair of keys, and the public key of
    the other end. Even the public ones are told to nobody else; they appear on no wire.
    """

    public_key: bytes
    secret_key: bytes
    peer_key: bytes


class HandshakeInit(msgspec.Struct, tag="INIT"):
    """launcher -> core: everything the core needs. One input and one output address per client.

    `socket_dir` holds the ipc sockets; a core that outlives its parent removes it. `output_token` is known to this core
    and its clients only: every message of outputs begins with it (see `OutputSeal`). `curve_keys` go with addresses
    that are TCP. `user_main` and `pickled_classes` are where to find classes of the user's (see `user_classes`).
    """

    config: bytes  # VllmConfig, msgpack
    engine_index: int
    socket_dir: str
    output_token: bytes
    input_addresses: list[str]
    output_addresses: list[str]
    executor_class: str  # "package.module:Class"
    log_stats: bool
    curve_keys: CurveKeys | None = None
    user_main: UserMain | None = None
    pickled_classes: dict[str, bytes] = {}


class HandshakeReady(msgspec.Struct, tag="READY"):
    """core -> launcher and clients: the model is loaded; the figures are final."""

    pid: int
    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dtype: str


class HandshakeFailed(msgspec.Struct, tag="FAILED"):
    """core -> launcher: start-up failed, or a running core is about to exit.

    `error_type` is the exception's class name, `traceback` its text.
    """

    error_type: str
    message: str
    traceback: str


class HandshakeLeaving(msgspec.Struct, tag="LEAVING"):
    """core -> launcher: it exits as it was told to; its clients have been sent the last of what is theirs."""


HandshakeMessage = HandshakeHello | HandshakeInit | HandshakeReady | HandshakeFailed | HandshakeLeaving
