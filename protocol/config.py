"""The engine's configuration: frozen structs that cross the bridge as data. `EngineArgs` (engine room) builds them."""

import ipaddress
from typing import Any, Literal

import msgspec

from .param_checks import check_end_ids
from .pooling import PoolerSpec

Dtype = Literal["bfloat16", "float16", "float32"]
Quantization = Literal["int8", "gguf", "dequantize"]
"""Of weights: int8; a GGUF file's own blocks, which it keeps without any too; values of the dtype in their place."""
SchedulingPolicy = Literal["fcfs", "priority"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""What is reported as log-probabilities: before or after penalties, masks and temperature; or the logits."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is served. `hf_config` and `generation_config` are the model's own files as plain data.

    Raises VLLMValidationError where one of the two names an end token that the model does not have.
    """

    model: str  # an absolute path: a folder in Hugging Face layout or a .gguf file
    served_model_name: str
    tokenizer: str | None  # folder with tokenizer.json; None: token ids in, token ids out
    hf_config: dict[str, Any]
    generation_config: dict[str, Any] = {}
    dtype: Dtype = "bfloat16"
    quantization: Quantization | None = None
    max_model_len: int
    fit_max_model_len: bool = False  # lower max_model_len to what the KV cache holds, instead of refusing to start
    seed: int | None = 0  # of requests without one; None: at random
    max_logprobs: int = 20  # -1: no limit
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logits_processors: list[str] = []  # "package.module:Class"
    enable_prompt_embeds: bool = False
    trust_remote_code: bool = False
    pooler: PoolerSpec | None = None  # None: the model generates; else it pools, and nothing else

    def __post_init__(self) -> None:
        if "vocab_size" in self.hf_config:
            for name, config in (("config", self.hf_config), ("generation_config", self.generation_config)):
                check_end_ids(f"the model's {name}: eos_token_id", config.get("eos_token_id"), self.vocab_size)

    @property
    def vocab_size(self) -> int:
        return int(self.hf_config["vocab_size"])

    @property
    def max_prompt_len(self) -> int:
        """Tokens: where the model generates, one less than it takes at all, which leaves room for one of output."""
        return self.max_model_len - (self.pooler is None)

    def get_vocab_size(self) -> int:
        return self.vocab_size


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache. `num_gpu_blocks`: what requests can use, on whichever device; None until the core has sized it."""

    block_size: int = 16
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    num_gpu_blocks: int | None = None
    enable_prefix_caching: bool = True


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How much runs at once. Raises ValueError where the figures contradict each other."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0: off
    policy: SchedulingPolicy = "fcfs"
    stream_interval: int = 1

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_model_len ({self.max_model_len})"
            )


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts by n-gram lookup: at most `num_speculative_tokens`, where as many of the last tokens were seen before as
    `prompt_lookup_min` says; of several such places the one where most match, up to `prompt_lookup_max`, counts.
    """

    method: Literal["ngram"] = "ngram"
    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Processes and restarts. `engine_restart`: how often a dead core may be replaced within a window; 0: never.

    Raises ValueError for a `core_address` that is not one interface's.
    """

    core_address: str | None = None  # such as tcp://127.0.0.1, to meet the core at, encrypted; None: unix sockets
    engine_restart: int = 0
    shutdown_timeout: float = 0.0  # seconds a core may drain on SIGTERM
    step_timeout: float | None = None  # seconds a step may take before the core counts as hung; None: no limit

    @property
    def world_size(self) -> int:
        """Workers of the engine."""
        return 1

    def __post_init__(self) -> None:
        if self.core_address is not None and not _is_one_interface(self.core_address):
            raise ValueError(
                f"core_address is {self.core_address!r}; it must be tcp:// and the numeric address of one interface of "
                "this machine, such as tcp://127.0.0.1 or tcp://[::1], without a port"
            )


def _is_one_interface(address: str) -> bool:
    """Whether this is tcp:// and an IP address (IPv6 in brackets) that does not stand for many."""
    host = address.removeprefix("tcp://")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        return False
    if bracketed != (ip.version == 6) or host == address:
        return False
    plain = getattr(ip, "ipv4_mapped", None) or ip
    return not (plain.is_unspecified or plain.is_multicast or str(plain) == "255.255.255.255")


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True):
    otlp_traces_endpoint: str | None = None
    torch_profiler_dir: str | None = None  # for the traces of start_profile(), before VLLM_TORCH_PROFILER_DIR


class LoRAConfig(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA adapters: how many different ones a step takes, how many stay in memory, and of which rank and type they
    may be. Raises ValueError where the figures contradict each other.
    """

    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int
    lora_dtype: Dtype

    def __post_init__(self) -> None:
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras ({self.max_loras}): those that run "
                "are in memory"
            )


class MultiModalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Pictures: how many a prompt may have, from where they may come, and what room their embeddings have."""

    limit_per_prompt: int
    processor_kwargs: dict[str, Any] = {}
    cache_bytes: int = 4 << 30  # of prepared pictures, in the shell
    encoder_capacity: int  # embeddings that the core holds, and computes in a step
    enable_mm_embeds: bool = False
    allowed_local_media_path: str = ""  # "": none
    allowed_media_domains: list[str] | None = None  # None: any


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. Travels to the core in the handshake."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    speculative_config: SpeculativeConfig | None = None
    observability_config: ObservabilityConfig = msgspec.field(default_factory=ObservabilityConfig)
    lora_config: LoRAConfig | None = None  # None: no adapters
    mm_config: MultiModalConfig | None = None  # None: text only


def with_final_figures(vllm_config: VllmConfig, max_model_len: int, num_gpu_blocks: int, block_size: int) -> VllmConfig:
    """The configuration with what is known once the model is loaded."""
    replace = msgspec.structs.replace
    return replace(
        vllm_config,
        model_config=replace(vllm_config.model_config, max_model_len=max_model_len),
        scheduler_config=replace(vllm_config.scheduler_config, max_model_len=max_model_len),
        cache_config=replace(vllm_config.cache_config, num_gpu_blocks=num_gpu_blocks, block_size=block_size),
    )
