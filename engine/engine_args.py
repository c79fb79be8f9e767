"""`EngineArgs`: every option of an engine in one flat dataclass, and their way into a checked `VllmConfig`.

`LLM`, `LLMEngine.from_engine_args`, `AsyncLLM.from_engine_args` and the command line build engines from it.
"""

import argparse
import copy
import enum
import json
import math
import os
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

from ..client.standard_streams import fill_standard_descriptors
from ..protocol import envs
from ..protocol.config import (
    CacheConfig,
    Dtype,
    LogprobsMode,
    LoRAConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    Quantization,
    SchedulerConfig,
    SchedulingPolicy,
    VllmConfig,
)
from ..protocol.param_checks import (
    as_bool,
    as_int,
    as_seconds,
    float_in,
    int_at_least,
    is_encodable,
    is_plain_dict,
    reject,
)
from ..protocol.pooling import PoolerConfig
from ..protocol.user_classes import end_script_at_engine, path_of
from ..shared.composite_config import with_text_fields
from ..shared.rope_config import override_config, stretched_length
from .cli_args import add_field_arguments, kinds_of, option
from .model_files.model_source import ModelFiles, resolve_model
from .model_files.sentence_transformers import SentenceTransformer
from .model_files.short_names import DEFAULT_MODEL
from .multimodal_options import PictureArgs
from .neutral_args import NeutralArgs
from .pooling_options import Convert, Runner, pooler_spec
from .speculation import parse_speculative_config

AUTO = -1
"""As `max_model_len`: the model's own limit, or less where the KV cache is too small for it."""

MAX_LORA_RANK = 512

COUNTS_FROM_PADDING = ("roberta", "xlm-roberta")
"""Model types whose places begin behind the padding token's, so that as many fewer are left."""

DEFAULT_EXECUTOR_CLASS = f"{__name__.partition('.')[0]}.core.executor.uniproc_executor:UniProcExecutor"
"""Named, not imported: the user's process never loads it where the core has one of its own."""

PROCESSOR_GROUPS = ("corespan.logits_processors", "vllm.logits_processors")
"""Entry points of installed packages under which logits processors are found; every engine has those."""

P = TypeVar("P", bound=argparse.ArgumentParser)

_DTYPES: dict[str, Dtype] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
)
_LOWEST = {"max_logprobs": -1, "long_prefill_token_threshold": 0, "engine_restart": 0}  # of other whole numbers: 1
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_END_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")


class UsageContext(enum.Enum):
    """Who builds the engine. Decides the batch limits where none are given."""

    LLM_CLASS = "LLM_CLASS"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


_BATCH_DEFAULTS = {  # tokens a step, requests at once
    UsageContext.LLM_CLASS: (4096, 256),
    UsageContext.OPENAI_API_SERVER: (2048, 128),
    UsageContext.ENGINE_CONTEXT: (2048, 128),
}


@dataclass
class EngineArgs(PictureArgs, NeutralArgs):
    """An engine's options under vLLM's names. `create_engine_config` checks them; None means "work it out"."""

    model: str | os.PathLike[str] = option(DEFAULT_MODEL, "short name, folder, .gguf file or id on the model hub")
    served_model_name: str | None = option(None, "name of the model in answers and metrics [the model as given]")
    tokenizer: str | os.PathLike[str] | None = option(
        None, "folder or hub id of a tokenizer in place of the model's own"
    )
    skip_tokenizer_init: bool = option(False, "do without a tokenizer: token ids in, token ids out")
    trust_remote_code: bool = option(False, "let a tokenizer run the code that comes with it")
    revision: str | None = option(None, "branch, tag or commit of the model on the hub")
    tokenizer_revision: str | None = option(None, "branch, tag or commit of the tokenizer on the hub")
    hf_overrides: dict[str, Any] | None = option(None, "entries that replace those of the model's config.json")
    dtype: str = option(
        "auto", "type to compute in: bfloat16, float16 or float32; auto: float32 for float32 checkpoints, else bfloat16"
    )
    quantization: Quantization | None = option(
        None, "how weights are kept; a quantised GGUF file keeps its own blocks unless dequantize is said"
    )
    runner: Runner = option("auto", "whether the model generates or pools; auto: as it was made for")
    convert: Convert = option("auto", "what a model that pools is used as, where it was made for something else")
    pooler_config: PoolerConfig | dict[str, Any] | None = option(
        None, "how a model pools, where its files are not to decide"
    )
    seed: int | None = option(0, "seed of requests that have none: they repeat when the engine does; None: they do not")
    max_model_len: int | str | None = option(
        None, "most tokens of a sequence, also as 32k or 32K; auto or -1: what the memory holds [the model's own limit]"
    )
    max_logprobs: int = option(20, "most log-probabilities that a request may ask for at a position; -1: no limit")
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs",
        "what is reported as log-probabilities: before or after penalties, masks and temperature; or the logits",
    )
    logits_processors: Sequence[str | type] | None = option(None, "classes that change logits, as package.module:Class")
    enable_prompt_embeds: bool = option(False, "take embeddings in place of a prompt's token ids")
    generation_config: str | os.PathLike[str] = option(
        "auto", "where sampling defaults come from: auto (the model's own), vllm (none) or a folder"
    )
    override_generation_config: dict[str, Any] | None = option(
        None, "entries that replace those of the generation config"
    )
    block_size: int | None = option(None, "tokens in a block of the KV cache [16]")
    gpu_memory_utilization: float = option(0.92, "share of the free memory that weights and KV cache may take together")
    kv_cache_memory_bytes: int | None = option(None, "size of the KV cache in bytes [what the memory holds]")
    num_gpu_blocks_override: int | None = option(None, "number of blocks of the KV cache [what the memory holds]")
    enable_prefix_caching: bool | None = option(
        None, "let prompts that begin alike share what is computed of them [on]"
    )
    enable_chunked_prefill: bool | None = option(
        None, "let a long prompt be computed in pieces, beside other requests [on]"
    )
    max_num_batched_tokens: int | None = option(
        None, "most tokens computed in a step [by the use that is made of the engine]"
    )
    max_num_seqs: int | None = option(None, "most requests that run at once [by the use that is made of the engine]")
    long_prefill_token_threshold: int = option(0, "most tokens of one prompt in a step; 0: no limit of its own")
    scheduling_policy: SchedulingPolicy = option("fcfs", "who runs first: in the order of arrival, or by priority")
    stream_interval: int = option(1, "tokens between two outputs of a stream")
    enable_lora: bool = option(False, "take LoRA adapters")
    max_loras: int = option(1, "most different adapters in a step")
    max_lora_rank: int = option(16, "highest rank of an adapter")
    max_cpu_loras: int | None = option(None, "adapters kept in memory [max_loras]")
    lora_dtype: str = option("auto", "type of the adapters' weights; auto: the model's own")
    disable_log_stats: bool = option(False, "keep no statistics")
    core_address: str | None = option(None, "such as tcp://127.0.0.1: meet the core over TCP, encrypted [Unix sockets]")
    engine_restart: int = option(0, "how many times a core that died is replaced; its requests go on")
    shutdown_timeout: float = option(0.0, "seconds that running requests get at shutdown")
    step_timeout: float | None = option(None, "seconds after which a step counts as hung, and the core as dead [never]")
    otlp_traces_endpoint: str | None = option(
        None, "where traces go, such as http://localhost:4317; needs corespan[tracing]"
    )
    speculative_config: dict[str, Any] | None = option(
        None, 'drafts from the text so far: {"method": "ngram", "num_speculative_tokens": 3, ...}'
    )
    profiler_config: dict[str, Any] | None = option(
        None, '{"profiler": "torch", "torch_profiler_dir": folder of the traces}'
    )

    @classmethod
    def add_cli_args(cls, parser: P) -> P:
        """Adds an option for every field to a parser, which it returns."""
        add_field_arguments(parser, cls)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From what that parser parsed; fields that are missing there have their defaults."""
        given = vars(args)
        names = [field.name for field in fields(cls) if not field.metadata.get("former")]
        return cls(**{name: given[name] for name in names if name in given})

    def create_engine_config(self, usage_context: UsageContext = UsageContext.ENGINE_CONTEXT) -> VllmConfig:
        """The checked configuration; a model that is not on disk is fetched first.

        Raises ValueError naming field, value and legal range; FileNotFoundError for a model path that does not exist.
        """
        end_script_at_engine()
        fill_standard_descriptors()
        self._check_neutral()
        checked = copy.copy(self)
        for each in fields(self):
            if "neutral" not in each.metadata:
                setattr(checked, each.name, _checked(each.name, each.type, getattr(self, each.name)))
        return checked._engine_config(usage_context)

    def _engine_config(self, usage_context: UsageContext) -> VllmConfig:
        needs_tokenizer = not self.skip_tokenizer_init and self.tokenizer is None
        files = resolve_model(os.fspath(self.model), self.revision, with_tokenizer=needs_tokenizer)
        hf_config = with_text_fields(override_config(files.hf_config, self.hf_overrides or {}))
        if not isinstance(hf_config.get("vocab_size"), int):
            raise ValueError(f"the configuration of {files.path} has no vocab_size; is it a language model?")
        max_model_len = self._max_model_len(hf_config, files.sentence_transformer)
        model_config = self._model_config(files, hf_config, max_model_len)
        if model_config.pooler is not None and model_config.pooler.whole_prompts:
            self._compute_whole_prompts()
        scheduler_config = self._scheduler_config(usage_context, max_model_len)
        mm_config = self._multimodal_config(hf_config, files.path, scheduler_config.max_num_batched_tokens)
        return VllmConfig(
            model_config=model_config,
            cache_config=self._cache_config(),
            scheduler_config=scheduler_config,
            mm_config=mm_config if model_config.pooler is None else None,
            parallel_config=self._parallel_config(),
            lora_config=self._lora_config(resolve_dtype(self.dtype, hf_config)),
            speculative_config=parse_speculative_config(self.speculative_config),
            observability_config=ObservabilityConfig(
                otlp_traces_endpoint=self.otlp_traces_endpoint, torch_profiler_dir=self._torch_profiler_dir()
            ),
        )

    def _model_config(self, files: ModelFiles, hf_config: dict[str, Any], max_model_len: int) -> ModelConfig:
        tokenizer = self._tokenizer_folder(files)
        pooler = pooler_spec(
            self.runner, self.convert, self.pooler_config, hf_config, files.sentence_transformer, tokenizer
        )
        if pooler is not None:
            for name in ("logits_processors", "speculative_config"):
                if getattr(self, name) is not None:
                    reject(name, getattr(self, name), "None where the engine pools")
            for name in ("enable_lora", "enable_prompt_embeds"):
                if pooler.is_encoder and getattr(self, name):
                    reject(name, True, "False where the model is an encoder")
        return ModelConfig(
            model=files.path,
            served_model_name=self.served_model_name or os.fspath(self.model),
            tokenizer=tokenizer,
            hf_config=hf_config,
            generation_config=self._generation_config(files),
            dtype=resolve_dtype(self.dtype, hf_config),
            quantization=self.quantization,
            max_model_len=max_model_len,
            fit_max_model_len=parse_max_model_len(self.max_model_len) == AUTO,
            seed=self.seed,
            max_logprobs=self.max_logprobs,
            logprobs_mode=self.logprobs_mode,
            logits_processors=self._logits_processors() if pooler is None else [],
            enable_prompt_embeds=self.enable_prompt_embeds,
            trust_remote_code=self.trust_remote_code,
            pooler=pooler,
        )

    def _compute_whole_prompts(self) -> None:
        for name in ("enable_chunked_prefill", "enable_prefix_caching", "long_prefill_token_threshold"):
            if getattr(self, name):
                reject(name, getattr(self, name), "off: this model's tokens see those behind them")
        self.enable_chunked_prefill = self.enable_prefix_caching = False

    def _logits_processors(self) -> list[str]:
        """Import paths, of those that installed packages offer as entry points too."""
        given = [] if self.logits_processors is None else self.logits_processors
        if (
            isinstance(given, str)
            or not isinstance(given, Sequence)
            or not all(isinstance(each, (str, type)) for each in given)
        ):
            reject("logits_processors", given, "a list of classes or of 'package.module:Class'")
        named = [each if isinstance(each, str) else path_of(each) for each in given]
        return list(dict.fromkeys([*_installed_processors(), *named]))

    def _tokenizer_folder(self, files: ModelFiles) -> str | None:
        if self.skip_tokenizer_init:
            return None
        if self.tokenizer is None:
            return files.tokenizer_dir
        if (folder := Path(os.path.expanduser(self.tokenizer))).is_dir():
            return str(folder.resolve())
        return resolve_model(os.fspath(self.tokenizer), self.tokenizer_revision).tokenizer_dir

    def _generation_config(self, files: ModelFiles) -> dict[str, Any]:
        """What ends a generation always comes from the model's own file; `generation_config` governs the rest."""
        if self.generation_config == "auto":
            config = files.generation_config
        elif self.generation_config == "vllm":
            config = {key: files.generation_config[key] for key in _END_TOKENS if key in files.generation_config}
        else:
            path = Path(self.generation_config) / "generation_config.json"
            if not path.is_file():
                reject("generation_config", self.generation_config, "'auto', 'vllm' or a folder with the file")
            config = json.loads(path.read_text(encoding="utf-8"))
        return {**config, **(self.override_generation_config or {})}

    def _max_model_len(self, hf_config: dict[str, Any], sentence_transformer: SentenceTransformer | None) -> int:
        limit = model_length_limit(hf_config)
        if str(hf_config.get("model_type")) in COUNTS_FROM_PADDING:
            limit -= int(hf_config.get("pad_token_id") or 0) + 1
        if sentence_transformer is not None and sentence_transformer.max_seq_length is not None:
            limit = min(limit, sentence_transformer.max_seq_length)
        asked = parse_max_model_len(self.max_model_len)
        if asked is None or asked == AUTO:
            return limit
        if asked > limit and not envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN:
            raise ValueError(
                f"max_model_len is {asked}, but the model was made for at most {limit} tokens; "
                "set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 to go beyond that all the same"
            )
        return asked

    def _cache_config(self) -> CacheConfig:
        return CacheConfig(
            block_size=16 if self.block_size is None else self.block_size,
            gpu_memory_utilization=float_in("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, low_open=True),
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
            enable_prefix_caching=self.enable_prefix_caching is not False,
        )

    def _scheduler_config(self, usage_context: UsageContext, max_model_len: int) -> SchedulerConfig:
        chunked = self.enable_chunked_prefill is not False
        max_num_batched_tokens, max_num_seqs = self._batch_limits(usage_context, max_model_len, chunked)
        return SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            policy=self.scheduling_policy,
            stream_interval=self.stream_interval,
        )

    def _batch_limits(self, usage_context: UsageContext, max_model_len: int, chunked: bool) -> tuple[int, int]:
        """(max_num_batched_tokens, max_num_seqs): as given, or defaults that fit each other and `max_model_len`."""
        tokens, seqs = _BATCH_DEFAULTS[usage_context]
        if self.max_num_seqs is not None:
            seqs = self.max_num_seqs
        if self.max_num_batched_tokens is not None:
            tokens = self.max_num_batched_tokens
        else:
            tokens = max(min(tokens, seqs * max_model_len), seqs)
            if not chunked:
                tokens = max(tokens, max_model_len)
        return tokens, seqs if self.max_num_seqs is not None else min(seqs, tokens)

    def _lora_config(self, model_dtype: Dtype) -> LoRAConfig | None:
        if not self.enable_lora:
            return None
        if self.max_lora_rank > MAX_LORA_RANK:
            reject("max_lora_rank", self.max_lora_rank, f"an integer from 1 to {MAX_LORA_RANK}")
        if self.lora_dtype not in ("auto", model_dtype):
            reject("lora_dtype", self.lora_dtype, f"'auto' or the type the model is computed in, {model_dtype!r}")
        return LoRAConfig(
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            max_cpu_loras=self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras,
            lora_dtype=model_dtype,
        )

    def _torch_profiler_dir(self) -> str | None:
        config = self.profiler_config
        legal = 'None or {"profiler": "torch", "torch_profiler_dir": a folder}'
        if config is None:
            return None
        if not is_plain_dict(config) or not set(config) <= {"profiler", "torch_profiler_dir"}:
            reject("profiler_config", config, legal)
        folder = config.get("torch_profiler_dir")
        if config.get("profiler") not in (None, "torch") or not isinstance(folder, str | None):
            reject("profiler_config", config, legal)
        return os.path.abspath(folder) if folder else None

    def _parallel_config(self) -> ParallelConfig:
        if self.step_timeout is not None and as_seconds("step_timeout", self.step_timeout) == 0:
            reject("step_timeout", self.step_timeout, "None or more than 0 seconds")
        return ParallelConfig(
            core_address=self.core_address,
            engine_restart=self.engine_restart,
            shutdown_timeout=as_seconds("shutdown_timeout", self.shutdown_timeout),
            step_timeout=self.step_timeout,
        )


@dataclass
class AsyncEngineArgs(EngineArgs):
    """EngineArgs for `AsyncLLM`."""

    enable_log_requests: bool = option(False, "log each request")


def _checked(name: str, hint: Any, value: Any) -> Any:
    """`value` in the form in which it travels. Raises VLLMValidationError for what the type of its field excludes."""
    kinds = kinds_of(hint)
    kind = kinds[0]
    if value is None and types.NoneType in kinds:
        return None
    if kind is bool:
        return as_bool(name, value)
    if name == "seed":
        return as_int(name, value, "None or an integer")
    if kind is int and str not in kinds:
        return int_at_least(name, value, _LOWEST.get(name, 1))
    if get_origin(kind) is Literal and value not in get_args(kind):
        reject(name, value, f"one of {', '.join(map(repr, get_args(kind)))}")
    if get_origin(kind) is dict and not is_plain_dict(value):
        reject(name, value, "None or a dict from strings to plain data")
    if kinds == (str, types.NoneType) and not (isinstance(value, str) and is_encodable(value)):
        reject(name, value, "None or a string of valid Unicode")
    if os.PathLike[str] in kinds:
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or not is_encodable(os.fspath(value)):
            reject(name, value, "a non-empty string of valid Unicode, or a path")
    return value


def _installed_processors() -> list[str]:
    from importlib.metadata import entry_points

    points = entry_points()
    return [point.value for group in PROCESSOR_GROUPS for point in points.select(group=group)]


def parse_max_model_len(value: int | str | None) -> int | None:
    """Tokens, `AUTO`, or None. Accepts 4096, "4096", "1k" (1,000), "1K" (1,024), "25.6k", -1 and "auto"."""
    legal = "an integer of at least 1, a text such as '32k' or '32K', or -1 ('auto')"
    if value is None or value == "auto":
        return None if value is None else AUTO
    if isinstance(value, str):
        match = re.fullmatch(r"(-1|\d{1,18}(?:\.\d{1,18})?)([kmgKMG]?)", value.strip())
        if match is None:
            reject("max_model_len", value, legal)
        value = round(float(match[1]) * _SUFFIXES[match[2]])
    length = as_int("max_model_len", value, legal)
    if length != AUTO and length < 1:
        reject("max_model_len", value, legal)
    return length


def model_length_limit(hf_config: dict[str, Any]) -> int:
    """The longest sequence the model was made for, in tokens: its own figure, times the factor of linear scaling.

    Raises VLLMValidationError for a figure that is no number of tokens, ValueError for rotary settings that are not
    supported.
    """
    figures = {key: hf_config[key] for key in _LENGTH_KEYS if hf_config.get(key)}
    for key, figure in figures.items():
        if isinstance(figure, bool) or not isinstance(figure, (int, float)) or not 1 <= figure < math.inf:
            reject(key, figure, "a number of tokens")
    limits = [int(figure) for figure in figures.values()]
    return stretched_length(hf_config, min(limits, default=2048))


def resolve_dtype(dtype: object, hf_config: dict[str, Any]) -> Dtype:
    """The name of the type to compute in; `dtype` may also be a torch dtype.

    "auto" is float32 for a float32 checkpoint, and bfloat16 for 16-bit and quantised ones.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        checkpoint = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
        return "float32" if checkpoint in ("float32", "float") else "bfloat16"
    if name not in _DTYPES:
        reject("dtype", dtype, f"'auto' or one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
