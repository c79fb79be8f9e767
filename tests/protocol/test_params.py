"""Sampling parameters: defaults, every check at construction, what depends on the model, and the way over the wire."""

import copy
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from corespan.protocol.config import ModelConfig
from corespan.protocol.errors import VLLMValidationError
from corespan.protocol.params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)
from corespan.protocol.repetition import RepetitionDetectionParams

VOCAB = 1000


def model_config(**fields: Any) -> ModelConfig:
    settings = {"model": "/m", "served_model_name": "m", "tokenizer": None, "max_model_len": 64}
    return ModelConfig(**{**settings, "hf_config": {"vocab_size": VOCAB}, **fields})


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
        "skip_clone": False,
        "output_text_buffer_length": 0,
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
        "eos_token_id": None,
        "all_stop_token_ids": set(),
        "bad_words_token_ids": None,
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
    "skip_clone": NOT_BOOLS,
    "structured_outputs": [{"json": {}}, "json"],
    "logit_bias": [[1], "1", {"1": 1.0}, {True: 1.0}, {1.5: 1.0}, {-1: 1.0}, {1: NAN}, {1: INF}, {1: "x"}, {1: None}],
    "allowed_token_ids": [[], *NOT_ID_LISTS],
    "extra_args": [[1], "x", {"f": object()}, {"s": "\ud800"}, {"big": 2**70}],
    "bad_words": NOT_TEXTS,
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
    "bad_words": [None, [], ["a"], "word"],
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


def test_text_is_held_back_for_the_longest_stop_string() -> None:
    assert SamplingParams(stop=["ab", "wxyz"]).output_text_buffer_length == 3
    assert SamplingParams(stop=["ab"], include_stop_str_in_output=True).output_text_buffer_length == 0


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
    params = SamplingParams(
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
    params.update_from_generation_config({"eos_token_id": [2, 7]}, 2)
    params._bad_words_token_ids = [[5], [6, 7]]
    return params


def test_private_fields_reach_the_core() -> None:
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(full_params()), type=SamplingParams)
    assert decoded == full_params()
    assert decoded.eos_token_id == 2
    assert decoded.all_stop_token_ids == {2, 4, 7}
    assert decoded.bad_words_token_ids == [[5], [6, 7]]


def test_checking_again_changes_nothing() -> None:
    params, untouched = full_params(), full_params()
    params.__post_init__()
    assert params == untouched


@pytest.mark.parametrize("duplicate", [SamplingParams.clone, copy.deepcopy], ids=["clone", "deepcopy"])
def test_a_clone_is_equal_and_shares_nothing(duplicate: Any) -> None:
    params = full_params()
    twin = duplicate(params)
    assert twin == params
    twin.stop_token_ids.append(9)
    twin.logit_bias[9] = 1.0
    twin.extra_args["k"].append(2)
    twin.structured_outputs.json["x"] = 1
    twin.all_stop_token_ids.add(99)
    assert params == full_params()


def test_a_shallow_clone_shares_what_it_holds() -> None:
    params = SamplingParams(extra_args={"a": 1}, skip_clone=True)
    twin = params.clone()
    twin.temperature = 0.3
    assert twin.extra_args is params.extra_args
    assert params.temperature == 1.0


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


@pytest.mark.parametrize("token_id", [VOCAB, VOCAB + 5, 2**40])
@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused_before_sending(field: str, token_id: int) -> None:
    def params(token_id: int) -> SamplingParams:
        return SamplingParams(**{field: {token_id: 1.0} if field == "logit_bias" else [3, token_id]})

    params(VOCAB - 1).verify(model_config())
    params(0).verify(model_config())
    with pytest.raises(VLLMValidationError, match=rf"{field} must be token ids within the vocabulary, 0\.\.999, got"):
        params(token_id).verify(model_config())


def test_allowed_ids_are_those_the_tokenizer_knows() -> None:
    params = SamplingParams(allowed_token_ids=[900])
    params.verify(model_config())
    params.verify(model_config(), tokenizer_len=901)
    with pytest.raises(VLLMValidationError, match=r"allowed_token_ids .* 0\.\.899"):
        params.verify(model_config(), tokenizer_len=900)
    with pytest.raises(VLLMValidationError, match=r"0\.\.999"):
        SamplingParams(allowed_token_ids=[1000]).verify(model_config(), tokenizer_len=5000)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("count", "max_logprobs", "legal"),
    [
        (20, 20, True),
        (21, 20, False),
        (10**6, 20, False),
        (-1, 20, False),
        (-1, VOCAB, True),
        (-1, -1, True),
        (VOCAB, -1, True),
        (VOCAB + 1, -1, False),
        (10**6, 10**7, False),
        (0, 0, True),
        (1, 0, False),
    ],
)
def test_logprob_counts_are_held_to_max_logprobs_and_the_vocabulary(
    field: str, count: int, max_logprobs: int, legal: bool
) -> None:
    params = SamplingParams(**{field: count})
    config = model_config(max_logprobs=max_logprobs)
    if legal:
        params.verify(config)
    else:
        with pytest.raises(VLLMValidationError, match=f"{field} must be at most .*, got {count}"):
            params.verify(config)


def test_a_thinking_budget_needs_a_reasoning_parser_and_there_is_none() -> None:
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    SamplingParams(thinking_token_budget=-1).verify(model_config())
    for budget in (0, 100):
        with pytest.raises(VLLMValidationError, match=f"thinking_token_budget must be None.*parser.*got {budget}"):
            SamplingParams(thinking_token_budget=budget).verify(model_config())


def test_further_end_tokens_of_the_model_become_stop_tokens() -> None:
    params = SamplingParams(stop_token_ids=[9])
    params.update_from_generation_config({"eos_token_id": [2, 8, 7]}, 2)
    assert params.eos_token_id == 2
    assert params.stop_token_ids == [9, 7, 8]
    assert params.all_stop_token_ids == {2, 7, 8, 9}


@pytest.mark.parametrize("listed", [2, [2], None, []])
def test_a_single_end_token_is_no_stop_token(listed: Any) -> None:
    params = SamplingParams()
    params.update_from_generation_config({"eos_token_id": listed}, 2)
    assert (params.eos_token_id, params.stop_token_ids, params.all_stop_token_ids) == (2, [], {2})


def test_ignore_eos_ignores_every_end_token_but_not_the_users_own() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[7])
    params.update_from_generation_config({"eos_token_id": [2, 7, 8]}, 2)
    assert (params.eos_token_id, params.stop_token_ids) == (None, [7])
    assert params.all_stop_token_ids == {2, 7, 8}


class LetterTokenizer:
    """One id per character; a word behind a space has other ids than at the start, and "xy" only one there. "~" encodes
    to nothing."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        if text == " xy":
            return [700]
        if text.startswith(" ") and len(text) > 1:
            return [500 + ord(text[1]), *map(ord, text[2:])]
        return [ord(letter) for letter in text if letter != "~"]


def test_bad_words_are_banned_at_the_start_and_behind_a_space() -> None:
    params = SamplingParams(bad_words=["ab", " c", "xy"])
    params.update_bad_words(LetterTokenizer(), VOCAB)
    expected = [[97, 98], [597, 98], [99], [599], [120, 121], [700]]
    assert params.bad_words_token_ids == expected
    params.update_bad_words(LetterTokenizer(), VOCAB)
    assert params.bad_words_token_ids == expected


def test_bad_words_that_cannot_be_banned_are_refused() -> None:
    with pytest.raises(VLLMValidationError, match="bad_words must be empty when the engine has no tokenizer"):
        SamplingParams(bad_words=["a"]).update_bad_words(None)
    with pytest.raises(VLLMValidationError, match="bad_words must be text that the tokenizer encodes"):
        SamplingParams(bad_words=["~"]).update_bad_words(LetterTokenizer())
    with pytest.raises(VLLMValidationError, match=r"bad_words must be token ids within the vocabulary, 0\.\.97"):
        SamplingParams(bad_words=["ab"]).update_bad_words(LetterTokenizer(), 98)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": ""},
        {"json": "  "},
        {"json": 5},
        {"json": {"a": object()}},
        {"regex": 5},
        {"regex": "\ud800"},
        {"choice": []},
        {"choice": [""]},
        {"choice": [1]},
        {"grammar": " \n"},
        {"grammar": ["x"]},
        {"json_object": False},
        {"json_object": 1},
        {"structural_tag": " "},
        {"structural_tag": {"structures": []}},
        {"json": {}, "structural_tag": "{}"},
        {"json": {}, "disable_any_whitespace": 1},
        {"json": {}, "disable_additional_properties": None},
        {"json": {}, "whitespace_pattern": 4},
        {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
    ],
)
def test_wrong_constraints_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="structured_outputs"):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((-1, 0, 0), "max_pattern_size"),
        ((4, -1, 2), "min_pattern_size"),
        ((4, 5, 2), "min_pattern_size"),
        ((0, 1, 2), "min_pattern_size"),
        ((4, 1, 1), "min_count"),
        ((4, 1, 0), "min_count"),
        ((0, 0, -1), "min_count"),
        ((4.0, 1, 2), "max_pattern_size"),
        ((True, 1, 2), "max_pattern_size"),
        ((4, None, 2), "min_pattern_size"),
        ((4, 1, "2"), "min_count"),
    ],
)
def test_wrong_repetition_patterns_are_refused(sizes: tuple[Any, Any, Any], name: str) -> None:
    with pytest.raises(VLLMValidationError, match=rf"^repetition_detection\.{name} must be"):
        RepetitionDetectionParams(*sizes)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"beam_width": 0, "max_tokens": 1}, "beam_width"),
        ({"beam_width": True, "max_tokens": 1}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "max_tokens": 1, "temperature": -1}, "temperature"),
        ({"beam_width": 2, "max_tokens": 1, "length_penalty": NAN}, "length_penalty"),
        ({"beam_width": 2, "max_tokens": 1, "ignore_eos": 1}, "ignore_eos"),
        ({"beam_width": 2, "max_tokens": 1, "include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        (
            {"beam_width": 2, "max_tokens": 1, "structured_outputs": StructuredOutputsParams(json_object=True)},
            "structured_outputs",
        ),
    ],
)
def test_wrong_beam_search_params_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(VLLMValidationError, match=f"^{name} must be"):
        BeamSearchParams(**fields)


def test_beam_search_defaults() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    assert (params.temperature, params.length_penalty, params.ignore_eos) == (0.0, 1.0, False)
    assert (params.include_stop_str_in_output, params.structured_outputs) == (False, None)
