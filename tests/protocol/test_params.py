"""Sampling parameters: defaults, every check at construction, copies, and the way over the wire."""

import copy
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from corespan.protocol.errors import VLLMValidationError
from corespan.protocol.params import RequestOutputKind, SamplingParams, SamplingType
from corespan.protocol.repetition import RepetitionDetectionParams
from corespan.protocol.structured_outputs import StructuredOutputsParams


def test_defaults_are_those_users_know() -> None:
    params = SamplingParams()
    expected = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "logprob_token_ids": None,
        "flat_logprobs": False,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "structured_outputs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "extra_args": None,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
        "routed_experts_prompt_start": 0,
        "thinking_token_budget": None,
        "repetition_detection": None,
        "truncate_prompt_tokens": None,
        "stream_interval": None,
        "num_logprobs": None,
        "sampling_type": SamplingType.RANDOM,
    }
    assert {name: getattr(params, name) for name in expected} == expected


def test_positional_order_is_vllms() -> None:
    params = SamplingParams(2, 0.1, 0.2, 1.3, 0.7, 0.9, 5, 0.1, 42, "x", [7], True, 9, 3)
    assert (params.n, params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (
        2,
        0.1,
        0.2,
        1.3,
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.7, 0.9, 5, 0.1, 42)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (["x"], [7], True)
    assert (params.max_tokens, params.min_tokens) == (9, 3)


NAN, INF = math.nan, math.inf
NOT_NUMBERS = ["1", None, True, [1], NAN, INF, -INF, 1j]
NOT_INTEGERS = ["1", True, 1.0, 1.5, [1], NAN, 2**63]
NOT_BOOLS = [0, 1, "yes", None]
NOT_ID_LISTS = ["12", 5, [1.0], ["1"], [True], [None], [-1], {1: 2}, [2**63]]
NOT_TEXTS = [5, [""], "", [None], ["a", 3], b"a", {"a": 1}, ["\ud800"]]

WRONG_VALUES: dict[str, list[Any]] = {
    "n": [0, -1, 16385, None, *NOT_INTEGERS],
    "presence_penalty": [-2.01, 2.01, *NOT_NUMBERS],
    "frequency_penalty": [-2.01, 2.01, *NOT_NUMBERS],
    "repetition_penalty": [0, 0.0, -0.5, *NOT_NUMBERS],
    "temperature": [-0.01, 2.01, *NOT_NUMBERS],
    "top_p": [0, 0.0, -0.1, 1.01, *NOT_NUMBERS],
    "top_k": [-2, 2**63],
    "min_p": [-0.01, 1.01, *NOT_NUMBERS],
    "seed": [2**63, -(2**63) - 1, *NOT_INTEGERS],
    "stop": NOT_TEXTS,
    "stop_token_ids": NOT_ID_LISTS,
    "ignore_eos": NOT_BOOLS,
    "max_tokens": [0, -1, *NOT_INTEGERS],
    "min_tokens": [-1, 17, None, *NOT_INTEGERS],
    "logprobs": [-2, "1", 1.0, [1], NAN, 2**63],
    "prompt_logprobs": [-2, "1", 1.0, [1], NAN, 2**63],
    "logprob_token_ids": [[], list(range(129)), *NOT_ID_LISTS],
    "flat_logprobs": NOT_BOOLS,
    "detokenize": NOT_BOOLS,
    "skip_special_tokens": NOT_BOOLS,
    "spaces_between_special_tokens": NOT_BOOLS,
    "include_stop_str_in_output": NOT_BOOLS,
    "output_kind": [3, -1, "delta", None, True],
    "structured_outputs": [{"json": {}}, "json"],
    "logit_bias": [[1], "1", {"1": 1.0}, {True: 1.0}, {1.5: 1.0}, {-1: 1.0}, {1: NAN}, {1: INF}, {1: "x"}, {1: None}],
    "allowed_token_ids": [[], *NOT_ID_LISTS],
    "extra_args": [[1], "x", {"f": object()}, {"s": "\ud800"}, {"big": 2**70}],
    "bad_words": [*NOT_TEXTS, [f"word{number}" for number in range(129)]],
    "stream_interval": [0, -1, *NOT_INTEGERS],
    "skip_reading_prefix_cache": [0, 1, "yes"],
    "routed_experts_prompt_start": [-1, None, *NOT_INTEGERS],
    "thinking_token_budget": [-2, *NOT_INTEGERS],
    "repetition_detection": [{"max_pattern_size": 1}, 5, True],
    "truncate_prompt_tokens": [0, -2, *NOT_INTEGERS],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG_VALUES.items() for value in values]
)
def test_wrong_values_raise_an_error_that_names_field_value_and_range(field: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError) as error:
        SamplingParams(**{field: value})
    assert isinstance(error.value, ValueError)
    assert (error.value.parameter or "").split(".")[0] == field
    assert str(error.value).startswith(field)
    assert " must be " in str(error.value)
    assert ", got " in str(error.value)


@pytest.mark.parametrize("value", ["5", 1.0, True, None, [1], NAN])
def test_a_top_k_that_is_no_integer_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="top_k must be an integer"):
        SamplingParams(top_k=value)


RIGHT_VALUES: dict[str, list[Any]] = {
    "n": [1, 16384, np.int64(3)],
    "presence_penalty": [-2, 2.0, np.float32(0.5)],
    "frequency_penalty": [-2.0, 2],
    "repetition_penalty": [1e-9, 5, 1e30],
    "temperature": [0, 1e-38, 0.01, 2, np.float64(0.5)],
    "top_p": [1e-9, 1],
    "top_k": [-1, 0, 1, 10**9, np.int32(4)],
    "min_p": [0, 1],
    "seed": [None, 0, -5, 2**63 - 1, -(2**63)],
    "stop": [None, [], "a", ["a", "bc"], ("a",)],
    "stop_token_ids": [None, [], [0, 5, 5, 2], (3,)],
    "max_tokens": [None, 1, 10**9],
    "min_tokens": [0, 16],
    "logprobs": [None, 0, 5, -1],
    "prompt_logprobs": [None, 0, 5, -1],
    "logprob_token_ids": [None, [3, 1]],
    "output_kind": [0, 1, RequestOutputKind.FINAL_ONLY],
    "logit_bias": [None, {}, {3: -100}, {np.int64(4): np.float32(2)}, {5: 1e9}],
    "allowed_token_ids": [None, [9, 3]],
    "extra_args": [None, {}, {"a": {"b": [1, "x", None]}}],
    "bad_words": [None, [], ["a"], "word", ["a"] * 200, [f"word{number}" for number in range(128)]],
    "stream_interval": [None, 1, 5],
    "routed_experts_prompt_start": [0, 7, np.int64(3)],
    "thinking_token_budget": [None, -1, 0, np.int64(100)],
    "repetition_detection": [None, RepetitionDetectionParams(), RepetitionDetectionParams(8, 2, np.int64(3))],
    "truncate_prompt_tokens": [None, -1, 1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in RIGHT_VALUES.items() for value in values]
)
def test_right_values_are_taken_and_survive_the_wire(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params
    assert repr(decoded) == repr(params)


def test_values_are_normalised() -> None:
    params = SamplingParams(stop="end", seed=-1, logprobs=True, prompt_logprobs=False, output_kind=1)
    assert (params.stop, params.seed, params.logprobs, params.prompt_logprobs) == (["end"], None, 1, None)
    assert params.output_kind is RequestOutputKind.DELTA


def test_lists_given_by_the_caller_are_not_shared() -> None:
    ids, biases = [1, 2], {3: 1.0}
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, logit_bias=biases)
    ids.append(3)
    biases[4] = 2.0
    assert (params.stop_token_ids, params.allowed_token_ids, params.logit_bias) == ([1, 2], [1, 2], {3: 1.0})


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-38, 9e-6])
def test_a_tiny_temperature_is_greedy_and_neutralises_the_filters(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=7, min_p=0.1)
    assert params.sampling_type is SamplingType.GREEDY
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert params.temperature == temperature
    with pytest.raises(VLLMValidationError, match="n must be 1 with greedy"):
        SamplingParams(temperature=temperature, n=2)


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 0.009, 0.01])
def test_a_small_temperature_is_used_as_given(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=7, seed=1)
    assert (params.temperature, params.top_k, params.sampling_type) == (temperature, 7, SamplingType.RANDOM_SEED)


def test_stop_strings_need_detokenisation() -> None:
    with pytest.raises(VLLMValidationError, match="detokenize must be True"):
        SamplingParams(stop="x", detokenize=False)
    SamplingParams(stop_token_ids=[3], detokenize=False)


def test_min_tokens_is_compared_with_max_tokens_only_where_there_is_one() -> None:
    with pytest.raises(VLLMValidationError, match=r"min_tokens must be at most max_tokens \(4\), got 5"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_logprob_token_ids_set_the_number_of_logprobs() -> None:
    assert SamplingParams(logprob_token_ids=[4, 9]).num_logprobs == 2
    assert SamplingParams(logprob_token_ids=[4, 9], logprobs=2).num_logprobs == 2
    with pytest.raises(VLLMValidationError, match="logprobs must be None or the number of logprob_token_ids"):
        SamplingParams(logprob_token_ids=[4, 9], logprobs=3)


def test_prompt_logprobs_keep_the_prefix_cache_unread_unless_told_otherwise() -> None:
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    assert SamplingParams().skip_reading_prefix_cache is False
    assert SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False).skip_reading_prefix_cache is False


def full_params() -> SamplingParams:
    return SamplingParams(
        n=2,
        temperature=0.5,
        stop=["a"],
        stop_token_ids=[4],
        logit_bias={3: 1.0},
        bad_words=["b"],
        extra_args={"k": [1]},
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        repetition_detection=RepetitionDetectionParams(8, 2, 3),
        output_kind=RequestOutputKind.DELTA,
    )


@pytest.mark.parametrize("duplicate", [SamplingParams.clone, copy.deepcopy], ids=["clone", "deepcopy"])
def test_a_clone_is_equal_and_shares_nothing(duplicate: Any) -> None:
    params = full_params()
    twin = duplicate(params)
    assert twin == params
    twin.stop_token_ids.append(9)
    twin.logit_bias[9] = 1.0
    twin.extra_args["k"].append(2)
    twin.structured_outputs.json["x"] = 1
    assert params == full_params()


def test_a_clone_is_checked_anew() -> None:
    params = full_params()
    params.top_p = 2.0
    with pytest.raises(VLLMValidationError, match="top_p must be"):
        params.clone()


def test_repr_shows_what_was_set() -> None:
    assert "temperature=0.25" in repr(SamplingParams(temperature=0.25))
    assert "top_k" not in repr(SamplingParams())
    assert SamplingParams(top_k=3) != SamplingParams(top_k=4)


def test_from_optional_takes_none_for_the_default() -> None:
    params = SamplingParams.from_optional(
        n=None, presence_penalty=None, frequency_penalty=None, repetition_penalty=None, temperature=None, top_p=None
    )
    assert params == SamplingParams()
    assert SamplingParams.from_optional(temperature=0.0, max_tokens=3) == SamplingParams(temperature=0.0, max_tokens=3)


def test_from_optional_reads_biases_from_text_and_clamps_them() -> None:
    params = SamplingParams.from_optional(logit_bias={"3": 250, "4": -1e9, "5": 0.5})
    assert params.logit_bias == {3: 100.0, 4: -100.0, 5: 0.5}
    assert SamplingParams(logit_bias={3: 250}).logit_bias == {3: 250.0}


@pytest.mark.parametrize("biases", [{"x": 1}, {"1.5": 1}, {True: 1}, {None: 1}, {"1": NAN}, {"1": "high"}, [1]])
def test_from_optional_names_wrong_biases(biases: Any) -> None:
    with pytest.raises(VLLMValidationError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias=biases)


def test_what_is_listed_twice_counts_once() -> None:
    params = SamplingParams(stop_token_ids=[5, 3, 5, 3], bad_words=["b", "a", "b"])
    assert (params.stop_token_ids, params.bad_words) == ([5, 3], ["b", "a"])
