"""The controls that every engine passes on to its core as they are. `LLM`, `LLMEngine` and `AsyncLLM` inherit them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..client.base import EngineCoreClient
from ..protocol.param_checks import reject
from .ownership import OwnedByProcess
from .text.renderer import Renderer


class EngineControls(OwnedByProcess):
    """Values from the sync engines, awaitables from `AsyncLLM`: as the client's utilities are. All go straight to the
    core, from any thread, and wait for no other call.
    """

    engine_core: EngineCoreClient
    renderer: Renderer

    def get_supported_tasks(self) -> Any:
        return self.engine_core.get_supported_tasks()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Any:
        """True when the cache is empty now; False when blocks are in use and running requests may not be preempted."""
        return self.engine_core.reset_prefix_cache(reset_running_requests)

    def reset_mm_cache(self) -> Any:
        """Forgets the pictures that were prepared, and what the core has computed of them."""
        self._forget_pictures()
        return self.engine_core.reset_mm_cache()

    def _forget_pictures(self) -> None:
        if self.renderer.multimodal is not None:
            self.renderer.multimodal.reset_cache()

    def is_sleeping(self) -> Any:
        return self.engine_core.is_sleeping()

    def is_paused(self) -> Any:
        return self.engine_core.is_scheduler_paused()

    def start_profile(self, profile_prefix: str | None = None) -> Any:
        return self.engine_core.profile(True, profile_prefix)

    def stop_profile(self) -> Any:
        return self.engine_core.profile(False)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        """Calls a worker's method on every worker; a list with each one's result.

        A function in place of a name gets the worker as its first argument. Where the core has a process of its own
        that needs VLLM_ALLOW_INSECURE_SERIALIZATION=1.
        """
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[..., Any]) -> Any:
        """Calls `func` with the model on every worker; the list of results. For functions see `collective_rpc`."""
        if not callable(func):
            reject("func", func, "a function")
        return self.collective_rpc("apply_model", args=(func,))
