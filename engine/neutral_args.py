"""vLLM's engine options that mean nothing here: each is accepted at the values that ask for what the engine does
anyway, and refused, with the reason, at any other. `EngineArgs` inherits them.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..protocol.errors import VLLMValidationError

_ONE_WORKER = "the engine has one worker, on one machine"
_ONE_DEVICE = "the model and its cache stay in this machine's memory"
_NO_EXPERTS = "there are no mixture-of-experts models"
_LORA = "adapters change the layers of the model's text part, and go by lora_request"
_NO_DRAFTS = "speculative_config says it all"
_PICTURES = "models take text and pictures; see docs/pictures.md"
_NOT_COMPILED = "nothing is compiled or captured: the kernels are native code"
_CACHE_TYPE = "the KV cache has the type that the model is computed in"
_NO_MAMBA = "there are no state-space models"
_OWN_SCHEDULER = "the scheduler has no such option"
_OWN_TOKENIZER = "tokenizers are read from tokenizer.json, with transformers where there is none"
_FROM_FILES = "how a model is stored is told by its files"
_NO_PLUGINS = "workers, executors and schedulers are the engine's own"
_OFFLINE = "there is no server"
_NO_METER = "there is no such measurement"


def _only(*neutral: Any, because: str, former: bool = False) -> Any:
    """A field with the first of these values as its default, which takes the others too."""
    default = neutral[0]
    metadata = {"neutral": neutral, "because": because, "former": former}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, repr=False, metadata=metadata)
    return dataclasses.field(default=default, repr=False, metadata=metadata)


def _former(*neutral: Any, because: str) -> Any:
    """The same, of former versions of vLLM: no option on a command line, where a script may have one of that name."""
    return _only(*neutral, because=because, former=True)


@dataclass(kw_only=True)
class NeutralArgs:
    """None stands for the default everywhere."""

    task: object = _former("auto", "generate", because="use runner and convert")
    override_pooler_config: object = _former(None, because="use pooler_config")
    tokenizer_mode: object = _only("auto", "hf", because=_OWN_TOKENIZER)
    config_format: object = _only("auto", "hf", because=_FROM_FILES)
    hf_config_path: object = _only(None, because="config.json is read from the model's folder; use hf_overrides")
    rope_scaling: object = _former({}, because="use hf_overrides")
    rope_theta: object = _former(None, because="use hf_overrides")
    hf_token: object = _only(None, because="set HF_TOKEN in the environment")
    code_revision: object = _only(None, because="code that comes with a model is not run")
    load_format: object = _only("auto", because=_FROM_FILES)
    download_dir: object = _only(None, because="set HF_HOME, or CORESPAN_CACHE for short names")
    ignore_patterns: object = _only(None, "original/**/*", [], ["original/**/*"], because=_FROM_FILES)
    model_loader_extra_config: object = _only({}, because=_FROM_FILES)
    safetensors_load_strategy: object = _only(None, "lazy", because=_FROM_FILES)
    pt_load_map_location: object = _only("cpu", because="weights are read from safetensors and GGUF")
    use_tqdm_on_load: object = _only(True, False, because="loading shows no bar")
    model_impl: object = _only("auto", "vllm", because="models are the engine's own")
    device: object = _former("auto", "cpu", because="models run on the CPU")
    quantization_config: object = _only(None, because="quantization is chosen by its name alone")
    disable_sliding_window: object = _only(False, because="there is no sliding window to disable")
    disable_cascade_attn: object = _only(False, True, because="there is no cascade attention")
    override_attention_dtype: object = _only(None, because=_NOT_COMPILED)
    reasoning_parser: object = _only("", because=_OFFLINE)
    reasoning_parser_plugin: object = _only("", because=_OFFLINE)
    io_processor_plugin: object = _only(None, because=_NO_PLUGINS)
    logits_processor_pattern: object = _former(None, because="hand over logits_processors")
    structured_outputs_config: object = _only(
        None,
        {},
        {"backend": "auto"},
        {"backend": "guidance"},
        because="grammars are compiled by llguidance (guidance); options stand in StructuredOutputsParams",
    )
    guided_decoding_backend: object = _former(
        "auto", "guidance", because="grammars are compiled by llguidance (guidance)"
    )

    tensor_parallel_size: object = _only(1, because=_ONE_WORKER)
    pipeline_parallel_size: object = _only(1, because=_ONE_WORKER)
    data_parallel_size: object = _only(1, because=_ONE_WORKER)
    data_parallel_rank: object = _only(None, 0, because=_ONE_WORKER)
    data_parallel_start_rank: object = _only(None, 0, because=_ONE_WORKER)
    data_parallel_size_local: object = _only(None, 1, because=_ONE_WORKER)
    data_parallel_address: object = _only(None, because=_ONE_WORKER)
    data_parallel_rpc_port: object = _only(None, because=_ONE_WORKER)
    data_parallel_hybrid_lb: object = _only(False, because=_ONE_WORKER)
    data_parallel_external_lb: object = _only(False, because=_ONE_WORKER)
    data_parallel_backend: object = _only("mp", because=_ONE_WORKER)
    prefill_context_parallel_size: object = _only(1, because=_ONE_WORKER)
    decode_context_parallel_size: object = _only(1, because=_ONE_WORKER)
    dcp_kv_cache_interleave_size: object = _only(1, because=_ONE_WORKER)
    cp_kv_cache_interleave_size: object = _only(1, because=_ONE_WORKER)
    distributed_executor_backend: object = _only(None, "uni", "mp", because=_ONE_WORKER)
    distributed_timeout_seconds: object = _only(None, because=_ONE_WORKER)
    master_addr: object = _only("127.0.0.1", because=_ONE_WORKER)
    master_port: object = _only(29501, because=_ONE_WORKER)
    nnodes: object = _only(1, because=_ONE_WORKER)
    node_rank: object = _only(0, because=_ONE_WORKER)
    numa_bind: object = _only(False, because="bind the process with numactl")
    disable_custom_all_reduce: object = _only(False, True, because=_ONE_WORKER)
    max_parallel_loading_workers: object = _only(None, because=_ONE_WORKER)
    ray_workers_use_nsight: object = _only(False, because=_ONE_WORKER)
    worker_cls: object = _only("auto", because=_NO_PLUGINS)
    worker_extension_cls: object = _only("", because=_NO_PLUGINS)
    scheduler_cls: object = _only(None, because=_NO_PLUGINS)
    enable_expert_parallel: object = _only(False, because=_NO_EXPERTS)
    enable_eplb: object = _only(False, because=_NO_EXPERTS)
    eplb_config: object = _only(None, {}, because=_NO_EXPERTS)
    expert_placement_strategy: object = _only("linear", because=_NO_EXPERTS)
    all2all_backend: object = _only(None, because=_NO_EXPERTS)
    moe_backend: object = _only("auto", because=_NO_EXPERTS)
    enable_return_routed_experts: object = _only(False, because=_NO_EXPERTS)
    enable_dbo: object = _only(False, because=_NO_EXPERTS)
    ubatch_size: object = _only(0, because=_NO_EXPERTS)
    dbo_decode_token_threshold: object = _only(32, because=_NO_EXPERTS)
    dbo_prefill_token_threshold: object = _only(512, because=_NO_EXPERTS)
    num_redundant_experts: object = _former(None, 0, because=_NO_EXPERTS)

    kv_cache_dtype: object = _only("auto", because=_CACHE_TYPE)
    calculate_kv_scales: object = _only(False, because=_CACHE_TYPE)
    prefix_caching_hash_algo: object = _only("sha256", "sha256_cbor", because="blocks are known by a hash of one kind")
    swap_space: object = _former(None, 0, 4, because="sequences are not swapped out")
    cpu_offload_gb: object = _only(0, because=_ONE_DEVICE)
    offload_group_size: object = _only(0, because=_ONE_DEVICE)
    offload_num_in_group: object = _only(1, because=_ONE_DEVICE)
    offload_prefetch_step: object = _only(1, because=_ONE_DEVICE)
    offload_params: object = _only(None, because=_ONE_DEVICE)
    kv_offloading_size: object = _only(None, because=_ONE_DEVICE)
    kv_offloading_backend: object = _only(None, "native", because=_ONE_DEVICE)
    kv_sharing_fast_prefill: object = _only(False, because=_ONE_DEVICE)
    kv_transfer_config: object = _only(None, because=_ONE_DEVICE)
    kv_events_config: object = _only(None, because=_ONE_DEVICE)
    ec_transfer_config: object = _only(None, because=_ONE_DEVICE)
    weight_transfer_config: object = _only(None, because=_ONE_DEVICE)
    mamba_cache_dtype: object = _only("auto", because=_NO_MAMBA)
    mamba_ssm_cache_dtype: object = _only("auto", because=_NO_MAMBA)
    mamba_block_size: object = _only(None, because=_NO_MAMBA)
    mamba_cache_mode: object = _only("none", because=_NO_MAMBA)

    async_scheduling: object = _only(None, True, False, because=_OWN_SCHEDULER)
    max_num_partial_prefills: object = _only(1, because=_OWN_SCHEDULER)
    max_long_partial_prefills: object = _only(1, because=_OWN_SCHEDULER)
    num_scheduler_steps: object = _former(1, because=_OWN_SCHEDULER)
    preemption_mode: object = _former(None, "recompute", because="what is preempted is computed again")
    use_v2_block_manager: object = _former(True, because=_OWN_SCHEDULER)
    disable_chunked_mm_input: object = _only(False, because="prompts are cut through pictures as through text")
    disable_hybrid_kv_cache_manager: object = _only(None, False, True, because="windows always give their blocks back")
    scheduler_reserve_full_isl: object = _only(True, because=_OWN_SCHEDULER)
    watermark: object = _only(0.0, because=_OWN_SCHEDULER)
    prefill_schedule_interval: object = _only(1, because=_OWN_SCHEDULER)
    enforce_eager: object = _only(False, True, because=_NOT_COMPILED)
    enable_sleep_mode: object = _only(False, True, because="every engine can sleep")
    max_seq_len_to_capture: object = _former(None, 8192, because=_NOT_COMPILED)
    compilation_config: object = _only(None, {}, 0, because=_NOT_COMPILED)
    optimization_level: object = _only(2, 0, 1, 3, because=_NOT_COMPILED)
    performance_mode: object = _only("balanced", because=_OWN_SCHEDULER)
    cudagraph_capture_sizes: object = _only(None, because=_NOT_COMPILED)
    max_cudagraph_capture_size: object = _only(None, because=_NOT_COMPILED)
    attention_backend: object = _only(None, because=_NOT_COMPILED)
    attention_config: object = _only(None, {}, because=_NOT_COMPILED)
    kernel_config: object = _only(None, {}, because=_NOT_COMPILED)

    spec_method: object = _only(None, because=_NO_DRAFTS)
    spec_model: object = _only(None, because=_NO_DRAFTS)
    spec_tokens: object = _only(None, because=_NO_DRAFTS)
    lora_extra_vocab_size: object = _former(256, because=_LORA)
    enable_tower_connector_lora: object = _only(False, because=_LORA)
    specialize_active_lora: object = _only(False, because=_LORA)
    fully_sharded_loras: object = _only(False, because=_LORA)
    default_mm_loras: object = _only(None, because=_LORA)
    mm_processor_cache_type: object = _only("lru", because=_PICTURES)
    mm_shm_cache_max_object_size_mb: object = _only(128, because=_PICTURES)
    mm_encoder_tp_mode: object = _only("weights", because=_PICTURES)
    mm_encoder_attn_backend: object = _only(None, because=_PICTURES)
    mm_encoder_only: object = _only(False, because=_PICTURES)
    media_io_kwargs: object = _only(None, {}, because=_PICTURES)
    skip_mm_profiling: object = _only(False, True, because=_PICTURES)
    interleave_mm_strings: object = _only(False, because=_PICTURES)
    tokens_only: object = _only(False, because="use skip_tokenizer_init")
    video_pruning_rate: object = _only(None, because=_PICTURES)

    disable_log_requests: object = _former(
        True, because="requests are logged with AsyncEngineArgs(enable_log_requests=True)"
    )
    aggregate_engine_logging: object = _only(False, True, because=_ONE_WORKER)
    show_hidden_metrics_for_version: object = _only(None, because="no metrics are hidden")
    collect_detailed_traces: object = _only(None, because="use start_profile()")
    kv_cache_metrics: object = _only(False, because=_NO_METER)
    kv_cache_metrics_sample: object = _only(0.01, because=_NO_METER)
    cudagraph_metrics: object = _only(False, because=_NO_METER)
    enable_mfu_metrics: object = _only(False, because=_NO_METER)
    enable_layerwise_nvtx_tracing: object = _only(False, because="use start_profile()")
    enable_logging_iteration_details: object = _only(False, because=_NO_METER)
    additional_config: object = _only({}, because=_NO_PLUGINS)
    fail_on_environ_validation: object = _only(False, because="environment variables are checked where they are read")

    def _check_neutral(self) -> None:
        """Raises VLLMValidationError with the reason why another value can have no effect."""
        for option in dataclasses.fields(NeutralArgs):
            value = getattr(self, option.name)
            neutral = option.metadata["neutral"]
            if value is None or any(
                value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
            ):
                continue
            allowed = " or ".join(repr(each) for each in neutral)
            raise VLLMValidationError(
                f"{option.name} is {value!r}; it must be {allowed}: {option.metadata['because']}",
                parameter=option.name,
                value=value,
            )
