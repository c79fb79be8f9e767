"""What callers get wrong, or do as other engines have taught them, over the three clients."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import IN_PROCESS
from prompts import PROMPTS, greedy, tokens
from tiny_llama import write_tokenizer

from corespan import EngineDeadError, RequestOutputKind, SamplingParams, StructuredOutputsParams


@pytest.fixture
def beside_a_neighbour(runner: Any) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Runs a function while another request generates, whose tokens must not change; then nothing may be left."""

    def run(action: Callable[[], None]) -> None:
        (alone,) = runner.generate(PROMPTS[0], greedy(200))
        together = runner.with_neighbour(PROMPTS[0], greedy(200), action)
        assert tokens([together]) == tokens([alone])

    yield run
    assert runner.is_idle()


def test_a_batch_with_a_prompt_that_cannot_be_served_leaves_nothing_queued(runner: Any) -> None:
    for wrong in ([5] * 600, [], [10**6], 5, {"prompt": 5}, "\ud800"):
        with pytest.raises((TypeError, ValueError)):
            runner.generate([PROMPTS[0], PROMPTS[1], wrong, PROMPTS[2]], greedy())

    (output,) = runner.generate([PROMPTS[2]], greedy(4))
    assert output.prompt == PROMPTS[2]
    assert runner.is_idle()


def test_an_interrupt_leaves_nothing_queued(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if runner.kind == "async_mp":
        pytest.skip("an interrupt ends the event loop, and its tasks are cancelled")
    step, steps = runner.llm.llm_engine.step, iter(range(3))

    def interrupted() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(runner.llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.generate(PROMPTS, greedy(300))
    monkeypatch.undo()

    assert len(runner.generate(PROMPTS[0], greedy(4))) == 1
    assert runner.is_idle()


WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "a number for a request id": ({"request_id": 5}, TypeError),
    "a lone surrogate in a request id": ({"request_id": "\ud800"}, ValueError),
    "no params": ({"params": None}, TypeError),
    "a dict for params": ({"params": {"max_tokens": 5}}, TypeError),
    "text for a priority": ({"priority": "high"}, TypeError),
    "a priority past 64 bits": ({"priority": 2**70}, ValueError),
    "text for an arrival time": ({"arrival_time": "now"}, TypeError),
    "an arrival time that is no time": ({"arrival_time": float("nan")}, ValueError),
    "text for trace headers": ({"trace_headers": "a=b"}, TypeError),
    "numbers in trace headers": ({"trace_headers": {"a": 5}}, TypeError),
    "a number for tokenization_kwargs": ({"tokenization_kwargs": 5}, TypeError),
    "truncation to nothing": ({"tokenization_kwargs": {"truncate_prompt_tokens": 0}}, ValueError),
    "truncation to more than the model takes": ({"tokenization_kwargs": {"truncate_prompt_tokens": 600}}, ValueError),
    "a side to truncate that is none": ({"tokenization_kwargs": {"truncation_side": "top"}}, ValueError),
    "an adapter": ({"lora_request": object()}, ValueError),
    "a number in the place of an option's name": ({"tokenization_kwargs": {5: 1, "truncation_side": 3}}, ValueError),
}
NOT_UNICODE_OR_NAMED = r"surrogate|truncate_prompt_tokens is 600|empty|^\w+ must be .*, got "


def test_wrong_arguments_of_a_request_are_refused_at_the_caller(runner: Any, beside_a_neighbour: Any) -> None:
    def send() -> None:
        for name, (wrong, error) in WRONG_ARGUMENTS.items():
            arguments = {"request_id": "wrong", "prompt": PROMPTS[1], "params": greedy(), **wrong}
            with pytest.raises(error, match=NOT_UNICODE_OR_NAMED):
                add_request(runner, **arguments)
                pytest.fail(f"{name} was accepted")

    beside_a_neighbour(send)


def test_wrong_arguments_of_controls_are_refused_at_the_caller(runner: Any) -> None:
    engine = runner.engine if runner.kind == "async_mp" else runner.llm.llm_engine
    abort = "abort" if runner.kind == "async_mp" else "abort_request"
    wrong_calls = [
        *(("wait_for_requests_to_drain", value, "drain_timeout") for value in ("5", None, -1, float("nan"))),
        *(("apply_model", value, "func") for value in (5, "parameters")),
        *((abort, value, "request_ids") for value in (5, None)),
        ("wake_up", "weights", "tags"),
        ("shutdown", "soon", "timeout"),
    ]
    for control, value, name in wrong_calls:
        with pytest.raises((TypeError, ValueError), match=f"^{name} must be .*, got {value!r}"):
            runner.result_of(getattr(engine, control)(value))


WRONG_FIELDS: dict[str, Any] = {
    "n": 0,
    "max_tokens": "5",
    "min_tokens": 50,
    "temperature": float("nan"),
    "top_p": 5,
    "top_k": -7,
    "logprobs": 1.5,
    "stop_token_ids": [-1],
    "logit_bias": {5: float("nan")},
    "allowed_token_ids": [],
    "seed": 2**70,
    "stop": [""],
    "bad_words": 5,
    "structured_outputs": "json",
    "output_kind": "delta",
    "extra_args": {"f": object()},
    "skip_special_tokens": None,
}


def test_params_made_wrong_after_their_construction_are_refused_at_the_caller(
    runner: Any, beside_a_neighbour: Any
) -> None:
    def send() -> None:
        for field, value in WRONG_FIELDS.items():
            params = greedy()
            setattr(params, field, value)
            with pytest.raises((TypeError, ValueError), match=field):
                add_request(runner, "wrong", PROMPTS[1], params)
                pytest.fail(f"{field}={value!r} was accepted")

    beside_a_neighbour(send)


def test_lengths_past_what_the_model_takes_are_cut_to_it(runner: Any) -> None:
    for lengths in (
        {"max_tokens": 2**62},
        {"max_tokens": None},
        {"max_tokens": None, "min_tokens": 10_000},
        {"max_tokens": 2**62, "min_tokens": 2**62},
    ):
        (output,) = runner.generate([[5] * 500], SamplingParams(temperature=0, ignore_eos=True, **lengths))
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (12, "length")


def test_a_single_id_may_be_aborted_as_it_is(runner: Any) -> None:
    for given in ("one", ["one"], ("one",)):
        arguments = {"request_id": "one", "prompt": PROMPTS[0], "params": greedy(400)}
        if runner.kind == "async_mp":
            runner.call("add_request", **arguments)
            runner.call("abort", given)
        else:
            runner.llm.llm_engine.add_request(**arguments)
            runner.llm.llm_engine.abort_request(given)
        assert runner.is_idle()


def test_enqueued_prompts_are_answered_in_order_whatever_is_generated_in_between(runner: Any) -> None:
    if runner.kind == "async_mp":
        pytest.skip("AsyncLLM has no queue of its own")
    expected = tokens(runner.generate(PROMPTS, greedy()))

    runner.llm.enqueue(PROMPTS[:2], greedy(), use_tqdm=False)
    between = runner.generate([PROMPTS[1]], greedy(30))
    runner.llm.enqueue(PROMPTS[2], greedy(), use_tqdm=False)
    outputs = runner.llm.wait_for_completion(use_tqdm=False)

    assert tokens(outputs) == expected
    assert tokens(between)[0][:8] == expected[1]
    assert [int(output.request_id) for output in outputs] == sorted(int(output.request_id) for output in outputs)
    assert runner.llm.wait_for_completion(use_tqdm=False) == []


def test_prompts_rendered_beforehand_are_generated_from_as_they_are(runner: Any) -> None:
    rendered = runner.engine.renderer.render_cmpl([PROMPTS[0], {"prompt_token_ids": [5, 6, 7], "cache_salt": "s"}])

    outputs = runner.generate(rendered, greedy())

    assert [output.prompt_token_ids for output in outputs] == [each["prompt_token_ids"] for each in rendered]
    assert [output.prompt for output in outputs] == [PROMPTS[0], None]
    assert tokens(outputs) == tokens(runner.generate([PROMPTS[0], [5, 6, 7]], greedy()))


@IN_PROCESS
def test_a_prompt_without_tokens_is_refused_whatever_made_it_empty(make_runner: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, add_bos=False)
    runner = make_runner(tokenizer=str(tmp_path))

    for prompt in ("", {"prompt": ""}, [[]], {"prompt_token_ids": []}):
        with pytest.raises(ValueError, match="the prompt is empty"):
            runner.generate(prompt, greedy())

    assert runner.generate([], greedy()) == []
    assert len(runner.generate("x", greedy(3))[0].outputs[0].token_ids) == 3


def test_what_other_engines_have_and_this_one_has_not_is_none(runner: Any) -> None:
    add_request(runner, "with-no-adapter", PROMPTS[0], greedy(1), lora_request=None)
    if runner.kind != "async_mp":
        assert len(runner.llm.generate(PROMPTS, greedy(1), use_tqdm=False, lora_request=[None] * 3)) == 3
    (output,) = runner.generate(PROMPTS[0], greedy(2))
    assert (output.lora_request, output.encoder_prompt, output.encoder_prompt_token_ids) == (None, None, None)
    assert (output.kv_transfer_params, output.outputs[0].lora_request, output.outputs[0].routed_experts) == (None,) * 3


@IN_PROCESS
def test_a_stop_token_that_is_special_takes_no_text_with_it(make_runner: Any, runner: Any, tmp_path: Path) -> None:
    (whole,) = runner.generate(PROMPTS[1], greedy(12))
    ids = whole.outputs[0].token_ids
    stop = next(token_id for token_id in ids[5:] if ids.index(token_id) >= 5)
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    (spelling,) = (token for token, token_id in content["model"]["vocab"].items() if token_id == stop)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"].append({"id": stop, "content": spelling, **flags})
    path.write_text(json.dumps(content))

    special = make_runner(tokenizer=str(tmp_path))
    (output,) = special.generate([whole.prompt_token_ids], greedy(12, stop_token_ids=[stop], skip_special_tokens=True))

    (answer,) = output.outputs
    assert answer.token_ids == ids[: ids.index(stop) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.text == runner.engine.get_tokenizer().decode(answer.token_ids[:-1], skip_special_tokens=True)


TEXT = "ďábel 👩‍👩‍👧 日本 ok"


@pytest.mark.parametrize("stop", [[], ["nowhere to be found"]])
def test_characters_of_several_tokens_come_whole_in_every_kind_of_output(runner: Any, stop: list[str]) -> None:
    def outputs(kind: RequestOutputKind, max_tokens: int = 200) -> list[Any]:
        constraint = StructuredOutputsParams(choice=[TEXT])
        return runner.stream(
            PROMPTS[0],
            SamplingParams(max_tokens=max_tokens, structured_outputs=constraint, output_kind=kind, stop=stop),
        )

    deltas = [output.outputs[0] for output in outputs(RequestOutputKind.DELTA)]
    assert "".join(delta.text for delta in deltas) == TEXT
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert sum(len(delta.token_ids) for delta in deltas) > len(TEXT)

    for max_tokens in range(1, 9):
        delta, cumulative, final = (outputs(kind, max_tokens) for kind in (1, 0, 2))
        cut = "".join(output.outputs[0].text for output in delta)
        assert cut == cumulative[-1].outputs[0].text == final[-1].outputs[0].text
        assert TEXT.startswith(cut.removesuffix("\ufffd"))


def test_after_shutdown_every_call_says_that_the_engine_is_gone(make_runner: Any) -> None:
    runner = make_runner()
    runner.generate(PROMPTS[0], greedy(1))
    runner.engine.shutdown()

    with pytest.raises(EngineDeadError):
        add_request(runner, "late", PROMPTS[0], greedy())
    with pytest.raises(EngineDeadError):
        runner.call("reset_prefix_cache")


def add_request(runner: Any, request_id: Any, prompt: Any, params: Any, **arguments: Any) -> None:
    """Queues a request with any of `add_request`'s arguments, and aborts it if it was taken."""
    if runner.kind == "async_mp":
        runner.call("add_request", request_id, prompt, params, **arguments)
        runner.call("abort", request_id)
    else:
        runner.llm.llm_engine.add_request(request_id, prompt, params, **arguments)
        runner.llm.llm_engine.abort_request([request_id])
