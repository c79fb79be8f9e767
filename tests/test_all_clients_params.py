"""What a request may ask for, over the three clients: rows of a batch never touch each other."""

import json
from typing import Any

import numpy as np
import pytest
from prompts import greedy, tokens

from corespan import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from corespan.protocol.outputs import EngineCoreOutput

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "one two",
    "Winter, spring and 日本",
    "Rivers run through both of them every morning.",
    "x",
]


def test_params_on_some_rows_leave_the_other_rows_alone(make_runner: Any, runner: Any) -> None:
    special = {"bad_words": [" the", "qu"], "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {77: 5.0}}
    all_params = [
        greedy(14),
        greedy(21, **special),
        greedy(5),
        SamplingParams(temperature=0.9, seed=5, max_tokens=25),
        greedy(30, **special, frequency_penalty=0.3),
        greedy(18, min_tokens=18),
    ]
    few_places = make_runner(max_num_seqs=4)

    together = tokens(few_places.generate(PROMPTS, all_params))

    alone = [tokens(runner.generate(prompt, params))[0] for prompt, params in zip(PROMPTS, all_params, strict=True)]
    plain = tokens(runner.generate(PROMPTS, greedy(14)))
    assert together == alone
    assert together[0] == plain[0]
    assert together[1][:14] != plain[1]


def test_a_seeded_request_is_the_same_alone_among_64_and_from_the_cache(runner: Any) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=123, max_tokens=20)
    crowd = [SamplingParams(temperature=1.0, max_tokens=10 + number % 7) for number in range(63)]
    runner.call("reset_prefix_cache")

    (cold,) = tokens(runner.generate(PROMPTS[4], params))
    (warm,) = tokens(runner.generate(PROMPTS[4], params))
    crowded = tokens(
        runner.generate([PROMPTS[1]] * 40 + [PROMPTS[4]] + [PROMPTS[2]] * 23, [*crowd[:40], params, *crowd[40:]])
    )

    assert cold == warm == crowded[40]


def test_tiny_temperatures_are_greedy_without_a_step(runner: Any) -> None:
    """From 1e-2 on the two best logits of this text are close enough for the second to be drawn."""
    temperatures = [1e-3, 1e-4, 2e-5, 1e-5, 1e-6, 1e-9, 1e-38]
    all_params = [
        SamplingParams(temperature=temperature, seed=1, max_tokens=8, ignore_eos=True, logprobs=1)
        for temperature in temperatures
    ]

    outputs = runner.generate([PROMPTS[1]] * len(temperatures), all_params)

    assert tokens(outputs) == tokens(runner.generate(PROMPTS[1], greedy(8))) * len(temperatures)
    assert all(np.isfinite(output.outputs[0].cumulative_logprob) for output in outputs)


def test_a_tiny_top_p_is_greedy(runner: Any) -> None:
    params = SamplingParams(top_p=1e-4, seed=1, max_tokens=8, ignore_eos=True)

    assert tokens(runner.generate(PROMPTS, params)) == tokens(runner.generate(PROMPTS, greedy(8)))


def test_logprobs_are_the_models_whatever_the_sampling(runner: Any, reference: Any) -> None:
    variants = [
        greedy(3, logprobs=3),
        SamplingParams(temperature=0.5, top_k=5, seed=1, max_tokens=3, logprobs=3),
        SamplingParams(temperature=1.5, presence_penalty=1.0, seed=2, max_tokens=3, logprobs=3),
    ]

    outputs = runner.generate([PROMPTS[0]] * 3, variants)

    expected = reference.logprobs(outputs[0].prompt_token_ids)[-1]
    best = np.argsort(-expected)[:3].tolist()
    for output in outputs:
        first = output.outputs[0].logprobs[0]
        assert [first[token].logprob for token in best] == pytest.approx(expected[best].tolist(), abs=1e-4)
        chosen = [entry[token] for entry, token in zip(output.outputs[0].logprobs, tokens([output])[0], strict=True)]
        assert output.outputs[0].cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))


def test_logprobs_of_zero_give_the_chosen_token_alone(runner: Any) -> None:
    (output,) = runner.generate(PROMPTS[0], SamplingParams(seed=3, max_tokens=5, logprobs=0))

    assert [list(entry) for entry in output.outputs[0].logprobs] == [[token] for token in tokens([output])[0]]


def test_prompt_logprobs_are_the_same_cold_warm_and_chunked(make_runner: Any, runner: Any, reference: Any) -> None:
    ids = [5 + (7 * position) % 500 for position in range(33)]
    other = [*ids[:32], 9]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    runner.call("reset_prefix_cache")
    chunked = make_runner(max_num_batched_tokens=32)

    def figures(engine: Any, prompt: list[int]) -> list[tuple[float, int, str]]:
        (output,) = engine.generate({"prompt_token_ids": prompt}, params)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        entries = [output.prompt_logprobs[position][token] for position, token in enumerate(prompt) if position]
        return [(entry.logprob, entry.rank, entry.decoded_token) for entry in entries]

    cold = figures(runner, ids)
    warm = figures(runner, ids)
    after_another = (figures(runner, other), figures(runner, ids))[1]
    in_chunks = figures(chunked, ids)

    expected = reference.logprobs(ids)
    for position, (logprob, rank, _) in enumerate(cold, start=1):
        assert logprob == pytest.approx(expected[position - 1, ids[position]], abs=1e-4)
        assert rank == int((expected[position - 1] >= expected[position - 1, ids[position]]).sum())
    for again in (warm, after_another, in_chunks):
        assert [each[1:] for each in again] == [each[1:] for each in cold]
        assert [each[0] for each in again] == pytest.approx([each[0] for each in cold], abs=1e-4)


def test_further_end_tokens_of_the_model_stop_unless_ignored_and_user_stops_always_do(make_runner: Any) -> None:
    engine = make_runner(override_generation_config={"eos_token_id": [1, 60]})

    def run(**fields: Any) -> tuple[int, str | None, Any]:
        params = SamplingParams(temperature=0, max_tokens=20, logit_bias={60: 100.0}, **fields)
        completion = engine.generate(PROMPTS[0], params)[0].outputs[0]
        return len(completion.token_ids), completion.finish_reason, completion.stop_reason

    assert run(ignore_eos=True) == (20, "length", None)
    assert run() == (1, "stop", 60)
    assert run(ignore_eos=True, stop_token_ids=[60]) == (1, "stop", 60)
    assert run(min_tokens=5)[0] == 6


def test_structured_answers_are_what_was_asked_for_beside_free_ones(runner: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    constraints = [
        StructuredOutputsParams(choice=["yes", "no"]),
        StructuredOutputsParams(regex=r"[0-9]{3}-[a-c]{2}"),
        StructuredOutputsParams(json={"enum": [1, 2, 3]}),
        None,
    ]
    all_params = [
        SamplingParams(temperature=1.0, seed=4, max_tokens=30, structured_outputs=constraint)
        for constraint in constraints
    ]
    all_params.append(
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(json=schema))
    )

    choice, regex, enum, free, _ = (output.outputs[0] for output in runner.generate([PROMPTS[0]] * 5, all_params))

    assert choice.text in ("yes", "no")
    assert len(regex.text) == 6 and regex.text[3] == "-"
    assert json.loads(enum.text) in (1, 2, 3)
    unconstrained = SamplingParams(temperature=1.0, seed=4, max_tokens=30)
    assert free.token_ids == tokens(runner.generate(PROMPTS[0], unconstrained))[0]


def test_children_of_one_prompt_compute_it_once(make_runner: Any) -> None:
    runner = make_runner(disable_log_stats=False)
    prompt = {"prompt_token_ids": [5 + position % 300 for position in range(64)]}

    (output,) = runner.generate(prompt, SamplingParams(n=4, seed=1, max_tokens=4))

    assert len({tuple(child.token_ids) for child in output.outputs}) == 4
    counters = {metric.name: metric.value for metric in runner.call("get_metrics") if metric.name.count("prefix_cache")}
    assert (counters["vllm:prefix_cache_queries"], counters["vllm:prefix_cache_hits"]) == (4 * 64, 3 * 48)


@pytest.mark.parametrize("detokenize", [True, False])
def test_without_detokenisation_there_are_tokens_and_no_text(runner: Any, detokenize: bool) -> None:
    (output,) = runner.generate(PROMPTS[0], greedy(4, detokenize=detokenize, logprobs=1))

    assert bool(output.outputs[0].text) is detokenize
    assert len(output.outputs[0].token_ids) == 4
    assert all(
        (entry.decoded_token is not None) is detokenize
        for entries in output.outputs[0].logprobs
        for entry in entries.values()
    )


def test_allowed_tokens_are_the_only_ones_and_bad_words_do_not_appear(runner: Any) -> None:
    allowed, *_ = tokens(runner.generate(PROMPTS[1], SamplingParams(seed=1, max_tokens=30, allowed_token_ids=[60, 70])))
    assert set(allowed) == {60, 70}

    tokenizer = runner.engine.get_tokenizer()
    (plain,) = tokens(runner.generate(PROMPTS[1], greedy(30)))
    words = {tokenizer.decode([token]): token for token in plain}
    banned = {
        word: token for word, token in words.items() if tokenizer.encode(word, add_special_tokens=False) == [token]
    }
    (without,) = tokens(runner.generate(PROMPTS[1], greedy(30, bad_words=list(banned))))
    assert banned and not set(banned.values()) & set(without)


def test_filters_that_leave_one_token_are_greedy_and_wider_ones_are_not(runner: Any) -> None:
    expected = tokens(runner.generate(PROMPTS[1], greedy(8)))

    def drawn(**fields: Any) -> list[list[int]]:
        return tokens(runner.generate(PROMPTS[1], SamplingParams(seed=3, max_tokens=8, ignore_eos=True, **fields)))

    assert drawn(top_k=1) == drawn(min_p=1.0) == drawn(top_p=1e-9) == drawn(temperature=1e-4) == expected
    assert drawn() == drawn(top_k=-1) == drawn(top_k=0) == drawn(top_p=1.0) == drawn(min_p=0.0) != expected


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}], ids=str)
def test_a_penalised_token_makes_way_for_the_next_best(runner: Any, penalty: dict[str, float]) -> None:
    """The biases lift two tokens over all others."""
    biased = {"logit_bias": {60: 100.0, 70: 100.0}}

    def used(**fields: Any) -> set[int]:
        return set(tokens(runner.generate("y", greedy(40, **biased, **fields)))[0])

    assert len(used(allowed_token_ids=[60])) == 1
    assert used(**penalty) == {60, 70}


@pytest.mark.parametrize("spaces", [True, False])
def test_special_tokens_show_only_when_they_are_not_skipped(runner: Any, spaces: bool) -> None:
    def text(**fields: Any) -> str:
        forced = greedy(2, logit_bias={2: 100.0}, spaces_between_special_tokens=spaces, **fields)
        return str(runner.generate(PROMPTS[0], forced)[0].outputs[0].text)

    assert text() == ""
    assert text(skip_special_tokens=False) == "<|im_start|><|im_start|>"


def test_named_tokens_are_reported_beside_the_chosen_one(runner: Any) -> None:
    (output,) = runner.generate(PROMPTS[0], greedy(3, logprob_token_ids=[7, 9]))

    chosen = output.outputs[0].token_ids
    assert [set(entry) for entry in output.outputs[0].logprobs] == [{token, 7, 9} for token in chosen]


def test_truncated_prompts_keep_their_end(runner: Any) -> None:
    ids = list(range(5, 105))

    (output,) = runner.generate({"prompt_token_ids": ids}, greedy(4, truncate_prompt_tokens=10))

    assert output.prompt_token_ids == ids[-10:]
    assert tokens([output]) == tokens(runner.generate({"prompt_token_ids": ids[-10:]}, greedy(4)))


def test_trace_headers_come_back_from_the_core_with_the_end_of_their_request(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = (
        runner.async_llm.output_processor if runner.kind == "async_mp" else runner.llm.llm_engine.output_processor
    )
    process_outputs = processor.process_outputs
    seen: list[EngineCoreOutput] = []

    def recorded(outputs: list[EngineCoreOutput], *rest: Any) -> Any:
        seen.extend(outputs)
        return process_outputs(outputs, *rest)

    monkeypatch.setattr(processor, "process_outputs", recorded)
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    prepared = runner.engine.input_processor.process_inputs("traced", [5, 6, 7], greedy(4), trace_headers=headers)
    runner.stream(prepared, greedy(4))

    *earlier, last = seen
    assert last.trace_headers == headers
    assert all(output.trace_headers is None for output in earlier)


def test_a_request_that_repeats_itself_is_ended_and_counted_and_the_others_go_on(make_runner: Any) -> None:
    engine = make_runner(disable_log_stats=False)
    only_60 = {"logit_bias": {60: 100.0}}
    detections = [RepetitionDetectionParams(2, 1, 5), RepetitionDetectionParams(9, 3, 4), None]
    all_params = [greedy(20, **only_60, repetition_detection=detection) for detection in detections]

    ends = [output.outputs[0] for output in engine.generate([PROMPTS[0]] * 3, all_params)]

    assert [(len(end.token_ids), end.finish_reason, end.stop_reason) for end in ends] == [
        (5, "repetition", "repetition_detected"),
        (12, "repetition", "repetition_detected"),
        (20, "length", None),
    ]
    metrics = [metric for metric in engine.call("get_metrics") if metric.name == "vllm:request_success"]
    counts = {metric.labels["finished_reason"]: metric.value for metric in metrics}
    assert counts == {"stop": 0, "length": 1, "abort": 0, "error": 0, "repetition": 2}
