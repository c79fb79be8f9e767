"""`EngineOptions`: the fields of `EngineArgs` as keyword arguments of `LLM`, for type checkers, editors and `help`.

A type checker cannot derive them, so they are listed once more; a test keeps them equal to `EngineArgs`.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict, TypeVar, Unpack

from ..protocol.config import LogprobsMode, Quantization, SchedulingPolicy
from .engine_args import EngineArgs
from .neutral_args import NeutralArgs

F = TypeVar("F", bound=Callable[..., None])


class NeutralOptions(TypedDict, total=False):
    """Options of vLLM that mean nothing here, accepted at their neutral values."""

    runner: object
    convert: object
    task: object
    override_pooler_config: object
    pooler_config: object
    tokenizer_mode: object
    config_format: object
    hf_config_path: object
    rope_scaling: object
    rope_theta: object
    hf_token: object
    code_revision: object
    load_format: object
    download_dir: object
    ignore_patterns: object
    model_loader_extra_config: object
    safetensors_load_strategy: object
    pt_load_map_location: object
    use_tqdm_on_load: object
    model_impl: object
    device: object
    quantization_config: object
    disable_sliding_window: object
    disable_cascade_attn: object
    override_attention_dtype: object
    reasoning_parser: object
    reasoning_parser_plugin: object
    io_processor_plugin: object
    logits_processor_pattern: object
    structured_outputs_config: object
    guided_decoding_backend: object
    data_parallel_rank: object
    data_parallel_start_rank: object
    data_parallel_size_local: object
    data_parallel_address: object
    data_parallel_rpc_port: object
    data_parallel_hybrid_lb: object
    data_parallel_external_lb: object
    data_parallel_backend: object
    prefill_context_parallel_size: object
    decode_context_parallel_size: object
    dcp_kv_cache_interleave_size: object
    cp_kv_cache_interleave_size: object
    distributed_executor_backend: object
    distributed_timeout_seconds: object
    master_addr: object
    master_port: object
    nnodes: object
    node_rank: object
    numa_bind: object
    disable_custom_all_reduce: object
    max_parallel_loading_workers: object
    ray_workers_use_nsight: object
    worker_cls: object
    worker_extension_cls: object
    scheduler_cls: object
    enable_expert_parallel: object
    enable_eplb: object
    eplb_config: object
    expert_placement_strategy: object
    all2all_backend: object
    moe_backend: object
    enable_return_routed_experts: object
    enable_dbo: object
    ubatch_size: object
    dbo_decode_token_threshold: object
    dbo_prefill_token_threshold: object
    num_redundant_experts: object
    kv_cache_dtype: object
    calculate_kv_scales: object
    prefix_caching_hash_algo: object
    swap_space: object
    cpu_offload_gb: object
    offload_group_size: object
    offload_num_in_group: object
    offload_prefetch_step: object
    offload_params: object
    kv_offloading_size: object
    kv_offloading_backend: object
    kv_sharing_fast_prefill: object
    kv_transfer_config: object
    kv_events_config: object
    ec_transfer_config: object
    weight_transfer_config: object
    mamba_cache_dtype: object
    mamba_ssm_cache_dtype: object
    mamba_block_size: object
    mamba_cache_mode: object
    async_scheduling: object
    max_num_partial_prefills: object
    max_long_partial_prefills: object
    num_scheduler_steps: object
    preemption_mode: object
    use_v2_block_manager: object
    disable_chunked_mm_input: object
    disable_hybrid_kv_cache_manager: object
    scheduler_reserve_full_isl: object
    watermark: object
    prefill_schedule_interval: object
    max_seq_len_to_capture: object
    compilation_config: object
    optimization_level: object
    performance_mode: object
    cudagraph_capture_sizes: object
    max_cudagraph_capture_size: object
    attention_backend: object
    attention_config: object
    kernel_config: object
    spec_method: object
    spec_model: object
    spec_tokens: object
    enable_lora: object
    max_loras: object
    max_lora_rank: object
    max_cpu_loras: object
    lora_dtype: object
    lora_extra_vocab_size: object
    enable_tower_connector_lora: object
    specialize_active_lora: object
    fully_sharded_loras: object
    default_mm_loras: object
    limit_mm_per_prompt: object
    mm_processor_kwargs: object
    mm_processor_cache_gb: object
    mm_processor_cache_type: object
    mm_shm_cache_max_object_size_mb: object
    mm_encoder_tp_mode: object
    mm_encoder_attn_backend: object
    mm_encoder_only: object
    media_io_kwargs: object
    skip_mm_profiling: object
    language_model_only: object
    interleave_mm_strings: object
    enable_mm_embeds: object
    tokens_only: object
    video_pruning_rate: object
    allowed_local_media_path: object
    allowed_media_domains: object
    disable_log_requests: object
    aggregate_engine_logging: object
    show_hidden_metrics_for_version: object
    collect_detailed_traces: object
    kv_cache_metrics: object
    kv_cache_metrics_sample: object
    cudagraph_metrics: object
    enable_mfu_metrics: object
    enable_layerwise_nvtx_tracing: object
    enable_logging_iteration_details: object
    additional_config: object
    fail_on_environ_validation: object


class EngineOptions(NeutralOptions, total=False):
    """`model` is an argument of its own."""

    served_model_name: str | None
    tokenizer: str | PathLike[str] | None
    skip_tokenizer_init: bool
    trust_remote_code: bool
    revision: str | None
    tokenizer_revision: str | None
    hf_overrides: dict[str, Any] | None
    dtype: str
    quantization: Quantization | None
    seed: int | None
    max_model_len: int | str | None
    max_logprobs: int
    logprobs_mode: LogprobsMode
    logits_processors: Sequence[str | type] | None
    enable_prompt_embeds: bool
    generation_config: str | PathLike[str]
    override_generation_config: dict[str, Any] | None
    block_size: int | None
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    enable_prefix_caching: bool | None
    enable_chunked_prefill: bool | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    long_prefill_token_threshold: int
    scheduling_policy: SchedulingPolicy
    stream_interval: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    enforce_eager: bool
    enable_sleep_mode: bool
    disable_log_stats: bool
    core_address: str | None
    engine_restart: int
    shutdown_timeout: float
    step_timeout: float | None
    otlp_traces_endpoint: str | None
    speculative_config: dict[str, Any] | None
    profiler_config: dict[str, Any] | None


def showing_engine_options(**defaults: Any) -> Callable[[F], F]:
    """Decorates an `__init__(self, model, ..., **engine_args)`: its signature names every option that has a meaning.

    `defaults` are those that differ from `EngineArgs`'.
    """
    without_meaning = {option.name for option in dataclasses.fields(NeutralArgs)}
    named = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(option.name, option.default),
            annotation=option.type,
        )
        for option in dataclasses.fields(EngineArgs)
        if option.name not in {"model", *without_meaning}
    ]

    def decorate(init: F) -> F:
        signature = inspect.signature(init)
        *own, others = signature.parameters.values()
        others = others.replace(annotation=Unpack[NeutralOptions])
        init.__signature__ = signature.replace(parameters=[*own, *named, others])  # type: ignore[attr-defined]
        return init

    return decorate


def refuse_unknown_options(given: Mapping[str, object]) -> None:
    """Raises TypeError for an option that `EngineArgs` does not have, with the one that may be meant."""
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise TypeError(
                f"LLM got an unexpected keyword argument {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
            )
