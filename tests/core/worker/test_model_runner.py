"""The model runner's steps: who is sampled, what comes back, and that one request's fault stays its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from step_driver import StepDriver

from corespan.core.scheduler.runner_messages import SchedulerOutput
from corespan.core.worker.worker import Worker
from corespan.protocol.params import SamplingParams

PROMPT = [(7 * i) % 300 for i in range(40)]


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=1000, **options)


@pytest.fixture
def expected(llama: Any) -> torch.Tensor:
    """Log-probabilities that transformers gives at each position of PROMPT, [40, vocab]."""
    with torch.inference_mode():
        return torch.log_softmax(llama[2](torch.tensor([PROMPT])).logits[0], -1)


def test_a_chunk_that_leaves_prompt_over_samples_nothing(driver: StepDriver) -> None:
    driver.add("r", PROMPT)
    assert driver.step({"r": 25}).req_ids == []
    assert driver.step({"r": 15}).req_ids == ["r"]


def test_a_row_freed_and_taken_again_keeps_nothing_of_its_former_request(driver: StepDriver) -> None:
    driver.add("alone", PROMPT[:9])
    driver.run(6)
    alone = driver.requests["alone"].output
    driver.remove("alone")
    driver.add("former", PROMPT * 2, SamplingParams(temperature=1.0, max_tokens=9, logit_bias={3: 100.0}, logprobs=2))
    driver.step({"former": 80})
    driver.remove("former")
    driver.add("next", PROMPT[:9])
    driver.run(6)
    assert driver.requests["next"].output == alone


def test_a_request_removed_and_resumed_in_one_step_goes_on_where_it_was(driver: StepDriver) -> None:
    driver.add("r", PROMPT)
    driver.run(8)
    whole = driver.requests["r"].output
    driver.remove("r")
    driver.add("r", PROMPT)
    driver.run(4)
    so_far = driver.requests["r"]
    driver.remove("r")
    driver.add("r", so_far.token_ids)
    driver.requests["r"].num_prompt_tokens = len(PROMPT)
    driver.run(8)
    assert driver.requests["r"].output == whole


def test_many_requests_that_come_and_go_equal_their_solo_runs(driver: StepDriver) -> None:
    rng = np.random.default_rng(0)
    prompts = {str(i): rng.integers(0, 320, rng.integers(1, 50)).tolist() for i in range(24)}
    solo = {}
    for req_id, prompt in prompts.items():
        driver.add(req_id, prompt)
        driver.run(10)
        solo[req_id] = driver.requests[req_id].output
        driver.remove(req_id)
    waiting = list(prompts)
    finished = {}
    while waiting or driver.requests:
        for req_id in waiting[: int(rng.integers(0, 3))]:
            driver.add(req_id, prompts[req_id])
            waiting.remove(req_id)
        chunks = {
            req_id: min(int(rng.integers(1, 20)), len(request.token_ids) - request.computed)
            for req_id, request in driver.requests.items()
            if rng.random() < 0.8
        }
        driver.step(chunks)
        for req_id in [key for key, request in driver.requests.items() if len(request.output) == 10]:
            finished[req_id] = driver.requests[req_id].output
            driver.remove(req_id)
    assert finished == solo


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_requests_that_go_on_while_others_come_and_go_equal_their_solo_runs(
    make_worker: Callable[..., Worker], dtype: str
) -> None:
    driver, rng = StepDriver(make_worker(dtype=dtype)), np.random.default_rng(1)
    kinds = [greedy(), SamplingParams(max_tokens=100), greedy(repetition_penalty=1.2), greedy(prompt_logprobs=0)]
    requests = {str(i): (rng.integers(0, 320, rng.integers(1, 60)).tolist(), kinds[i % 4]) for i in range(16)}
    solo = {}
    for req_id, (prompt, params) in requests.items():
        driver.add(req_id, prompt, params)
        driver.run(40)
        solo[req_id] = driver.requests[req_id].output
        driver.remove(req_id)
    finished = {}
    waiting = list(requests)
    while waiting or driver.requests:
        if waiting and rng.random() < 0.15:
            driver.add(waiting[0], *requests[waiting.pop(0)])
        driver.step({req_id: min(20, len(r.token_ids) - r.computed) for req_id, r in driver.requests.items()})
        for req_id in [req_id for req_id, request in driver.requests.items() if len(request.output) == 40]:
            finished[req_id] = driver.requests[req_id].output
            driver.remove(req_id)
    assert finished == solo


@pytest.mark.parametrize("chunks", [[40], [1, 16, 23], [39, 1]], ids=str)
@pytest.mark.parametrize("k", [0, 3, -1])
def test_prompt_logprobs_equal_transformers_however_the_prompt_is_cut(
    driver: StepDriver, expected: torch.Tensor, chunks: list[int], k: int
) -> None:
    driver.add("neighbour", PROMPT[:5])
    driver.add("r", PROMPT, greedy(prompt_logprobs=k))
    for chunk in chunks:
        driver.step({"neighbour": 5 if not driver.requests["neighbour"].entered else 1, "r": chunk})
    parts = driver.requests["r"].prompt_logprobs
    logprobs = np.concatenate([part.logprobs for part in parts])
    token_ids = np.concatenate([part.token_ids for part in parts])
    ranks = np.concatenate([part.ranks for part in parts])
    own = expected[torch.arange(39), PROMPT[1:]]
    width = expected.shape[1] if k == -1 else k
    assert token_ids.shape == (39, width + 1)
    assert token_ids[:, 0].tolist() == PROMPT[1:]
    np.testing.assert_allclose(logprobs[:, 0], own, atol=1e-4)
    np.testing.assert_allclose(logprobs[:, 1:], expected[:39].topk(width).values, atol=1e-4)
    smallest, largest = (((expected[:39] > own[:, None] + shift).sum(1) + 1).numpy() for shift in (1e-4, -1e-4))
    assert ((smallest <= ranks) & (ranks <= largest)).all()


def test_prompt_logprobs_and_sampling_go_together_in_one_batch(driver: StepDriver, expected: torch.Tensor) -> None:
    driver.add("plain", PROMPT)
    driver.add("wants", PROMPT, greedy(prompt_logprobs=0, logprobs=1))
    output = driver.step({"plain": 40, "wants": 40})
    best = int(expected[-1].argmax())
    assert dict(zip(output.req_ids, output.sampled_token_ids, strict=True)) == {"plain": best, "wants": best}
    assert list(output.prompt_logprobs) == ["wants"]
    assert output.logprobs is not None
    line = output.req_ids.index("wants")
    np.testing.assert_allclose(output.logprobs.logprobs[line, 0], expected[-1, best], atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_given_as_embeddings_equals_the_same_prompt_as_tokens(
    make_worker: Callable[..., Worker], llama: Any, dtype: str
) -> None:
    driver = StepDriver(make_worker(dtype=dtype))
    driver.add("tokens", PROMPT)
    driver.run(8, chunk=13)
    embeds = llama[2].model.embed_tokens.weight.detach()[PROMPT].numpy()
    driver.add("embeds", [0] * len(PROMPT), prompt_embeds=embeds)
    driver.run(8, chunk=13)
    assert driver.requests["embeds"].output == driver.requests["tokens"].output


def test_embeddings_of_a_wrong_shape_fail_that_request_alone(driver: StepDriver) -> None:
    driver.add("good", PROMPT)
    driver.add("bad", [0, 0], prompt_embeds=np.zeros((2, 63), dtype=np.float32))
    output = driver.step({"good": 40, "bad": 2})
    assert output.req_ids == ["good"]
    assert output.failed == {"bad": "prompt_embeds are of shape [2, 63], expected [2, 64]"}
    driver.remove("bad")
    assert driver.step({"good": 1}).failed == {}


def test_a_request_that_may_draw_nothing_fails_alone(driver: StepDriver) -> None:
    driver.add("good", PROMPT, greedy(logprobs=0))
    driver.add("bad", PROMPT[:7], greedy(logprobs=0))
    nothing = np.zeros((1, 10), dtype=np.int32)
    output = driver.step({"bad": 7, "good": 40}, ["bad"], nothing)
    assert output.req_ids == ["good"]
    assert output.logprobs is not None and output.logprobs.token_ids[:, 0].tolist() == output.sampled_token_ids
    assert list(output.failed) == ["bad"]


def test_a_grammar_binds_its_own_request_only(driver: StepDriver) -> None:
    driver.add("free", PROMPT)
    driver.add("bound", PROMPT)
    only_token_33 = np.zeros((1, 10), dtype=np.int32)
    only_token_33[0, 1] = 2
    output = driver.step({"free": 40, "bound": 40}, ["bound"], only_token_33)
    tokens = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
    assert tokens["bound"] == 33
    assert tokens["free"] != 33


def test_a_sequence_may_fill_max_model_len_to_the_last_token(driver: StepDriver) -> None:
    max_model_len = driver.worker.vllm_config.model_config.max_model_len
    driver.add("r", [1] * (max_model_len - 1))
    assert driver.step({"r": max_model_len - 1}).req_ids == ["r"]
    assert len(driver.requests["r"].token_ids) == max_model_len


def test_an_empty_step_does_nothing(driver: StepDriver) -> None:
    nobody = np.empty(0, dtype=np.int64)
    output = driver.worker.execute_model(SchedulerOutput([], [3], nobody, nobody, 0))
    assert (output.rows.tolist(), output.failed) == ([], {})
