"""Models with sliding windows, Mistral and Gemma 3, over the clients: contexts of many windows, with the memory of one,
give transformers' tokens."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prompts import greedy, token_ids, tokens
from reference import Reference
from tiny_llama import write_tokenizer
from tiny_models import build_model

from corespan import SamplingParams

WINDOW = 12
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all_layers": ("Mistral", {"sliding_window": WINDOW}),
    "five_of_six": (
        "Gemma3",
        {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW},
    ),
}
STEP = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
MAX_MODEL_LEN = 256
BLOCKS_OF_A_WINDOW = 3  # for the 11 tokens before a step that it reads, its 16, and where they begin: 16 tokens each
SMALLEST_CACHE = {"all_layers": BLOCKS_OF_A_WINDOW, "five_of_six": 5 * BLOCKS_OF_A_WINDOW + MAX_MODEL_LEN // 16}
"""Blocks with which a request of that many tokens can be computed."""


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model_dir(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(kind)
    family, options = MODELS[kind]
    build_model(folder, family, {**options, "vocab_size": 512})
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def transformers_model(model_dir: Path) -> Reference:
    return Reference(str(model_dir))


@pytest.fixture
def make_windowed(make_runner: Callable[..., Any], model_dir: Path) -> Callable[..., Any]:
    return lambda **engine_args: make_runner(model=str(model_dir), **STEP, **engine_args)


@pytest.fixture(scope="module")
def windowed(client_kind: str, model_dir: Path) -> Iterator[Any]:
    from clients import SMALL_ENGINE, Runner

    runner = Runner(client_kind, model=str(model_dir), **{**SMALL_ENGINE, **STEP})
    yield runner
    runner.shutdown()


def assert_greedy(model: Reference, prompt: list[int], output: list[int]) -> None:
    """Each token is what transformers, given those before, finds most likely."""
    best = model.logits(prompt + output[:-1]).argmax(-1).tolist()
    assert output == best[len(prompt) - 1 :]


def test_contexts_of_many_windows_equal_transformers(windowed: Any, transformers_model: Reference) -> None:
    prompts = [token_ids(length, seed=3) for length in (1, WINDOW, 50, 19 * WINDOW)]
    outputs = windowed.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(20))
    for prompt, output in zip(prompts, tokens(outputs), strict=True):
        assert_greedy(transformers_model, prompt, output)


def test_the_prefix_cache_serves_windows(windowed: Any, transformers_model: Reference) -> None:
    """Prompts that begin alike and part many windows later share what the last window before that needs."""
    windowed.call("reset_prefix_cache")
    stem = token_ids(200, seed=5)
    prompts = [stem, stem, stem[:100] + token_ids(40, seed=6), stem[:20] + token_ids(40, seed=7)]
    outputs = [windowed.generate({"prompt_token_ids": prompt}, greedy(8))[0] for prompt in prompts]
    for prompt, output in zip(prompts, tokens(outputs), strict=True):
        assert_greedy(transformers_model, prompt, output)
    assert [output.num_cached_tokens for output in outputs] == [0, 192, 96, 16]


def test_a_cache_of_a_window_and_a_step_serves_a_request_of_many_windows(
    make_windowed: Callable[..., Any], kind: str, transformers_model: Reference
) -> None:
    small = make_windowed(
        num_gpu_blocks_override=SMALLEST_CACHE[kind], max_model_len=MAX_MODEL_LEN, disable_log_stats=False
    )
    for length in (19 * WINDOW, 10):
        prompt = token_ids(length, seed=8)
        (output,) = small.generate({"prompt_token_ids": prompt}, greedy(MAX_MODEL_LEN - length))
        assert_greedy(transformers_model, prompt, tokens([output])[0])
    metrics = {metric.name: metric for metric in small.call("get_metrics")}
    assert metrics["vllm:num_preemptions"].value == 0
    assert metrics["vllm:kv_cache_usage_perc"].value == 0
    with pytest.raises(ValueError, match=f"needs {SMALLEST_CACHE[kind]} KV blocks"):
        make_windowed(num_gpu_blocks_override=SMALLEST_CACHE[kind] - 1, max_model_len=MAX_MODEL_LEN)


def test_preemption_drafts_and_prompt_logprobs_change_nothing(
    make_windowed: Callable[..., Any], windowed: Any, kind: str, transformers_model: Reference
) -> None:
    prompts = [{"prompt_token_ids": token_ids(length, seed=9)} for length in (7, 12, 9, 10, 11, 90)]
    params = [greedy(60, prompt_logprobs=0 if index == 5 else None) for index in range(len(prompts))]
    params[1] = SamplingParams(temperature=0.8, seed=4, max_tokens=60, ignore_eos=True)
    cramped = make_windowed(
        num_gpu_blocks_override=SMALLEST_CACHE[kind] + 2,
        max_model_len=MAX_MODEL_LEN,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        disable_log_stats=False,
    )
    found = cramped.generate(prompts, params)
    assert tokens(found) == tokens(windowed.generate(prompts, params))
    metrics = {metric.name: metric for metric in cramped.call("get_metrics")}
    assert metrics["vllm:num_preemptions"].value > 0
    assert metrics["vllm:spec_decode_num_draft_tokens"].value > 0
    prompt = prompts[5]["prompt_token_ids"]
    expected = transformers_model.logprobs(prompt)
    for position, entry in enumerate(found[5].prompt_logprobs[1:], 1):
        logprob = entry[prompt[position]].logprob
        assert logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-3)
    assert cramped.is_idle()
