"""Requests are complete when they leave the caller, and what cannot be served does not leave."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from text_pipeline import VOCAB_SIZE, make_config
from tiny_llama import write_tokenizer

from corespan.engine.requests.input_processor import InputProcessor
from corespan.engine.text.loading import load_tokenizer
from corespan.engine.text.tokenizer import Tokenizer
from corespan.protocol.errors import VLLMValidationError
from corespan.protocol.params import SamplingParams
from corespan.protocol.requests import EngineCoreRequest

Process = Callable[..., EngineCoreRequest]


@pytest.fixture
def process(tokenizer: Tokenizer) -> Process:
    processor = InputProcessor(make_config(max_model_len=32), tokenizer)

    def process(prompt: Any = "Once", request_id: Any = "r", params: Any = None, **options: Any) -> EngineCoreRequest:
        return processor.process_inputs(request_id, prompt, params or SamplingParams(), **options).request

    return process


def test_the_request_carries_what_was_given(process: Process) -> None:
    prompt = {"prompt_token_ids": [5, 6], "cache_salt": "mine"}
    request = process(prompt, priority=3, trace_headers={"traceparent": "00-1"}, arrival_time=12.5)
    assert (request.request_id, request.prompt_token_ids, request.cache_salt) == ("r", [5, 6], "mine")
    assert (request.priority, request.trace_headers, request.arrival_time) == (3, {"traceparent": "00-1"}, 12.5)


def test_the_prompts_text_comes_beside_the_request(tokenizer: Tokenizer) -> None:
    processor = InputProcessor(make_config(), tokenizer)
    assert processor.process_inputs("r", "Once", SamplingParams()).prompt == "Once"
    assert processor.process_inputs("r", [5, 6], SamplingParams()).prompt is None


def test_the_callers_params_are_not_touched(process: Process) -> None:
    params = SamplingParams(max_tokens=None, stop_token_ids=[7], bad_words=["fox"])
    before = repr(params)
    process(params=params)
    assert repr(params) == before


@pytest.mark.parametrize("num_prompt_tokens", [1, 30, 31])
def test_max_tokens_none_is_filled_with_the_room_there_is(process: Process, num_prompt_tokens: int) -> None:
    request = process([5] * num_prompt_tokens, params=SamplingParams(max_tokens=None))
    assert request.params.max_tokens == 32 - num_prompt_tokens


def test_a_larger_max_tokens_than_there_is_room_for_is_left_to_the_core(process: Process) -> None:
    assert process([5] * 31, params=SamplingParams(max_tokens=1000)).params.max_tokens == 1000


def test_the_seed_decides_the_noise_and_without_one_it_is_fresh(process: Process) -> None:
    assert process(params=SamplingParams(seed=42)).noise_seed == 42
    assert process(params=SamplingParams(seed=-5)).noise_seed == 2**64 - 5
    assert process().noise_seed != process().noise_seed


def test_a_token_that_the_model_has_no_row_for_is_refused_in_prompts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "<|eot|>"}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.eos_token_id == VOCAB_SIZE  # as transformers has it
    with pytest.raises(ValueError, match=f"token id {VOCAB_SIZE}; this model's ids are"):
        InputProcessor(make_config(), tokenizer).process_inputs("r", "Once <|eot|>", SamplingParams())


def test_without_a_generation_config_the_models_config_names_the_end_token() -> None:
    config = make_config(hf_config={"vocab_size": VOCAB_SIZE, "hidden_size": 8, "eos_token_id": 9})
    params = InputProcessor(config, None).process_inputs("r", [5], SamplingParams()).request.params
    assert params.stop_token_ids == (9,)


def test_params_and_call_both_may_truncate_the_prompt(process: Process) -> None:
    ids = list(range(5, 45))
    assert process(ids, params=SamplingParams(truncate_prompt_tokens=3)).prompt_token_ids == [42, 43, 44]
    assert process(ids, tokenization_kwargs={"truncate_prompt_tokens": 2}).prompt_token_ids == [43, 44]
    assert len(process(ids, params=SamplingParams(truncate_prompt_tokens=-1)).prompt_token_ids) == 31
    rendered = {"type": "token", "prompt_token_ids": ids, "arrival_time": 1.0}
    assert process(rendered, params=SamplingParams(truncate_prompt_tokens=3)).prompt_token_ids == [42, 43, 44]


@pytest.mark.parametrize("length", [32, 33, 1000])
def test_a_prompt_without_room_for_a_token_is_refused_with_both_numbers(process: Process, length: int) -> None:
    with pytest.raises(VLLMValidationError, match=rf"{length} tokens.*max_model_len 32"):
        process([5] * length)
    assert len(process([5] * 31).prompt_token_ids) == 31


def test_a_text_too_long_for_any_tokens_is_refused_without_tokenising_it(
    process: Process, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer's longest token is of 12 characters."""
    assert tokenizer.fewest_tokens("a" * 13) == 2
    with pytest.raises(VLLMValidationError, match=r"\d{2,} tokens.*32"):
        process("a" * 12 * 31)
    monkeypatch.setattr(Tokenizer, "encode", None)
    for text in ("word " * 200_000, "a" * (12 * 32 + 1)):
        with pytest.raises(
            VLLMValidationError, match=rf"{len(text)} characters, which are \d+ tokens at least.*32.*31"
        ) as caught:
            process(text)
        assert caught.value.parameter == "input_text"


def test_a_text_of_any_length_may_be_truncated_or_come_with_its_token_ids(process: Process) -> None:
    text = "word " * 1000
    assert len(process(text, params=SamplingParams(truncate_prompt_tokens=4)).prompt_token_ids) == 4
    assert len(process(text, tokenization_kwargs={"truncate_prompt_tokens": 4}).prompt_token_ids) == 4
    assert process({"prompt": text, "prompt_token_ids": [5, 6]}).prompt_token_ids == [5, 6]


@pytest.mark.parametrize("prompt", [[], {"prompt_token_ids": []}])
def test_an_empty_prompt_is_refused(process: Process, prompt: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        process(prompt)
    with pytest.raises(ValueError, match="empty"):
        process([5], tokenization_kwargs={"truncate_prompt_tokens": 0})


def test_an_empty_text_is_fine_where_the_begin_token_makes_it_one_token(
    process: Process, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert len(process("").prompt_token_ids) == 1
    folder = tmp_path_factory.mktemp("no_bos")
    write_tokenizer(folder, add_bos=False)
    processor = InputProcessor(make_config(), load_tokenizer(str(folder)))
    with pytest.raises(ValueError, match="empty"):
        processor.process_inputs("r", "", SamplingParams())


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, VOCAB_SIZE + 1, -1, -(2**70), 2**40, 2**70])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_token_id_outside_the_vocabulary_is_refused(process: Process, token_id: int, position: int) -> None:
    ids = [5, 5, 5]
    ids[position] = token_id
    with pytest.raises(VLLMValidationError, match=rf"{token_id}.*0\.\.{VOCAB_SIZE - 1}"):
        process(ids)
    assert process([VOCAB_SIZE - 1, 0]).prompt_token_ids == [VOCAB_SIZE - 1, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"request_id": 5},
        {"request_id": None},
        {"params": {"temperature": 0}},
        {"priority": "high"},
        {"priority": True},
        {"priority": 1.5},
        {"trace_headers": {"traceparent": 5}},
        {"trace_headers": "traceparent"},
        {"trace_headers": ["traceparent"]},
        {"arrival_time": "now"},
        {"arrival_time": [1.0]},
    ],
)
def test_arguments_of_the_wrong_type_are_type_errors(process: Process, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        process(**options)


def test_values_that_cannot_travel_are_refused(process: Process) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        process(request_id="\ud800")
    with pytest.raises(ValueError, match="priority"):
        process(priority=2**63)
    with pytest.raises(ValueError, match="surrogate"):
        process(trace_headers={"traceparent": "\ud800"})
    with pytest.raises(ValueError, match="surrogate"):
        process({"prompt": "Once", "cache_salt": "\ud800"})
    with pytest.raises(ValueError, match="arrival_time"):
        process(arrival_time=math.nan)
    with pytest.raises(ValueError, match="extra_args"):
        SamplingParams(extra_args={(1, 2): 3})


def test_internal_ids_are_unique_and_keep_the_callers_id(tokenizer: Tokenizer) -> None:
    processor = InputProcessor(make_config(), tokenizer)
    both = [processor.process_inputs("same", "Once", SamplingParams()) for _ in range(2)]
    for prepared in both:
        processor.assign_request_id(prepared)
        assert prepared.request.external_req_id == "same" and prepared.request_id.startswith("same-")
        with pytest.raises(ValueError, match="same"):
            processor.assign_request_id(prepared)
    assert both[0].request_id != both[1].request_id


def test_requests_without_a_seed_follow_the_engines(tokenizer: Tokenizer) -> None:
    def noise(seed: int | None, client_index: int = 0, count: int = 3) -> list[int]:
        processor = InputProcessor(make_config(seed=seed), tokenizer, client_index=client_index)
        seeds = [
            processor.process_inputs("r", "Once", SamplingParams(seed=own)).request.noise_seed
            for own in (None, 7, *[None] * (count - 2))
        ]
        assert seeds[1] == 7 and len(set(seeds)) == count
        return seeds

    assert noise(5) == noise(5)
    assert noise(0) == noise(0) != noise(5)
    assert noise(-5) != noise(5)
    assert noise(None) != noise(None)
    assert noise(5, client_index=1) != noise(5)


def test_ids_stay_the_callers_when_randomisation_is_off(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    processor = InputProcessor(make_config(), tokenizer)
    prepared = processor.process_inputs("mine", "Once", SamplingParams())
    processor.assign_request_id(prepared)
    assert prepared.request_id == prepared.request.external_req_id == "mine"
