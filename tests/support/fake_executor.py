"""An executor without a model: tokens by arithmetic, and faults on demand. Importable in the core process by its path.

The next token is a function of the request's noise seed and position. A prompt that holds one of the trigger tokens has
the core do what the token says when the request is first computed.
"""

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from odd_errors import raise_odd

from corespan.core.executor.abstract import Executor
from corespan.core.kv_cache.groups import FullAttention, LayerKind
from corespan.core.scheduler.runner_messages import ModelRunnerOutput, SchedulerOutput
from corespan.protocol import codec
from corespan.protocol.config import VllmConfig
from corespan.protocol.outputs import LogprobsArrays

VOCAB_SIZE = 1000
RAISE, EXIT, KILL, SEGFAULT, HANG, FAIL_REQUEST, OUT_OF_MEMORY, RAISE_LATER = range(990, 998)  # prompt tokens
LATER = 20  # tokens, prompt included
FIRST_TRIGGER = RAISE


def next_token(noise_seed: int, position: int) -> int:
    return (noise_seed * 31 + position * 7) % FIRST_TRIGGER


def expected_tokens(noise_seed: int, num_prompt_tokens: int, num_tokens: int) -> list[int]:
    return [next_token(noise_seed, num_prompt_tokens + index) for index in range(num_tokens)]


class FakeExecutor(Executor):
    """`hf_config["fake"]` may hold `step_seconds`, what a step of a model would take."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.options: dict[str, Any] = vllm_config.model_config.hf_config.get("fake", {})
        self.requests: dict[int, tuple[int, list[int], int]] = {}  # by row: seed, tokens, num computed
        self.asleep: set[str] = set()
        self.fuse: tuple[int, int] | None = None  # steps from now, and what to do then

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        if callable(method):
            return [method(self, *args, **(kwargs or {}))]
        worker_method = getattr(self, f"worker_{method}", None)
        if worker_method is None:
            raise NotImplementedError(f"workers have no method {method!r}")
        return [worker_method(*args, **(kwargs or {}))]

    @property
    def rpc_methods(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(name.removeprefix("worker_") for name in dir(self) if name.startswith("worker_"))

    def shutdown(self) -> None:
        pass

    def determine_available_memory(self) -> int:
        return 1 << 20

    def kv_block_bytes(self) -> int:
        return 1 << 10

    def kv_groups(self) -> tuple[LayerKind, ...]:
        return (FullAttention(),)

    def initialize_kv_cache(self, num_blocks: int) -> None:
        pass

    def sleep(self, level: int = 1) -> None:
        self.asleep |= {"kv_cache"} if level == 1 else {"kv_cache", "weights"}

    def wake_up(self, tags: Any = None) -> None:
        self.asleep -= set(self.asleep if tags is None else tags)

    @property
    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def worker_echo(self, *values: Any) -> Any:
        return list(values)

    def worker_asleep(self) -> list[str]:
        return sorted(self.asleep)

    def worker_pid(self) -> int:
        return os.getpid()

    def worker_array(self, size: int) -> np.ndarray:
        return np.arange(size, dtype=np.float32)

    def worker_unencodable(self) -> object:
        return threading.Lock()

    def worker_raise(self, message: str) -> None:
        raise ValueError(message)

    def worker_raise_odd(self, name: str) -> None:
        raise_odd(name)

    def worker_fail_to_sleep(self, name: str) -> None:
        """Has the next `sleep` raise that."""
        self.sleep = lambda level=1: raise_odd(name)  # type: ignore[method-assign]

    def worker_environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def worker_limit_frames(self, num_bytes: int) -> None:
        """Has the core take longer frames than that for too long to send."""
        codec.MAX_FRAME_BYTES = num_bytes

    def worker_exhaust_file_descriptors(self) -> None:
        """Lets the process open no further file."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
        with contextlib.suppress(OSError):
            while True:
                os.open(os.devnull, os.O_RDONLY)

    def worker_modules(self) -> list[str]:
        import sys

        return sorted(sys.modules)

    def worker_break_thread(self, name: str, attribute: str) -> None:
        """Has the thread of that name fail when it next uses its attribute."""
        (thread,) = (thread for thread in threading.enumerate() if thread.name == name)
        setattr(thread, attribute, None)

    def worker_obey(self, trigger: int) -> None:
        obey([trigger])

    def worker_light_fuse(self, steps: int, trigger: int) -> None:
        """Has the core do what the trigger says so many steps later, whichever requests are running then."""
        self.fuse = (steps, trigger)

    def worker_die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(self.options.get("step_seconds", 0.0))
        if self.fuse is not None:
            steps, trigger = self.fuse
            self.fuse = (steps - 1, trigger)
            if steps == 0:
                obey([trigger])
        for row in scheduler_output.removed_rows:
            del self.requests[row]
        failed = {}
        for new in scheduler_output.scheduled_new_reqs:
            self.requests[new.row] = (new.noise_seed, list(new.token_ids), new.num_computed_tokens)
            if FAIL_REQUEST in new.token_ids:
                failed[new.row] = "told to fail"
            obey(new.token_ids)
        sampled = {
            row: token
            for row, scheduled in zip(
                scheduler_output.rows.tolist(), scheduler_output.num_scheduled_tokens.tolist(), strict=True
            )
            if row not in failed and (token := self.sample(row, scheduled)) is not None
        }
        count = len(sampled)
        token_ids = np.array(list(sampled.values()), dtype=np.int64)
        return ModelRunnerOutput(
            rows=np.array(list(sampled), dtype=np.int64),
            sampled_token_ids=token_ids,
            logprobs=LogprobsArrays(
                token_ids.astype(np.int32).reshape(count, 1).repeat(21, axis=1),
                np.zeros((count, 21), np.float32),
                np.ones(count, np.int32),
            ),
            failed=failed,
        )

    def sample(self, row: int, num_scheduled: int) -> int | None:
        seed, tokens, computed = self.requests[row]
        self.requests[row] = (seed, tokens, computed + num_scheduled)
        if computed + num_scheduled < len(tokens):
            return None
        if RAISE_LATER in tokens and len(tokens) >= LATER:
            raise RuntimeError("told to raise in a later step")
        token = next_token(seed, len(tokens))
        tokens.append(token)
        return token


class FailingExecutor(FakeExecutor):
    """Does at start what `hf_config["fake"]["start"]` says: raise, overflow (the memory), miss (a file), exit, kill,
    hang or crash. Before, it writes its process's id to the FIFO `report`, if there is one.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        if "report" in self.options:
            Path(self.options["report"]).write_text(str(os.getpid()))
        action = self.options["start"]
        if action == "raise":
            raise ValueError("no such weights")
        if action == "overflow":
            raise MemoryError("no room for the weights")
        if action == "miss":
            raise FileNotFoundError("no such file of weights")
        obey([{"exit": EXIT, "kill": KILL, "hang": HANG, "crash": SEGFAULT}[action]])


def obey(token_ids: Sequence[int]) -> None:
    if RAISE in token_ids:
        raise RuntimeError("told to raise in the step")
    if EXIT in token_ids:
        os._exit(3)
    if KILL in token_ids:
        os.kill(os.getpid(), signal.SIGKILL)
    if SEGFAULT in token_ids:
        os.kill(os.getpid(), signal.SIGSEGV)
    if HANG in token_ids:
        threading.Event().wait()
    if OUT_OF_MEMORY in token_ids:
        use_up_memory()


def use_up_memory() -> None:
    """Raises MemoryError, as allocations do in a process that has reached its limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 30), hard))
    bytearray(1 << 32)
