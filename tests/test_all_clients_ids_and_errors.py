"""Aborts, ids used twice, and requests that are refused or fail, over the three clients: no neighbour notices."""

from typing import Any

import numpy as np
import pytest
from odd_errors import ODD_ERRORS, raise_odd
from prompts import PROMPTS, greedy, tokens

from corespan import RequestOutput, SamplingParams
from corespan.engine.text.detokenizer import Detokenizer
from corespan.engine.text.renderer import Renderer


@pytest.mark.parametrize("n", [1, 4])
def test_abort_frees_blocks_and_every_table_while_running(runner: Any, n: int) -> None:
    params = SamplingParams(n=n, temperature=1.0, max_tokens=400, ignore_eos=True)

    outputs = runner.stream(PROMPTS[0], params, abort_after=2)

    assert not outputs[-1].finished
    assert runner.is_idle()


def test_abort_leaves_the_neighbour_alone(runner: Any) -> None:
    (alone,) = runner.generate(PROMPTS[2], greedy(60))

    def abort_another() -> None:
        runner.stream(PROMPTS[1], greedy(400), abort_after=3)

    together = runner.with_neighbour(PROMPTS[2], greedy(60), abort_another)

    assert tokens([together]) == tokens([alone])


BAD_REQUESTS = {
    "token id past the vocabulary": ({"prompt_token_ids": [5, 512]}, {}, ValueError),
    "negative token id": ({"prompt_token_ids": [-1]}, {}, ValueError),
    "huge token id": ({"prompt_token_ids": [2**40]}, {}, ValueError),
    "empty prompt": ({"prompt_token_ids": []}, {}, ValueError),
    "prompt as long as max_model_len": ({"prompt_token_ids": [5] * 512}, {}, ValueError),
    "prompt longer than max_model_len": ({"prompt_token_ids": [5] * 513}, {}, ValueError),
    "bias on a token past the vocabulary": ("hi", {"logit_bias": {512: 1.0}}, ValueError),
    "bias on a negative token": ("hi", {"logit_bias": {-1: 1.0}}, ValueError),
    "allowed token past the vocabulary": ("hi", {"allowed_token_ids": [512]}, ValueError),
    "stop token past the vocabulary": ("hi", {"stop_token_ids": [512]}, ValueError),
    "too many logprobs": ("hi", {"logprobs": 10**6}, ValueError),
    "too many prompt logprobs": ("hi", {"prompt_logprobs": 10**6}, ValueError),
    "bytes for a prompt": (b"hi", {}, TypeError),
    "a dict without a prompt": ({"text": "hi"}, {}, TypeError),
    "floats for token ids": ({"prompt_token_ids": [1.5]}, {}, TypeError),
    "a number for text": ({"prompt": 5}, {}, TypeError),
    "a lone surrogate": ("\ud800", {}, ValueError),
    "embeddings without the option": ({"prompt_embeds": np.zeros((1, 64), np.float32)}, {}, ValueError),
}


def test_bad_requests_are_refused_at_the_caller_and_harm_no_neighbour(runner: Any) -> None:
    (alone,) = runner.generate(PROMPTS[0], greedy(200))

    def send_bad_requests() -> None:
        for name, (prompt, fields, error) in BAD_REQUESTS.items():
            with pytest.raises(error):
                runner.stream(prompt, SamplingParams(max_tokens=4, **fields))
                pytest.fail(f"{name} was accepted")

    together = runner.with_neighbour(PROMPTS[0], greedy(200), send_bad_requests)

    assert tokens([together]) == tokens([alone])
    assert runner.is_idle()


def test_two_live_requests_may_share_the_callers_id(runner: Any) -> None:
    alone = runner.generate(PROMPTS[:2], greedy(30))

    together = runner.under_one_id("shared", PROMPTS[:2], greedy(30))

    assert tokens([together[prompt] for prompt in PROMPTS[:2]]) == tokens(alone)
    assert {output.request_id for output in together.values()} == {"shared"}


def test_without_random_ids_a_live_id_is_refused_and_free_again_after_the_end(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    (alone,) = runner.generate(PROMPTS[0], greedy(40))

    def same_id_again() -> None:
        with pytest.raises(ValueError, match="twin"):
            runner.stream(PROMPTS[1], greedy(4), request_id="twin")

    first = runner.while_held(PROMPTS[0], greedy(40), same_id_again, request_id="twin")

    assert tokens([first]) == tokens([alone])
    assert len(runner.stream(PROMPTS[1], greedy(4), request_id="twin")[-1].outputs[0].token_ids) == 4


@pytest.mark.parametrize(("num_first", "num_second"), [(2, 1), (1, 2), (2, 2)])
def test_without_random_ids_a_live_id_is_refused_whichever_of_the_two_has_several_answers(
    runner: Any, monkeypatch: pytest.MonkeyPatch, num_first: int, num_second: int
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")

    def params(n: int, max_tokens: int) -> SamplingParams:
        return SamplingParams(n=n, temperature=1.0, seed=5, max_tokens=max_tokens, ignore_eos=True)

    (alone,) = runner.generate([PROMPTS[0]], params(num_first, 40))

    def same_id_again() -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match="twin"):
                runner.stream(PROMPTS[1], params(num_second, 4), request_id="twin")

    first = runner.while_held(PROMPTS[0], params(num_first, 40), same_id_again, request_id="twin")

    assert [answer.token_ids for answer in first.outputs] == [answer.token_ids for answer in alone.outputs]
    again = runner.stream(PROMPTS[1], params(num_second, 4), request_id="twin")
    assert again[-1].finished
    assert runner.is_idle()


def test_without_random_ids_nothing_of_an_aborted_request_reaches_the_next_of_its_id(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    (alone,) = runner.generate(PROMPTS[1], greedy(8))
    for abort_after in (1, 3, 5):
        runner.stream(PROMPTS[0], greedy(400), request_id="twin", abort_after=abort_after)
        again = runner.stream(PROMPTS[1], greedy(8), request_id="twin")[-1]
        assert again.finished and tokens([again]) == tokens([alone])
    assert runner.is_idle()


@pytest.mark.parametrize("name", [name for name in ODD_ERRORS if name != "KeyboardInterrupt"])  # that may be Ctrl-C
def test_whatever_a_tokenizer_raises_is_the_error_of_its_request(
    runner: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (alone,) = runner.generate(PROMPTS[2], greedy(60))
    update, render = Detokenizer.update, Renderer.render_cmpl

    def poisoned_update(detokenizer: Detokenizer, *arguments: Any) -> Any:
        if detokenizer.params.max_tokens == 7:
            raise_odd(name)
        return update(detokenizer, *arguments)

    def poisoned_render(renderer: Renderer, prompts: list[Any], *arguments: Any) -> Any:
        if prompts == ["poison"]:
            raise_odd(name)
        return render(renderer, prompts, *arguments)

    monkeypatch.setattr(Detokenizer, "update", poisoned_update)
    monkeypatch.setattr(Renderer, "render_cmpl", poisoned_render)
    failed: list[RequestOutput] = []

    def decode_and_encode() -> None:
        failed.extend(runner.stream(PROMPTS[0], greedy(7)))
        with pytest.raises(RuntimeError, match=f"processing the prompt raised {name}"):
            runner.stream("poison", greedy(4))

    together = runner.with_neighbour(PROMPTS[2], greedy(60), decode_and_encode)

    assert failed[-1].finished and failed[-1].outputs[0].finish_reason == "error"
    assert f"the tokenizer's decode raised {name}" in str(failed[-1].outputs[0].stop_reason)
    assert tokens([together]) == tokens([alone])
    assert runner.is_idle()


def test_a_request_that_the_core_rejects_ends_alone_with_an_error(runner: Any) -> None:
    (alone,) = runner.generate(PROMPTS[2], greedy(60))
    rejected: list[RequestOutput] = []
    prepared = runner.engine.input_processor.process_inputs("unchecked", [5], greedy(4))
    prepared.request.prompt_token_ids = [600]

    together = runner.with_neighbour(
        PROMPTS[2],
        greedy(60),
        lambda: rejected.extend(runner.stream(prepared, greedy(4), request_id="unchecked")),
    )

    assert rejected[-1].outputs[0].finish_reason == "error"
    assert tokens([together]) == tokens([alone])
    assert runner.is_idle()


def test_a_prepared_request_keeps_its_own_id(runner: Any) -> None:
    prepared = runner.engine.input_processor.process_inputs("its-own", PROMPTS[0], greedy(6))

    outputs = runner.stream(prepared, greedy(6), request_id="another")

    assert outputs[-1].request_id == "its-own"
    assert tokens([outputs[-1]]) == tokens(runner.generate(PROMPTS[0], greedy(6)))


def test_a_utility_that_fails_is_that_calls_error_alone(runner: Any) -> None:
    with pytest.raises(Exception, match="no_such_method"):
        runner.call("collective_rpc", "no_such_method")

    assert len(runner.generate(PROMPTS[0], greedy(3))) == 1
