"""One device's share of the engine: loads the model, holds the cache, sleeps and wakes, profiles.

Executors own workers. `collective_rpc` reaches every public method by name, for clients only those in `RPC_METHODS`."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...protocol import envs
from ...protocol.config import VllmConfig
from ...protocol.param_checks import reject
from ...protocol.pausing import SLEEP_LEVELS
from ..kv_cache.groups import LayerKind
from ..models.decoder import Decoder
from ..models.registry import resolve_decoder_config
from ..profile_ranges import record_ranges
from ..scheduler.runner_messages import ModelRunnerOutput, SchedulerOutput
from .batch_invariance import check_batch_invariance
from .memory import activation_bytes, available_memory, check_model_fits
from .model_runner import ModelRunner

CPU_CACHE_SHARE = 0.5
"""Of the memory that is free once the model is loaded, the share (times gpu_memory_utilization) the cache may take."""


class Worker:
    """A CPU worker. Raises ValueError at construction when the model is unknown, damaged or too large, or when
    `VLLM_BATCH_INVARIANT=1` asks for what this configuration cannot keep."""

    RPC_METHODS = frozenset(
        {
            "apply_model",
            "check_health",
            "determine_available_memory",
            "is_sleeping",
            "kv_block_bytes",
            "profile",
            "reload_weights",
        }
    )

    rank = local_rank = 0  # there is but one

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        config = resolve_decoder_config(vllm_config.model_config.hf_config)
        self.model_runner = ModelRunner(vllm_config, config)
        runner = self.model_runner
        if envs.VLLM_BATCH_INVARIANT:
            check_batch_invariance(config, runner.dtype, runner.block_size, runner.attention_backend)
        check_model_fits(vllm_config.model_config, config, runner.dtype)
        self.model_runner.load_model()
        self._num_blocks = 0
        self._asleep: set[str] = set()
        self._profiler: torch.profiler.profile | None = None
        self._trace_path = ""  # of the trace that is being recorded
        self._num_profiles = 0

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache may take: half of what is free now, less what a step needs."""
        scheduler_config = self.vllm_config.scheduler_config
        share = CPU_CACHE_SHARE * self.vllm_config.cache_config.gpu_memory_utilization
        needed = activation_bytes(
            self.model_runner.config,
            self.model_runner.dtype,
            scheduler_config.max_num_batched_tokens,
            scheduler_config.max_num_seqs,
        )
        return max(0, int(available_memory() * share) - needed)

    def kv_block_bytes(self) -> int:
        return self.model_runner.kv_block_bytes()

    def kv_groups(self) -> tuple[LayerKind, ...]:
        return self.model_runner.kv_groups()

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.model_runner.initialize_kv_cache(num_blocks)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.model_runner.execute_model(scheduler_output)

    def sleep(self, level: int = 1) -> None:
        """Level 1 gives back the cache's memory, level 2 the weights' too; their content is gone.

        Raises ValueError for any other level.
        """
        if not SLEEP_LEVELS.get(level):
            raise ValueError(f"sleep level is {level}; it must be 1 or 2")
        self._asleep |= SLEEP_LEVELS[level]
        self.model_runner.kv_caches = []
        if level == 2:
            self.model_runner.model = None

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Bring back what sleeps: everything, or what `tags` ("weights", "kv_cache") name. Weights are read again."""
        wanted = set(SLEEP_LEVELS[2] if tags is None else tags)
        unknown = wanted - SLEEP_LEVELS[2]
        if unknown:
            raise ValueError(f"wake-up tags are {', '.join(sorted(unknown))}; known are kv_cache and weights")
        if "weights" in wanted & self._asleep:
            self.model_runner.load_model()
            self._asleep.discard("weights")
        if "kv_cache" in wanted & self._asleep:
            self.model_runner.initialize_kv_cache(self._num_blocks)
            self._asleep.discard("kv_cache")

    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> str | None:
        """Start recording, or stop and return the path of the Chrome trace, in the configured folder or
        VLLM_TORCH_PROFILER_DIR.

        The file's name begins with `profile_prefix`, which may hold folders of its own. Raises ValueError when already,
        or not, recording, and for a prefix that leads out of that folder.
        """
        if is_start == (self._profiler is not None):
            raise ValueError(f"the profiler is {'already' if is_start else 'not'} running")
        if self._profiler is None:
            self._trace_path = self._next_trace_path(profile_prefix or "corespan")
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profiler.start()
            record_ranges(torch.profiler.record_function)
            return None
        profiler, self._profiler = self._profiler, None
        record_ranges(None)
        profiler.stop()
        os.makedirs(os.path.dirname(self._trace_path), exist_ok=True)
        self._num_profiles += 1
        profiler.export_chrome_trace(self._trace_path)
        return self._trace_path

    def _next_trace_path(self, prefix: str) -> str:
        folder = self.vllm_config.observability_config.torch_profiler_dir or envs.VLLM_TORCH_PROFILER_DIR or ""
        folder = os.path.realpath(folder)
        path = os.path.realpath(os.path.join(folder, f"{prefix}-{os.getpid()}-{self._num_profiles}.trace.json"))
        if os.path.commonpath([folder, path]) != folder:
            reject("profile_prefix", prefix, f"a name within the folder for traces, {folder}")
        return path

    def reload_weights(self) -> None:
        """Changes nothing: the weights are those of the model's files, which `wake_up` reads again after a sleep."""

    def apply_model(self, func: Callable[[Decoder], Any]) -> Any:
        """Call `func` with the model. Raises RuntimeError while its weights are asleep."""
        if self.model_runner.model is None:
            raise RuntimeError("the model's weights are asleep")
        return func(self.model_runner.model)

    def check_health(self) -> None:
        """The worker answers; a worker in this process is as healthy as its caller."""
