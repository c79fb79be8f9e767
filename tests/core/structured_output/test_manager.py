"""Grammars in the core: compiled in the background, masks that follow the tokens, and 200 answers that validate."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from deadlines import DEADLINE
from sampler_driver import new_request
from tiny_llama import write_tokenizer
from tokenizers import Tokenizer

from corespan.core.sampling.metadata import SamplingBatch
from corespan.core.sampling.sampler import Sampler
from corespan.core.scheduler.request import Request
from corespan.core.structured_output.manager import StructuredOutputManager
from corespan.engine.model_files.model_source import resolve_model
from corespan.protocol.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from corespan.protocol.params import SamplingParams
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import resolved
from corespan.protocol.structured_outputs import StructuredOutputsParams

IM_END = 2


def config_for(tokenizer: str | None, vocab_size: int) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(
            model="/m",
            served_model_name="m",
            tokenizer=tokenizer,
            hf_config={"vocab_size": vocab_size, "eos_token_id": IM_END},
            max_model_len=4096,
        ),
        cache_config=CacheConfig(),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=4096, max_num_seqs=64, max_model_len=4096),
    )


@pytest.fixture(scope="module")
def tokenizer_dir() -> str:
    folder = resolve_model("smollm2-135m").tokenizer_dir
    assert folder is not None
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: str) -> Tokenizer:
    return Tokenizer.from_file(str(Path(tokenizer_dir) / "tokenizer.json"))


@pytest.fixture(scope="module")
def config(tokenizer_dir: str) -> VllmConfig:
    return config_for(tokenizer_dir, 49_152)


@pytest.fixture(scope="module")
def manager(config: VllmConfig) -> Any:
    manager = StructuredOutputManager(config)
    yield manager
    manager.shutdown()


def request_for(output_token_ids: list[int] | None = None, **constraint: Any) -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint), max_tokens=1000)
    message = EngineCoreRequest("r", [1, 2, 3], resolved(params), output_token_ids=output_token_ids or [])
    return Request.from_engine_core_request(message, None)


def ready(manager: StructuredOutputManager, request: Request) -> Request:
    """The request, once its grammar is compiled."""
    manager.grammar_init(request)
    state: Any = request.structured_output_state
    state.exception(timeout=DEADLINE)
    assert manager.is_grammar_ready(request)
    return request


def allowed(manager: StructuredOutputManager, request: Request) -> set[int]:
    bitmask = manager.grammar_bitmask([request])
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())


def test_masks_follow_the_tokens_and_the_end_is_allowed_exactly_when_the_text_may_end(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    request = ready(manager, request_for(regex="ab?c"))
    texts = {tokenizer.decode([token_id]) for token_id in allowed(manager, request)}
    assert "a" in texts
    assert texts <= {"a", "ab", "ac", "abc"}
    for letter in "abc":
        (token_id,) = tokenizer.encode(letter).ids
        assert token_id in allowed(manager, request)
        assert IM_END not in allowed(manager, request)
        assert manager.accept_token(request, token_id)
    assert allowed(manager, request) == {IM_END}
    assert manager.accept_token(request, IM_END)
    assert allowed(manager, request) == {IM_END}
    assert manager.accept_token(request, IM_END)


def test_a_token_that_breaks_the_grammar_is_reported(manager: StructuredOutputManager, tokenizer: Tokenizer) -> None:
    (digit,), (letter,) = tokenizer.encode("7").ids, tokenizer.encode("x").ids
    assert not manager.accept_token(ready(manager, request_for(regex="[0-9]+")), letter)
    assert not manager.accept_token(ready(manager, request_for(regex="[0-9]+")), IM_END)
    broken = ready(manager, request_for(regex="[0-9]+"))
    assert manager.accept_token(broken, digit)
    assert not manager.accept_token(broken, letter)


def test_after_the_end_nothing_else_is_allowed(manager: StructuredOutputManager, tokenizer: Tokenizer) -> None:
    request = ready(manager, request_for(regex="[0-9]+"))
    (digit,) = tokenizer.encode("7").ids
    manager.accept_token(request, digit)
    assert {digit, IM_END} <= allowed(manager, request)
    manager.accept_token(request, IM_END)
    assert allowed(manager, request) == {IM_END}
    assert not manager.accept_token(request, digit)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_end_token_is_found_wherever_the_tokenizers_files_name_it(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    config = config_for(str(tmp_path), 512)
    config.model_config.hf_config.pop("eos_token_id")
    manager = StructuredOutputManager(config)
    request = ready(manager, request_for(regex="[0-9]?"))
    assert 3 in allowed(manager, request)
    manager.shutdown()


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_that_only_the_other_files_add_count_in_grammars(tmp_path: Path, file: str) -> None:
    """An end token, a token of plain text, and one that a structural tag waits for."""
    write_tokenizer(tmp_path)
    added = {"<end>": 512, "digits": 513, "<call>": 514}
    fields: dict[str, Any] = {"eos_token": "<end>", "extra_special_tokens": ["<call>"]}
    if file == "added_tokens.json":
        (tmp_path / file).write_text(json.dumps(added))
    else:
        listed = {index: {"content": text, "special": text != "digits"} for text, index in added.items()}
        fields["added_tokens_decoder"] = listed
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    config = config_for(str(tmp_path), 515)
    config.model_config.hf_config.pop("eos_token_id")
    manager = StructuredOutputManager(config)
    tag = json.dumps({"structures": [{"begin": "<call>", "schema": {"enum": [1]}, "end": "."}], "triggers": ["<call>"]})

    request = ready(manager, request_for(regex="(digits)?"))
    tagged = ready(manager, request_for(structural_tag=tag))

    assert {512, 513} <= allowed(manager, request)
    assert 514 not in allowed(manager, request)
    assert manager.accept_token(request, 513)
    assert allowed(manager, request) == {512}
    assert 514 in allowed(manager, tagged)
    assert manager.accept_token(tagged, 514)
    (one,) = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("1", add_special_tokens=False).ids
    assert allowed(manager, tagged) == {one}
    manager.shutdown()


@pytest.mark.parametrize("trigger", ["<tool", "<|im_start|>"], ids=["text", "special token"])
def test_a_structural_tag_leaves_text_free_until_a_trigger_and_then_demands_its_structure(
    manager: StructuredOutputManager, tokenizer: Tokenizer, trigger: str
) -> None:
    structure = {"begin": f"{trigger}=f>", "schema": {"enum": [12]}, "end": "</f>"}
    tag = json.dumps({"structures": [structure], "triggers": [trigger]})

    def accepts(text: str) -> bool:
        request = ready(manager, request_for(structural_tag=tag))
        return all(manager.accept_token(request, token_id) for token_id in tokenizer.encode(text).ids)

    end = "<|im_end|>"
    for text in (f"Free < text.\n{end}", f"First {trigger}=f>12</f> then {trigger}=f>12</f>, and 日本.{end}"):
        assert accepts(text), text
    for text in (f"{trigger}=g", f"{trigger}=f>13", f"{trigger}=f>12{end}", f"{trigger}{end}"):
        assert not accepts(f"First {text}"), text


def test_requests_with_the_same_grammar_share_the_compiler_but_not_the_state(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    first, second = (ready(manager, request_for(choice=["yes", "no"])) for _ in range(2))
    start = allowed(manager, second)
    manager.accept_token(first, tokenizer.encode("yes").ids[0])
    assert allowed(manager, second) == start
    assert allowed(manager, first) != start


def test_a_batch_of_masks_equals_the_masks_one_by_one(manager: StructuredOutputManager) -> None:
    constraints: list[dict[str, Any]] = [{"regex": "[0-9]+"}, {"choice": ["a", "b"]}, {"json_object": True}]
    requests = [ready(manager, request_for(**constraint)) for constraint in constraints * 3]
    together = manager.grammar_bitmask(requests)
    assert together.shape == (9, 49_152 // 32)
    assert together.dtype == np.int32
    for request, mask in zip(requests, together, strict=True):
        assert np.array_equal(manager.grammar_bitmask([request])[0], mask)


def test_a_restarted_request_goes_on_where_its_tokens_end(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["left", "right"]}}, "required": ["a"]}
    token_ids = tokenizer.encode('{"a": "ri').ids
    whole = ready(manager, request_for(json=schema))
    for token_id in token_ids:
        assert manager.accept_token(whole, token_id)
    restarted = ready(manager, request_for(token_ids, json=schema))
    assert allowed(manager, restarted) == allowed(manager, whole)


def test_tokens_that_never_met_the_grammar_fail_the_request(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    request = request_for(tokenizer.encode("xyz").ids, regex="[0-9]+")
    with pytest.raises(ValueError, match="output tokens break the grammar"):
        ready(manager, request)


def test_a_grammar_that_does_not_compile_fails_its_request(manager: StructuredOutputManager) -> None:
    with pytest.raises(ValueError, match="unclosed group"):
        ready(manager, request_for(regex="("))
    assert allowed(manager, ready(manager, request_for(regex="a")))


def test_a_tokenizer_that_cannot_be_read_fails_the_request(tmp_path: Path) -> None:
    manager = StructuredOutputManager(config_for(str(tmp_path), 100))
    with pytest.raises(ValueError, match="tokenizer.json"):
        ready(manager, request_for(regex="a"))
    manager.shutdown()


def test_a_deep_grammar_can_be_used_once_it_is_compiled(manager: StructuredOutputManager, tokenizer: Tokenizer) -> None:
    rules = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(1900)) + '\nr1900: "7"'
    requests = [ready(manager, request_for(grammar=rules)) for _ in range(2)]
    manager.grammar_bitmask(requests)
    assert manager.accept_token(requests[0], tokenizer.encode("7").ids[0])
    assert allowed(manager, requests[0]) == {IM_END}


def test_an_engine_without_a_tokenizer_fails_the_request() -> None:
    manager = StructuredOutputManager(config_for(None, 100))
    with pytest.raises(ValueError, match="need a tokenizer"):
        ready(manager, request_for(regex="a"))
    manager.shutdown()


def test_a_model_with_more_or_fewer_ids_than_the_tokenizer_gets_masks_of_its_own_width(tokenizer_dir: str) -> None:
    for vocab_size in (50_000, 40_000):
        manager = StructuredOutputManager(config_for(tokenizer_dir, vocab_size))
        request = ready(manager, request_for(regex="(.|\\n)*"))
        bitmask = manager.grammar_bitmask([request])
        assert bitmask.shape == (1, (vocab_size + 31) // 32)
        assert max(allowed(manager, request)) < min(vocab_size, 49_152)
        manager.shutdown()


def test_a_text_is_complete_at_its_end_only_where_the_end_token_has_no_row(tmp_path: Path, tokenizer_dir: str) -> None:
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    settings["eos_token"] = backend.id_to_token(49_151)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for vocab_size in (49_152, 49_120):
        config = config_for(str(tmp_path), vocab_size)
        config.model_config.hf_config.pop("eos_token_id")
        manager = StructuredOutputManager(config)
        request = ready(manager, request_for(regex="[0-9]{2}"))
        complete = []
        for digit in backend.encode("42").ids:
            assert manager.accept_token(request, digit)
            complete.append(manager.is_complete(request))
        assert complete == [False, vocab_size == 49_120]
        assert allowed(manager, request) == ({49_151} if vocab_size == 49_152 else set())
        manager.shutdown()


def test_compiling_does_not_hold_up_the_caller(config: VllmConfig) -> None:
    manager = StructuredOutputManager(config)
    request = request_for(regex="a")
    manager.grammar_init(request)
    assert not manager.is_grammar_ready(request)  # the tokenizer alone takes much longer than this call
    manager.shutdown()


def generate(
    manager: StructuredOutputManager, config: VllmConfig, constraints: list[dict[str, Any]], seed: int
) -> list[list[int]]:
    """Answers drawn evenly from whatever the grammars allow, all constraints in one batch."""
    requests = [ready(manager, request_for(**constraint)) for constraint in constraints]
    batch = SamplingBatch(config, len(requests))
    for row, request in enumerate(requests):
        batch.add(row, new_request(request.sampling_params, seed=seed * 1000 + row))
    sampler = Sampler(batch)
    running = list(range(len(requests)))
    for _ in range(600):
        rows = np.array(running)
        bitmask = manager.grammar_bitmask([requests[row] for row in running])
        logits = torch.zeros(len(running), config.model_config.vocab_size)
        drawn = sampler.sample(logits, rows, np.arange(len(running)), bitmask)
        assert not drawn.failed
        batch.append_tokens(rows, drawn.token_ids)
        for row, token_id in zip(list(running), drawn.token_ids.tolist(), strict=True):
            assert manager.accept_token(requests[row], token_id)
            if token_id == IM_END:
                running.remove(row)
            else:
                requests[row].token_ids.append(token_id)
        if not running:
            return [request.output_token_ids for request in requests]
    raise AssertionError(f"{len(running)} answers did not come to an end")


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    scalars: list[dict[str, Any]] = [
        {"type": "integer", "minimum": chance.randint(-50, 0), "maximum": chance.randint(1, 5000)},
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": 10},
        {"type": "string", "maxLength": chance.randint(0, 8)},
        {"type": "string", "minLength": 3, "maxLength": 5},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        {"type": "string", "format": chance.choice(["date", "ipv4", "uuid"])},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", 'gr"een', 3, None, [1]]},
        {"const": {"fixed": [True, "日本"]}},
    ]
    if depth == 2 or (depth and chance.random() < 0.5):
        return chance.choice(scalars)
    kind = chance.random()
    if kind < 0.6 or not depth:
        names = chance.sample(["a", "name", "x y", "ünï", "very_long_property_name"], chance.randint(1, 4))
        required = [name for name in names if chance.random() < 0.6]
        properties = {name: random_schema(chance, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind < 0.8:
        return {"type": "array", "items": random_schema(chance, depth + 1), "minItems": 1, "maxItems": 3}
    return {"anyOf": [random_schema(chance, depth + 1), {"type": "null"}]}


def test_200_answers_to_random_schemas_validate(
    manager: StructuredOutputManager, config: VllmConfig, tokenizer: Tokenizer
) -> None:
    chance = random.Random(2026)
    schemas = [random_schema(chance) for _ in range(50)]
    constraints = [
        {"json": schema, "disable_any_whitespace": True} if index % 2 else {"json": schema, "whitespace_pattern": " ?"}
        for index, schema in enumerate(schemas)
    ]
    answers = set()
    for seed in range(4):
        for schema, token_ids in zip(schemas, generate(manager, config, constraints, seed), strict=True):
            text = tokenizer.decode(token_ids)
            jsonschema.validate(json.loads(text), schema)
            answers.add(text)
    assert len(answers) > 150


def test_whitespace_is_where_it_was_asked_for(
    manager: StructuredOutputManager, config: VllmConfig, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    constraints: list[dict[str, Any]] = [
        {"json": schema, "disable_any_whitespace": True},
        {"json": schema, "whitespace_pattern": "[_]{1,2}"},
        {"json": json.dumps(schema), "whitespace_pattern": "[_]{1,2}"},
    ]
    gap = "_{0,2}"
    spaced = rf'{gap}\{{{gap}"a"{gap}:{gap}(true|false){gap}\}}{gap}'
    expected = [r'\{"a":(true|false)\}', spaced, spaced]
    for seed in range(5):
        for pattern, token_ids in zip(expected, generate(manager, config, constraints, seed), strict=True):
            assert re.fullmatch(pattern, tokenizer.decode(token_ids))


def test_answers_to_expressions_choices_and_grammars_match(
    manager: StructuredOutputManager, config: VllmConfig, tokenizer: Tokenizer
) -> None:
    choices = ["yes", "no", 'a "quoted" word', "日本"]
    arithmetic = r"[0-9]{1,2}(\+[0-9]{1,2}){0,3}"
    constraints: list[dict[str, Any]] = [
        {"regex": r"(\d{3}-)?\d{4}"},
        {"choice": choices},
        {"grammar": 'start: N ("+" N){0,3}\nN: /[0-9]{1,2}/'},
        {"grammar": 'root ::= n ("+" n)? ("+" n)? ("+" n)?\nn ::= [0-9] [0-9]?'},
    ]
    expected = [r"(\d{3}-)?\d{4}", "|".join(map(re.escape, choices)), arithmetic, arithmetic]
    for seed in range(5):
        for pattern, token_ids in zip(expected, generate(manager, config, constraints, seed), strict=True):
            assert re.fullmatch(pattern, tokenizer.decode(token_ids))
