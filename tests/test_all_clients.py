"""One suite over the three clients: the same requests give the same tokens, ends and errors behind each of them."""

import random
from typing import Any

import numpy as np
import pytest

from corespan import RequestOutput, RequestOutputKind, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "one two", "Winter, spring and 日本", "x" * 150]


def greedy(max_tokens: int = 24, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def token_ids(length: int, seed: int = 0) -> list[int]:
    """A prompt of `length` ordinary tokens."""
    generator = random.Random(f"{seed}-{length}")
    return [generator.randrange(4, 512) for _ in range(length)]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="session")
def first_seen() -> dict[str, Any]:
    """What the first client gave for a case; the others must give the same."""
    return {}


def test_greedy_tokens_equal_transformers(runner: Any, reference: Any) -> None:
    outputs = runner.generate(PROMPTS, greedy(40))

    expected = [reference.greedy(output.prompt_token_ids, 40, eos_token_id=None) for output in outputs]
    assert tokens(outputs) == expected
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(PROMPTS)


def test_text_is_the_decoded_tokens(runner: Any, tiny_llama_dir: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{tiny_llama_dir}/tokenizer.json")

    outputs = runner.generate(PROMPTS, greedy())

    assert [output.outputs[0].text for output in outputs] == [tokenizer.decode(ids) for ids in tokens(outputs)]
    assert [output.prompt for output in outputs] == PROMPTS


def test_the_end_token_stops_without_a_reason(runner: Any, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, logit_bias={1: 1000.0}, min_tokens=5)

    (output,) = runner.generate(PROMPTS[0], params)

    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].token_ids[-1] == 1
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_a_mix_of_params_gives_each_request_what_it_gets_alone(runner: Any, first_seen: dict[str, Any]) -> None:
    all_params = [
        greedy(9),
        SamplingParams(temperature=0.8, seed=1, max_tokens=17),
        SamplingParams(temperature=1.3, top_k=20, seed=2, max_tokens=20, presence_penalty=1.0),
        greedy(12, repetition_penalty=1.5),
        SamplingParams(temperature=1.0, top_p=0.7, min_p=0.01, seed=3, max_tokens=11, logprobs=2),
    ]

    together = runner.generate(PROMPTS, all_params)

    alone = [runner.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, all_params, strict=True)]
    assert tokens(together) == tokens(alone)
    assert tokens(together) == first_seen.setdefault("mixed", tokens(together))


def test_seeded_sampling_does_not_depend_on_unseeded_mates(runner: Any, first_seen: dict[str, Any]) -> None:
    seeded = SamplingParams(seed=42, temperature=0.8, top_k=50, max_tokens=16)
    unseeded = SamplingParams(temperature=0.8, max_tokens=16)

    runs = [
        tokens(runner.generate([PROMPTS[0]] + [PROMPTS[1]] * mates, [seeded] + [unseeded] * mates))[0]
        for mates in (0, 1, 7)
    ]

    assert runs == [first_seen.setdefault("seeded", runs[0])] * 3


def test_children_of_n_have_seeds_of_their_own_and_all_output_kinds_agree(
    runner: Any, first_seen: dict[str, Any]
) -> None:
    def answers(kind: RequestOutputKind) -> list[RequestOutput]:
        params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=12, ignore_eos=True, output_kind=kind)
        return runner.stream(PROMPTS[0], params)

    (final,) = answers(RequestOutputKind.FINAL_ONLY)
    expected = {output.index: (output.text, output.token_ids) for output in final.outputs}
    latest: dict[int, Any] = {}
    cumulative = answers(RequestOutputKind.CUMULATIVE)
    for output in cumulative:
        latest |= {each.index: (each.text, each.token_ids) for each in output.outputs}
    joined: dict[int, Any] = {}
    deltas = answers(RequestOutputKind.DELTA)
    for output in deltas:
        for each in output.outputs:
            text, ids = joined.get(each.index, ("", []))
            joined[each.index] = (text + each.text, ids + each.token_ids)

    assert sorted(expected) == [0, 1, 2]
    assert len({text for text, _ in expected.values()}) == 3
    assert latest == joined == expected == first_seen.setdefault("children", expected)
    for outputs in (cumulative, deltas):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_each_child_equals_the_single_request_with_its_seed(runner: Any) -> None:
    params = SamplingParams(n=3, seed=10, temperature=1.0, max_tokens=12)

    (together,) = runner.generate(PROMPTS[1], params)

    for child in together.outputs:
        single = SamplingParams(seed=10 + child.index, temperature=1.0, max_tokens=12)
        assert tokens(runner.generate(PROMPTS[1], single)) == [child.token_ids]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_begins_and_ends_inside_tokens_cuts_there(runner: Any, include: bool) -> None:
    (whole,) = runner.generate(PROMPTS[1], greedy())
    text = whole.outputs[0].text
    stop = text[5:9]
    end = text.index(stop) + (len(stop) if include else 0)

    outputs = runner.stream(
        PROMPTS[1], greedy(stop=[stop], include_stop_str_in_output=include, output_kind=RequestOutputKind.DELTA)
    )

    assert "".join(output.outputs[0].text for output in outputs) == text[:end]
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", stop)
    assert runner.is_idle()


def test_a_stop_token_id_ends_the_request_and_is_the_reason(runner: Any) -> None:
    (whole,) = runner.generate(PROMPTS[0], greedy())
    stop = whole.outputs[0].token_ids[5]
    end = whole.outputs[0].token_ids.index(stop) + 1

    (output,) = runner.generate(PROMPTS[0], greedy(stop_token_ids=[stop]))

    assert output.outputs[0].token_ids == whole.outputs[0].token_ids[:end]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


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


def test_the_second_run_of_a_prompt_comes_from_the_prefix_cache(runner: Any) -> None:
    runner.call("reset_prefix_cache")
    prompt = {"prompt_token_ids": token_ids(40, seed=7)}

    (cold,) = runner.generate(prompt, greedy())
    (warm,) = runner.generate(prompt, greedy())

    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    assert tokens([cold]) == tokens([warm])


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_prompt_of_whole_blocks_is_right_when_it_is_cached_whole(runner: Any, length: int) -> None:
    runner.call("reset_prefix_cache")
    prompt = {"prompt_token_ids": token_ids(length)}

    first, second = runner.generate([prompt, prompt], greedy(8))
    (third,) = runner.generate(prompt, greedy(8))

    assert third.num_cached_tokens == length - 16
    assert tokens([first]) == tokens([second]) == tokens([third])


def test_cache_salts_keep_requests_from_sharing_blocks(runner: Any) -> None:
    prompt = {"prompt_token_ids": token_ids(40, seed=9)}

    cached = [
        runner.generate({**prompt, "cache_salt": salt}, greedy(2))[0].num_cached_tokens for salt in ("a", "b", "a")
    ]

    assert cached == [0, 0, 32]


def test_chunked_prefill_changes_nothing(make_runner: Any, runner: Any) -> None:
    prompts = [{"prompt_token_ids": token_ids(length)} for length in (31, 32, 33, 64, 200)]
    chunked = make_runner(max_num_batched_tokens=32)

    assert tokens(chunked.generate(prompts, greedy(8))) == tokens(runner.generate(prompts, greedy(8)))


def test_preempted_requests_end_up_with_the_tokens_of_a_roomy_run(make_runner: Any, runner: Any) -> None:
    lengths = (15, 16, 17, 31, 32, 33, 20, 40)
    prompts = [{"prompt_token_ids": token_ids(length)} for length in lengths]
    all_params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=100, ignore_eos=True, logprobs=1, presence_penalty=0.5)
        for seed in range(len(prompts))
    ]
    cramped = make_runner(num_gpu_blocks_override=33, disable_log_stats=False)

    preempted = cramped.generate(prompts, all_params)

    roomy = runner.generate(prompts, all_params)
    counters = {metric.name: metric for metric in cramped.call("get_metrics")}
    assert counters["vllm:num_preemptions"].value > 0
    assert tokens(preempted) == tokens(roomy)
    for one, other in zip(preempted, roomy, strict=True):
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason == "length"
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
    assert cramped.is_idle()


def test_streams_of_preempted_requests_repeat_and_lose_nothing(make_runner: Any) -> None:
    cramped = make_runner(num_gpu_blocks_override=9, max_model_len=128)
    delta = greedy(90, output_kind=RequestOutputKind.DELTA)
    (expected,) = cramped.generate(PROMPTS[0], greedy(90))
    pieces: list[RequestOutput] = []

    cramped.with_neighbour(PROMPTS[1], greedy(90), lambda: pieces.extend(cramped.stream(PROMPTS[0], delta)))

    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == tokens([expected])[0]
    assert "".join(piece.outputs[0].text for piece in pieces) == expected.outputs[0].text


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


@pytest.mark.parametrize("max_tokens", [1, 10, None])
def test_a_prompt_one_short_of_max_model_len_yields_one_token(runner: Any, max_tokens: int | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    (output,) = runner.generate({"prompt_token_ids": token_ids(511)}, params)

    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_an_empty_text_is_the_begin_token_alone(runner: Any) -> None:
    (output,) = runner.generate("", greedy(3))

    assert output.prompt_token_ids == [0]
    assert len(output.outputs[0].token_ids) == 3


def test_prompt_embeds_give_what_their_tokens_give(make_runner: Any, runner: Any, reference: Any) -> None:
    import torch

    prompts = [[0, *token_ids(length)] for length in (4, 39)]
    expected = tokens(runner.generate(prompts, greedy()))
    embed = reference.model.get_input_embeddings()
    embeds = [{"prompt_embeds": embed(torch.tensor(ids)).detach()} for ids in prompts]

    outputs = make_runner(enable_prompt_embeds=True).generate([*embeds, *prompts], greedy())

    assert tokens(outputs) == [*expected, *expected]


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

    first = runner.with_neighbour(PROMPTS[0], greedy(40), same_id_again, request_id="twin")

    assert tokens([first]) == tokens([alone])
    assert len(runner.stream(PROMPTS[1], greedy(4), request_id="twin")[-1].outputs[0].token_ids) == 4


def test_a_request_that_the_core_rejects_ends_alone_with_an_error(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from corespan.engine.input_processor import InputProcessor
    from corespan.protocol.requests import EngineCoreRequest

    monkeypatch.setattr(InputProcessor, "check_prepared", lambda *arguments: None)
    (alone,) = runner.generate(PROMPTS[2], greedy(60))
    rejected: list[RequestOutput] = []
    request = EngineCoreRequest("unchecked", prompt_token_ids=[600], sampling_params=greedy(4))

    together = runner.with_neighbour(
        PROMPTS[2],
        greedy(60),
        lambda: rejected.extend(runner.stream(request, greedy(4), request_id="unchecked")),
    )

    assert rejected[-1].outputs[0].finish_reason == "error"
    assert tokens([together]) == tokens([alone])
    assert runner.is_idle()


def test_a_prepared_request_keeps_its_own_id(runner: Any) -> None:
    processor = runner.engine.input_processor if runner.kind == "async_mp" else runner.llm.llm_engine.input_processor
    request, _ = processor.process_inputs("its-own", PROMPTS[0], greedy(6))

    outputs = runner.stream(request, greedy(6), request_id="another")

    assert outputs[-1].request_id == "its-own"
    assert tokens([outputs[-1]]) == tokens(runner.generate(PROMPTS[0], greedy(6)))


def test_a_utility_that_fails_is_that_calls_error_alone(runner: Any) -> None:
    with pytest.raises(Exception, match="no_such_method"):
        runner.call("collective_rpc", "no_such_method")

    assert len(runner.generate(PROMPTS[0], greedy(3))) == 1


def test_sleep_and_wake_up_forget_the_cache_but_not_the_model(runner: Any) -> None:
    prompt = {"prompt_token_ids": token_ids(40, seed=11)}
    (before,) = runner.generate(prompt, greedy(8))

    runner.call("sleep", 1)
    assert runner.call("is_sleeping")
    runner.call("wake_up")

    (after,) = runner.generate(prompt, greedy(8))
    assert not runner.call("is_sleeping")
    assert after.num_cached_tokens == 0
    assert tokens([after]) == tokens([before])


def test_a_request_larger_than_the_cache_is_refused_at_start(make_runner: Any) -> None:
    with pytest.raises(ValueError, match="128"):
        make_runner(num_gpu_blocks_override=9, max_model_len=512)


def test_an_automatic_max_model_len_is_what_the_cache_holds(make_runner: Any) -> None:
    fitted = make_runner(num_gpu_blocks_override=9, max_model_len=-1)

    (output,) = fitted.generate({"prompt_token_ids": token_ids(120)}, SamplingParams(max_tokens=None, ignore_eos=True))

    assert fitted.engine.model_config.max_model_len == 128
    assert len(output.outputs[0].token_ids) == 8


def test_logprobs_equal_transformers(runner: Any, reference: Any) -> None:
    (output,) = runner.generate(PROMPTS[0], greedy(8, logprobs=3, prompt_logprobs=2))
    expected = reference.logprobs(output.prompt_token_ids + output.outputs[0].token_ids)
    num_prompt_tokens = len(output.prompt_token_ids)

    assert output.prompt_logprobs[0] is None
    for position, token_id in enumerate(output.prompt_token_ids[1:], start=1):
        entry = output.prompt_logprobs[position][token_id]
        assert entry.logprob == pytest.approx(expected[position - 1, token_id], abs=1e-4)
    for position, token_id in enumerate(output.outputs[0].token_ids):
        entries = output.outputs[0].logprobs[position]
        assert len(entries) == 3
        for each, entry in entries.items():
            assert entry.logprob == pytest.approx(expected[num_prompt_tokens + position - 1, each], abs=1e-4)
        assert entries[token_id].rank == 1


def test_engines_with_statistics_report_the_same_counts(make_runner: Any) -> None:
    counted = make_runner(disable_log_stats=False)

    (output,) = counted.generate(PROMPTS[0], greedy(7))
    counted.stream(PROMPTS[1], greedy(400), abort_after=1)

    metrics = counted.call("get_metrics")
    success = {
        metric.labels["finished_reason"]: metric.value for metric in metrics if metric.name == "vllm:request_success"
    }
    assert success == {"stop": 0, "length": 1, "abort": 1, "error": 0, "repetition": 0}
    assert output.metrics.num_generation_tokens == 7
    assert output.metrics.first_token_latency > 0
