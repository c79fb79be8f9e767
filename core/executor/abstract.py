"""`Executor`: what `EngineCore` knows of the workers that run the model, however many there are and wherever."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...protocol.config import VllmConfig
from ..kv_cache.groups import LayerKind
from ..scheduler.runner_messages import ModelRunnerOutput, SchedulerOutput


class Executor(ABC):
    """Construction loads the model; it raises ValueError or FileNotFoundError when that cannot be done."""

    rpc_methods: frozenset[str] = frozenset()
    """The workers' methods that clients may call by name. The others would change a worker behind the core's back."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig) -> None: ...

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method by name, or a function with the worker as its first argument, on every worker.

        Returns one result a worker. Raises NotImplementedError for an unknown name, and what the call itself raises.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of the workers and their memory. May be called twice."""

    def determine_available_memory(self) -> int:
        """Bytes that each worker can give to the KV cache."""
        return min(self.collective_rpc("determine_available_memory"))

    def kv_block_bytes(self) -> int:
        """Bytes of one KV block on a worker, over the layers of the largest group."""
        return max(self.collective_rpc("kv_block_bytes"))

    def kv_groups(self) -> tuple[LayerKind, ...]:
        """Of what kind the layers of each KV group are."""
        kinds: tuple[LayerKind, ...] = self.collective_rpc("kv_groups")[0]
        return kinds

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self.collective_rpc("initialize_kv_cache", args=(num_blocks,))

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        output: ModelRunnerOutput = self.collective_rpc("execute_model", args=(scheduler_output,))[0]
        return output

    def sleep(self, level: int = 1) -> None:
        """Level 1 drops the KV cache's memory, level 2 the weights' as well."""
        self.collective_rpc("sleep", args=(level,))

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        self.collective_rpc("wake_up", args=(None if tags is None else list(tags),))

    @property
    def is_sleeping(self) -> bool:
        return any(self.collective_rpc("is_sleeping"))

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> list[str | None]:
        """Start or stop the workers' profilers; stopping returns the paths of the traces."""
        return self.collective_rpc("profile", args=(is_start, profile_prefix))
