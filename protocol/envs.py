"""Every environment variable that corespan reads: one table, read when asked for."""

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class EnvironmentVariable(NamedTuple):
    """`parse` raises ValueError for what will not do, and its message says what will."""

    parse: Callable[[str], Any]
    default: Any
    meaning: str


def _flag(text: str) -> bool:
    if text.strip().lower() not in ("0", "1", "true", "false", ""):
        raise ValueError("0 or 1")
    return text.strip().lower() in ("1", "true")


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("a finite number")
    return number


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("an integer") from None


def _level(text: str) -> str:
    if text.strip().upper() not in LEVELS:
        raise ValueError(f"one of {', '.join(LEVELS)}")
    return text.strip().upper()


VARIABLES: dict[str, EnvironmentVariable] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": EnvironmentVariable(_flag, True, "run the core in a process of its own"),
    "VLLM_CPU_KVCACHE_SPACE": EnvironmentVariable(
        _number, None, "KV cache on the CPU, GiB; unset: half of the free memory times gpu_memory_utilization"
    ),
    "VLLM_ENGINE_READY_TIMEOUT_S": EnvironmentVariable(_number, 600.0, "seconds the core may take to start"),
    "VLLM_RPC_BASE_PATH": EnvironmentVariable(str, None, "folder under which socket directories are made"),
    "VLLM_LOG_STATS_INTERVAL": EnvironmentVariable(_number, 10.0, "seconds between two lines of statistics"),
    "VLLM_TORCH_PROFILER_DIR": EnvironmentVariable(
        str, None, "folder for the traces of start_profile(); unset: the working directory"
    ),
    "VLLM_LOGGING_LEVEL": EnvironmentVariable(_level, "INFO", "DEBUG, INFO, WARNING or ERROR"),
    "VLLM_MSGPACK_ZERO_COPY_THRESHOLD": EnvironmentVariable(
        _integer, 256, "bytes from which an array gets a frame of its own"
    ),
    "VLLM_ALLOW_INSECURE_SERIALIZATION": EnvironmentVariable(
        _flag, False, "let collective_rpc ship functions (pickle)"
    ),
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": EnvironmentVariable(
        _flag, False, "use the caller's request ids as they are"
    ),
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": EnvironmentVariable(
        _integer, 128, "outputs handled before other asyncio tasks get a turn"
    ),
    "VLLM_IMAGE_FETCH_TIMEOUT": EnvironmentVariable(_number, 5.0, "seconds that fetching a chat's picture may take"),
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": EnvironmentVariable(_flag, True, "follow redirects of a picture's address"),
    "VLLM_MAX_N_SEQUENCES": EnvironmentVariable(_integer, 16384, "largest SamplingParams.n and beam_width"),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": EnvironmentVariable(_flag, False, "accept a max_model_len beyond the model's own"),
    "VLLM_BATCH_INVARIANT": EnvironmentVariable(
        _flag, False, "refuse to start where a request's logits could depend on the batch it runs in"
    ),
    "CORESPAN_CPU_ISA": EnvironmentVariable(
        str, None, "instruction set of the native kernels, below the CPU's best; none: torch"
    ),
    "CORESPAN_CACHE": EnvironmentVariable(
        str, None, "folder for models, converted tokenizers and packed weights; ~/.cache/corespan"
    ),
    "CORESPAN_PACKED_CACHE_GIB": EnvironmentVariable(
        _number, 20.0, "GiB of packed weights kept in the cache for the next start; 0: none"
    ),
}


def __getattr__(name: str) -> Any:
    """The variable's parsed value, or its default when unset.

    Raises ValueError naming the variable, its text and what is allowed when the text does not parse.
    """
    try:
        variable = VARIABLES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    text = os.environ.get(name)
    if text is None:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as legal:
        raise ValueError(f"{name} must be {legal}, got {text!r} ({variable.meaning})") from None
