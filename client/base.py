"""The shell's handle on an engine core: what every client offers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from ..protocol.config import VllmConfig
from ..protocol.errors import EngineDeadError
from ..protocol.lora import LoRARequest
from ..protocol.outputs import EngineCoreOutputs
from ..protocol.param_checks import as_bool, as_seconds, int_at_least, reject
from ..protocol.pausing import PauseMode
from ..protocol.requests import EngineCoreRequest


class EngineCoreClient(ABC):
    """Utilities return a value from a sync client and an awaitable from an async one. Both raise VLLMValidationError at
    once for arguments of a wrong type.

    `vllm_config` holds the figures that the core settled on: `num_gpu_blocks`, `max_model_len`.
    """

    vllm_config: VllmConfig

    @abstractmethod
    def call_utility(self, method: str, *args: object) -> Any:
        """Calls one of the core's utilities.

        Raises EngineDeadError when the core is dead or dies meanwhile, else what the call itself raised (an exception
        of the same built-in type, or RuntimeError).
        """

    @property
    @abstractmethod
    def engine_dead(self) -> bool:
        """Whether the core is gone, shut down or dead. Notices a death even when nothing is being waited for."""

    @abstractmethod
    def dead_error(self) -> EngineDeadError:
        """A new exception that says why the core is gone."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the core; repeated calls do nothing. Requests in flight get `timeout` seconds to finish (None: the
        configured `shutdown_timeout`), the rest are aborted. Raises VLLMValidationError for a `timeout` that is none,
        and then nothing has happened.
        """

    def _drain_seconds(self, timeout: float | None) -> float:
        return self.vllm_config.parallel_config.shutdown_timeout if timeout is None else as_seconds("timeout", timeout)

    def get_supported_tasks(self) -> Any:
        return self.call_utility("get_supported_tasks")

    def get_request_counts(self) -> Any:
        """How many requests are [running, waiting] in the core."""
        return self.call_utility("get_request_counts")

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Any:
        """Whether the cache could be emptied: blocks in use stand in the way unless running requests are preempted."""
        return self.call_utility("reset_prefix_cache", as_bool("reset_running_requests", reset_running_requests))

    def reset_mm_cache(self) -> Any:
        """Forgets pictures, and what was computed of them."""
        return self.call_utility("reset_mm_cache")

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Any:
        """Stops scheduling. What is in flight is aborted, waited for, or kept frozen; new requests queue."""
        return self.call_utility("pause_scheduler", mode, as_bool("clear_cache", clear_cache))

    def resume_scheduler(self) -> Any:
        return self.call_utility("resume_scheduler")

    def is_scheduler_paused(self) -> Any:
        return self.call_utility("is_scheduler_paused")

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Any:
        """Pauses (level 0), gives the KV cache's memory back too (1), and the weights' (2)."""
        return self.call_utility("sleep", level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> Any:
        """Undoes `sleep`, or the parts of it that `tags` names: "weights", "kv_cache", "scheduling"."""
        if tags is None:
            return self.call_utility("wake_up", None)
        if isinstance(tags, str) or not isinstance(tags, Collection) or not all(isinstance(tag, str) for tag in tags):
            reject("tags", tags, "None or a list of 'weights', 'kv_cache', 'scheduling'")
        return self.call_utility("wake_up", list(tags))

    def is_sleeping(self) -> Any:
        return self.call_utility("is_sleeping")

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> Any:
        if not isinstance(profile_prefix, str | None):
            reject("profile_prefix", profile_prefix, "None or a string")
        return self.call_utility("profile", is_start, profile_prefix)

    def add_lora(self, lora_request: LoRARequest) -> Any:
        """Sees to it that the adapter is in memory; the digest of its weights. `lora_path` is absolute."""
        return self.call_utility("add_lora", msgspec.to_builtins(lora_request))

    def remove_lora(self, lora_int_id: int) -> Any:
        return self.call_utility("remove_lora", int_at_least("lora_int_id", lora_int_id, 1))

    def pin_lora(self, lora_int_id: int) -> Any:
        return self.call_utility("pin_lora", int_at_least("lora_int_id", lora_int_id, 1))

    def list_loras(self) -> Any:
        return self.call_utility("list_loras")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        """Calls a worker's method on every worker; the list of their results."""
        if not isinstance(method, str) and not callable(method):
            reject("method", method, "the name of a worker's method, or a function")
        if isinstance(args, str) or not isinstance(args, Collection):
            reject("args", args, "a sequence of arguments")
        if not isinstance(kwargs, Mapping | None):
            reject("kwargs", kwargs, "None or a dict from names to arguments")
        return self.call_utility("collective_rpc", method, timeout, list(args), dict(kwargs or {}))


class SyncEngineCoreClient(EngineCoreClient):
    """For callers that may block."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """The next outputs: in process by running a step, else by waiting for the core. Raises EngineDeadError."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Raises EngineDeadError. What goes wrong inside the core comes back as an output that ends the request."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Frees what the requests hold; no output follows. Unknown ids and a dead core are ignored."""

    @property
    def num_held_requests(self) -> int:
        """Requests that no core has got yet: those of a dead core go to the next one in turn."""
        return 0


class AsyncEngineCoreClient(EngineCoreClient):
    """For asyncio. Usable from one event loop at a time, and from another once that one has stopped."""

    @property
    @abstractmethod
    def has_output(self) -> bool:
        """Whether `get_output_async` has something to return at once."""

    @abstractmethod
    async def get_output_async(self) -> EngineCoreOutputs:
        """The next outputs. Raises EngineDeadError."""

    @abstractmethod
    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Raises EngineDeadError. What goes wrong inside the core comes back as an output that ends the request."""

    @abstractmethod
    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Frees what the requests hold; no output follows. Unknown ids and a dead core are ignored."""
