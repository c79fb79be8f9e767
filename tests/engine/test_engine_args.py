"""`EngineArgs`: defaults, limits, and errors that name field, value and range."""

import argparse
import dataclasses
import inspect
import math
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import corespan
from corespan import LLM, AsyncEngineArgs, EngineArgs, VLLMValidationError
from corespan.engine.engine_args import AUTO, UsageContext, model_length_limit, parse_max_model_len, resolve_dtype
from corespan.engine.neutral_args import NeutralArgs

CACHE = Path(corespan.__file__).parent / ".mypy_cache" / "programs"


@pytest.fixture
def config_of(tiny_llama_dir: str) -> Any:
    return lambda usage=UsageContext.ENGINE_CONTEXT, **fields: EngineArgs(
        model=tiny_llama_dir, **fields
    ).create_engine_config(usage)


@pytest.mark.parametrize(
    ("given", "length"),
    [
        (None, None),
        (4096, 4096),
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25600),
        ("2M", 2 * 1024**2),
        (-1, AUTO),
        ("-1", AUTO),
        ("auto", AUTO),
    ],
)
def test_max_model_len_is_read_in_every_spelling(given: Any, length: int | None) -> None:
    assert parse_max_model_len(given) == length


@pytest.mark.parametrize("given", [0, -2, "", "k", "1kk", "-2", True, 1.5, [1]])
def test_a_max_model_len_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        parse_max_model_len(given)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("hf_config", "limit"),
    [
        ({"max_position_embeddings": 1024}, 1024),
        ({"max_position_embeddings": 1024, "max_seq_len": 512}, 512),
        ({"max_position_embeddings": 1024, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 4096),
        ({"max_position_embeddings": 1024, "rope_scaling": {"type": "linear", "factor": 2.0}}, 2048),
        ({"max_position_embeddings": 1024, "rope_parameters": LLAMA3}, 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": None}, 1024),
    ],
)
def test_the_models_own_limit_counts_linear_scaling_only(hf_config: dict[str, Any], limit: int) -> None:
    assert model_length_limit(hf_config) == limit


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_theta": 123.0}, r"rope_theta=123\.0 and rope_parameters\.rope_theta="),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "override rope_parameters instead"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "replaces the dict with the model's rope_theta"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
    ],
)
def test_a_rotary_override_without_effect_is_refused_before_a_core_is_started(
    config_of: Any, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(hf_overrides=overrides)


@pytest.mark.parametrize("figure", ["1k", -1, 0.5, [1024], True, math.nan, math.inf])
def test_a_limit_that_is_no_number_of_tokens_is_named(config_of: Any, figure: Any) -> None:
    with pytest.raises(ValueError, match="^max_position_embeddings must be a number of tokens, got "):
        config_of(hf_overrides={"max_position_embeddings": figure})


def test_a_longer_max_model_len_than_the_models_needs_the_switch(
    config_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="1025.*1024"):
        config_of(max_model_len=1025)

    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    config = config_of(max_model_len=1025)
    assert (config.model_config.max_model_len, config.scheduler_config.max_model_len) == (1025, 1025)


@pytest.mark.parametrize(
    ("asked", "checkpoint", "expected"),
    [
        ("auto", {"torch_dtype": "float32"}, "float32"),
        ("auto", {"dtype": "bfloat16"}, "bfloat16"),
        ("auto", {"torch_dtype": "float16"}, "bfloat16"),
        ("auto", {}, "float32"),
        ("half", {}, "float16"),
        ("float", {}, "float32"),
        ("torch.bfloat16", {}, "bfloat16"),
    ],
)
def test_dtypes_are_resolved_against_the_checkpoint(asked: str, checkpoint: dict[str, Any], expected: str) -> None:
    assert resolve_dtype(asked, checkpoint) == expected


@pytest.mark.parametrize(
    ("usage", "fields", "limits"),
    [
        (UsageContext.LLM_CLASS, {}, (4096, 256)),
        (UsageContext.OPENAI_API_SERVER, {}, (2048, 128)),
        (UsageContext.ENGINE_CONTEXT, {}, (2048, 128)),
        (UsageContext.LLM_CLASS, {"max_num_seqs": 2, "max_model_len": 100}, (200, 2)),
        (UsageContext.LLM_CLASS, {"max_num_batched_tokens": 64}, (64, 64)),
        (UsageContext.ENGINE_CONTEXT, {"max_num_seqs": 3000, "max_model_len": 10}, (3000, 3000)),
        (UsageContext.ENGINE_CONTEXT, {"max_num_seqs": 1, "enable_chunked_prefill": False}, (1024, 1)),
    ],
)
def test_batch_limits_default_by_usage_and_fit_each_other(
    config_of: Any, usage: UsageContext, fields: dict[str, Any], limits: tuple[int, int]
) -> None:
    scheduler = config_of(usage, **fields).scheduler_config

    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == limits


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int4"),
        ("quantization", "fp3"),
        ("logprobs_mode", "loud"),
        ("scheduling_policy", "lifo"),
        ("max_logprobs", -2),
        ("block_size", 0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0),
        ("kv_cache_memory_bytes", 0),
        ("num_gpu_blocks_override", -1),
        ("max_num_seqs", 0),
        ("max_num_seqs", "4"),
        ("max_num_batched_tokens", 0),
        ("long_prefill_token_threshold", -1),
        ("stream_interval", 0),
        ("engine_restart", -1),
        ("shutdown_timeout", -1.0),
        ("step_timeout", float("nan")),
        ("generation_config", "/no/such/folder"),
        ("seed", "one"),
        ("step_timeout", 0),
        ("shutdown_timeout", None),
        ("max_model_len", "9" * 400),
        ("core_address", "tcp://0.0.0.0"),
    ],
)
def test_values_out_of_range_name_the_field(config_of: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        config_of(**{field: value})


NOT_TEXTS = [5, 1.5, True, [], ["a"], {}, b"a", "\ud800"]
WRONG_TYPES: dict[str, list[Any]] = {
    **dict.fromkeys(["served_model_name", "revision", "tokenizer_revision"], NOT_TEXTS),
    **dict.fromkeys(["core_address", "otlp_traces_endpoint"], NOT_TEXTS),
    "tokenizer": ["", *NOT_TEXTS],
    **dict.fromkeys(["model", "generation_config"], [None, "", *NOT_TEXTS]),
    **dict.fromkeys(["skip_tokenizer_init", "trust_remote_code", "enable_prompt_embeds"], [None, 0, "no"]),
    "disable_log_stats": [None, 0, "no"],
    **dict.fromkeys(["enable_prefix_caching", "enable_chunked_prefill", "enable_log_requests"], [0, "no"]),
    **dict.fromkeys(["hf_overrides", "override_generation_config"], [5, "a", ["a"], {5: 1}, {"a": object()}]),
    "logits_processors": [5, True, "a.b:C", {"a.b:C"}, [5], [Path()]],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG_TYPES.items() for value in values]
)
def test_values_of_a_wrong_type_name_field_value_and_what_will_do(tiny_llama_dir: str, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be .*, got "):
        AsyncEngineArgs(**{"model": tiny_llama_dir, field: value}).create_engine_config()


def test_files_and_folders_may_be_paths(tiny_llama_dir: str) -> None:
    folder = Path(tiny_llama_dir)
    of_paths = EngineArgs(model=folder, tokenizer=folder, generation_config=folder).create_engine_config()
    of_texts = EngineArgs(model=tiny_llama_dir, tokenizer=tiny_llama_dir, generation_config=tiny_llama_dir)
    assert of_paths == of_texts.create_engine_config()


def test_contradicting_limits_are_refused(config_of: Any) -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        config_of(max_num_batched_tokens=8, max_num_seqs=16)
    with pytest.raises(ValueError, match="chunked prefill"):
        config_of(max_num_batched_tokens=128, max_num_seqs=4, enable_chunked_prefill=False)


def test_a_model_path_that_does_not_exist_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="no_such_model"):
        EngineArgs(model="/tmp/no_such_model.gguf").create_engine_config()


def test_overrides_replace_entries_of_the_models_config(config_of: Any) -> None:
    model = config_of(hf_overrides={"max_position_embeddings": 77}).model_config

    assert model.max_model_len == 77
    assert model.hf_config["max_position_embeddings"] == 77


def test_a_tokenizer_may_come_from_another_folder(config_of: Any, tiny_llama_dir: str, tmp_path: Any) -> None:
    from tiny_llama import write_tokenizer

    write_tokenizer(tmp_path)

    assert config_of().model_config.tokenizer == tiny_llama_dir
    assert config_of(tokenizer=str(tmp_path)).model_config.tokenizer == str(tmp_path)
    assert config_of(skip_tokenizer_init=True).model_config.tokenizer is None


def test_unknown_options_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="tensor_parallel_sise"):
        EngineArgs(tensor_parallel_sise=2)  # type: ignore[call-arg]


def test_async_engine_args_add_request_logging() -> None:
    assert AsyncEngineArgs(enable_log_requests=True).model == EngineArgs().model


def test_logits_processors_are_classes_or_paths(config_of: Any) -> None:
    for given in (None, []):
        assert config_of(logits_processors=given).model_config.logits_processors == []
    paths = config_of(logits_processors=["a.b:C", Path]).model_config.logits_processors
    assert paths == ["a.b:C", f"{Path.__module__}:Path"]


def test_options_that_mean_nothing_here_are_taken_at_neutral_values(config_of: Any) -> None:
    plain = config_of()
    defaults = {option.name: getattr(EngineArgs(), option.name) for option in dataclasses.fields(NeutralArgs)}
    given = {
        "tokenizer_mode": "hf",
        "async_scheduling": True,
        "data_parallel_rank": 0,
        "cpu_offload_gb": 0.0,
        "compilation_config": {},
        "disable_custom_all_reduce": True,
    }

    assert config_of(**defaults) == plain
    assert config_of(**dict.fromkeys(defaults)) == plain
    assert config_of(**given) == plain


@pytest.mark.parametrize("option", dataclasses.fields(NeutralArgs), ids=lambda option: option.name)
def test_other_values_of_theirs_are_refused_with_the_reason(config_of: Any, option: Any) -> None:
    for value in ("turbo", 17, {"own": 1}, *([] if True in option.metadata["neutral"] else [True])):
        with pytest.raises(VLLMValidationError, match=rf"^{option.name} is .* must be .*: \w") as raised:
            config_of(**{option.name: value})
        assert (raised.value.parameter, raised.value.value) == (option.name, value)


def test_help_shows_the_options_that_have_a_meaning() -> None:
    parameters = inspect.signature(LLM).parameters

    named = {name for name, parameter in parameters.items() if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
    assert named == {"stat_loggers", *get_type_hints(EngineArgs)} - set(get_type_hints(NeutralArgs))
    assert parameters["gpu_memory_utilization"].default == EngineArgs.gpu_memory_utilization
    assert parameters["disable_log_stats"].default is True
    assert "max_model_len: int | str | None = None" in pydoc.render_doc(LLM)


def test_a_type_checker_knows_the_options_of_llm(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from corespan import LLM, BeamSearchParams, StructuredOutputsParams, TextPrompt, TokensPrompt\n"
        "prompts: list[TextPrompt | TokensPrompt] = [TextPrompt(prompt='a'), TokensPrompt(prompt_token_ids=[1])]\n"
        "BeamSearchParams(beam_width=2, max_tokens=3), StructuredOutputsParams(choice=['a'])\n"
        "LLM('m', max_model_len=4, tokenizer_mode='auto').generate(prompts)\n"
        "LLM('m', max_model_length=4)\n"
        "LLM('m', max_num_seqs='4')\n"
    )
    path = tmp_path / "path"
    path.mkdir()
    (path / "corespan").symlink_to(Path(corespan.__file__).parent, target_is_directory=True)
    check = ["mypy", "--strict", "--config-file=", "--follow-imports=silent", "--cache-dir", str(CACHE), str(program)]

    done = subprocess.run(
        [sys.executable, "-m", *check], capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(path)}
    )

    found = re.findall(r"program.py:(\d+): error: (.*?)  ", done.stdout)
    assert [line for line, _ in found] == ["5", "6"], done.stdout + done.stderr
    assert "max_model_length" in found[0][1] and "max_num_seqs" in found[1][1]


def test_a_command_line_has_an_option_for_every_field(tiny_llama_dir: str) -> None:
    parser = argparse.ArgumentParser()
    assert AsyncEngineArgs.add_cli_args(parser) is parser
    former = {option.name for option in dataclasses.fields(NeutralArgs) if option.metadata["former"]}
    defaults = vars(AsyncEngineArgs())
    assert vars(parser.parse_args([])) == {name: defaults[name] for name in defaults if name not in former}
    parser.add_argument("--device")  # a script's own
    command = (
        f"--model {tiny_llama_dir} -tp 1 --max-model-len 4k --no-enable-prefix-caching --gpu-memory-utilization 0.5 "
        '--hf-overrides {"a":[1]} --logits-processors a:B c:D --quantization int8 --async-scheduling --seed 3 '
        "--device its-own --tokenizer-mode auto --speculative-config null --cpu-offload-gb 0 --enable-log-requests"
    )

    args = parser.parse_args(command.split())

    assert AsyncEngineArgs.from_cli_args(args) == AsyncEngineArgs(
        model=tiny_llama_dir,
        max_model_len="4k",
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
        hf_overrides={"a": [1]},
        logits_processors=["a:B", "c:D"],
        quantization="int8",
        async_scheduling=True,
        seed=3,
        enable_log_requests=True,
    )
    assert EngineArgs.from_cli_args(argparse.Namespace(model="m", other=1)) == EngineArgs("m")
    assert "{int8,gguf,dequantize}" in parser.format_help()


def test_profiles_go_where_the_configuration_says(config_of: Any, tmp_path: Path) -> None:
    config = config_of(profiler_config={"profiler": "torch", "torch_profiler_dir": str(tmp_path)})

    assert config.observability_config.torch_profiler_dir == str(tmp_path)
    for wrong in ({"profiler": "cuda"}, {"torch_profiler_dir": 3}, {"delay_iterations": 2}, "torch"):
        with pytest.raises(ValueError, match="profiler_config"):
            config_of(profiler_config=wrong)
