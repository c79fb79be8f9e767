"""One device's share of the engine: loads the model, holds the cache, sleeps and wakes, profiles.

Executors own workers. `collective_rpc` reaches every public method by name, for clients only those in `RPC_METHODS`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ...protocol import envs
from ...protocol.config import VllmConfig
from ...protocol.lora import LoRARequest
from ...protocol.param_checks import reject
from ...protocol.pausing import SLEEP_LEVELS
from ..dtypes import DType
from ..kv_cache.groups import LayerKind
from ..lazy_torch import load_torch, torch
from ..models.loader import open_checkpoint
from ..models.registry import resolve_encoder_spec, resolve_model_spec
from ..models.tensor_source import TensorSource
from ..multimodal.encoder import Encoder, PartOfSource
from ..pooling.dense import load_dense
from ..pooling.pooler import Pooler
from ..profile_ranges import record_ranges
from ..runtime.cpu_encoder import EncoderRuntime, make_encoder
from ..runtime.interface import Runtime
from ..runtime.selection import make_runtime
from ..scheduler.runner_messages import ModelRunnerOutput, SchedulerOutput
from .model_runner import ModelRunner

_GIB = 1 << 30


class Worker:
    """The model on one device. Raises ValueError at construction when it is unknown, damaged or too large, or when
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
        model_config, block_size = vllm_config.model_config, vllm_config.cache_config.block_size
        dtype = DType(model_config.dtype)
        if (
            model_config.logits_processors
            or model_config.enable_prompt_embeds
            or vllm_config.lora_config
            or vllm_config.mm_config
        ):
            load_torch()  # now, and not when a request first needs it, while others wait
        self.runtime: Runtime[Any] | EncoderRuntime
        self.encoder: Encoder | None = None
        if model_config.pooler is not None and model_config.pooler.is_encoder:
            self.runtime = make_encoder(resolve_encoder_spec(model_config.hf_config), dtype, model_config.quantization)
        else:
            spec = replace(resolve_model_spec(model_config.hf_config), has_head=model_config.pooler is None)
            self.runtime = make_runtime(spec, dtype, block_size, model_config.quantization)
            if spec.vision is not None and vllm_config.mm_config is not None:
                self.encoder = Encoder(spec.vision, dtype)
        self._load_weights()
        self.model_runner = ModelRunner(vllm_config, self.runtime, self._pooler(), self.encoder)
        self._num_blocks = 0
        self._asleep: set[str] = set()
        self._profiler: torch.profiler.profile | None = None
        self._trace_path = ""  # of the trace that is being recorded
        self._num_profiles = 0

    def _load_weights(self) -> None:
        """Raises ValueError where the weights do not fit into memory, with the figures, and ValueError or
        FileNotFoundError naming what is wrong with the checkpoint."""
        model_config = self.vllm_config.model_config
        with open_checkpoint(model_config.model) as source:
            text, vision = self._parts(source)
            plan: Any = self.runtime.plan(text)
            needed, available = plan.peak_bytes, self.runtime.available_memory()
            if self.encoder is not None:
                needed += self.encoder.num_bytes
            if needed > available:
                raise ValueError(
                    f"{model_config.model} needs {needed / _GIB:.2f} GiB to load its weights as "
                    f"{model_config.quantization or plan.kept_as}, and only {available / _GIB:.2f} GiB of memory "
                    "are available"
                )
            self.runtime.load(plan, text, model_config.max_model_len)
            if self.encoder is not None:
                self.encoder.load(vision)

    def _parts(self, source: TensorSource) -> tuple[TensorSource, TensorSource]:
        """The tensors of the language model, and those of the tower."""
        vision = self.runtime.spec.vision
        if vision is None:
            return source, source
        prefixes = vision.text
        return PartOfSource(source, prefixes), PartOfSource(source, prefixes, others=True)

    def _pooler(self) -> Pooler | None:
        spec = self.vllm_config.model_config.pooler
        if spec is None:
            return None
        with open_checkpoint(self.vllm_config.model_config.model) as source:
            return Pooler(spec, load_dense(spec, source))

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache may take."""
        scheduler_config, cache_config = self.vllm_config.scheduler_config, self.vllm_config.cache_config
        return self.runtime.kv_budget(
            cache_config.gpu_memory_utilization, scheduler_config.max_num_batched_tokens, scheduler_config.max_num_seqs
        )

    def kv_block_bytes(self) -> int:
        return self.runtime.kv_block_bytes()

    def kv_groups(self) -> tuple[LayerKind, ...]:
        return self.runtime.kv_groups

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Raises ValueError where the system refuses the memory."""
        self._num_blocks = num_blocks
        try:
            self.runtime.allocate_kv(num_blocks)
        except (OSError, MemoryError, RuntimeError) as error:  # torch's own allocator raises RuntimeError
            raise ValueError(
                f"the system refuses {num_blocks * self.kv_block_bytes() / _GIB:.1f} GiB of memory for the KV cache; "
                "give it less (VLLM_CPU_KVCACHE_SPACE, kv_cache_memory_bytes, num_gpu_blocks_override)"
            ) from error

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.model_runner.execute_model(scheduler_output)

    def add_lora(self, request: LoRARequest) -> str:
        """The digest of the adapter's weights. See `AdapterCache` for this and the three below."""
        return self.model_runner.adapters.add(request)

    def remove_lora(self, lora_int_id: int) -> bool:
        return self.model_runner.adapters.remove(lora_int_id)

    def pin_lora(self, lora_int_id: int) -> bool:
        return self.model_runner.adapters.pin(lora_int_id)

    def list_loras(self) -> list[int]:
        return self.model_runner.adapters.list()

    def sleep(self, level: int = 1) -> None:
        """Level 1 gives back the cache's memory, level 2 the weights' too; their content is gone.

        Raises ValueError for any other level.
        """
        if not SLEEP_LEVELS.get(level):
            raise ValueError(f"sleep level is {level}; it must be 1 or 2")
        self._asleep |= SLEEP_LEVELS[level]
        self.runtime.release_kv()
        if self.encoder is not None:
            self.encoder.forget()
        if level == 2:
            self.runtime.unload()
            if self.encoder is not None:
                self.encoder.unload()

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Bring back what sleeps: everything, or what `tags` ("weights", "kv_cache") name. Weights are read again."""
        wanted = set(SLEEP_LEVELS[2] if tags is None else tags)
        unknown = wanted - SLEEP_LEVELS[2]
        if unknown:
            raise ValueError(f"wake-up tags are {', '.join(sorted(unknown))}; known are kv_cache and weights")
        if "weights" in wanted & self._asleep:
            self._load_weights()
            self._asleep.discard("weights")
        if "kv_cache" in wanted & self._asleep:
            self.runtime.allocate_kv(self._num_blocks)
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

    def apply_model(self, func: Callable[[Any], Any]) -> Any:
        """Call `func` with the model: its spec and weights. Raises RuntimeError while they are asleep."""
        if self.runtime.weights is None:
            raise RuntimeError("the model's weights are asleep")
        return func(self.runtime.weights)

    def check_health(self) -> None:
        """The worker answers; a worker in this process is as healthy as its caller."""
