"""What a request may ask for, over the three clients: rows of a batch never touch each other."""

from typing import Any

from clients import IN_PROCESS
from prompts import greedy, tokens

from corespan import RepetitionDetectionParams, SamplingParams

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


@IN_PROCESS
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
