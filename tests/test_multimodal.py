"""Pictures in prompts over the three clients: a SmolVLM's answers are transformers', and what cannot be served is an
error at the caller."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clients import IN_PROCESS, Runner
from tiny_vlm import VisionReference, picture

from corespan import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CASES: list[tuple[str, list[tuple[int, int]]]] = [
    ("What is <image>?", [(100, 37)]),
    ("<image>", [(20, 20)]),
    ("Compare <image> and <image> now", [(128, 300), (41, 500)]),
    ("A text alone", []),
    ("Look: <image><image><image> well", [(64, 64), (300, 2), (65, 129)]),
]


@pytest.fixture(scope="module")
def vlm_runners() -> Iterator[dict[str, Runner]]:
    runners: dict[str, Runner] = {}
    yield runners
    for runner in runners.values():
        runner.shutdown()


@pytest.fixture
def vlm(client_kind: Any, vlm_runners: dict[str, Runner], vlm_dir: str) -> Runner:
    if client_kind not in vlm_runners:
        vlm_runners[client_kind] = Runner(
            client_kind, model=vlm_dir, max_model_len=512, num_gpu_blocks_override=257, enable_mm_embeds=True
        )
    return vlm_runners[client_kind]


def pictures(sizes: list[tuple[int, int]], seed: int = 0) -> list[Any]:
    return [picture(*size, seed=seed + number) for number, size in enumerate(sizes)]


def prompt_with(text: str, images: Any, **options: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": images}, **options}


def tokens(runner: Runner, *prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in runner.generate(list(prompts), params)]


def test_answers_are_those_of_transformers(vlm: Runner, vision_reference: VisionReference) -> None:
    cases = [(text, pictures(sizes)) for text, sizes in CASES]
    expected = [vision_reference.greedy(text, images, 8) if images else None for text, images in cases]
    given = tokens(vlm, *(prompt_with(*case) for case in cases))
    assert [each for each, text in zip(given, expected, strict=True) if text] == [each for each in expected if each]
    other = pictures(CASES[0][1], seed=7)
    assert tokens(vlm, prompt_with(CASES[0][0], other)) == [vision_reference.greedy(CASES[0][0], other, 8)]
    assert given[0] != vision_reference.greedy(CASES[0][0], other, 8), "the picture matters"


@IN_PROCESS
def test_log_probabilities_are_those_of_transformers(vlm: Runner, vision_reference: VisionReference) -> None:
    text, sizes = CASES[2]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = vlm.generate([prompt_with(text, pictures(sizes))], params)
    expected = vision_reference.logprobs(text, pictures(sizes))
    ids = output.prompt_token_ids
    assert ids == vision_reference.inputs(text, pictures(sizes))["input_ids"][0].tolist()
    found = [each[token_id].logprob for each, token_id in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    assert np.abs(found - expected[np.arange(len(ids) - 1), ids[1:]]).max() < 1e-4


@IN_PROCESS
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 8, "max_num_seqs": 3},
        {"max_num_batched_tokens": 8, "max_num_seqs": 3, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 9, "max_model_len": 128},
    ],
    ids=["chunks", "chunks without prefixes", "preemption"],
)
def test_chunks_and_preemption_change_nothing(
    make_runner: Any, vlm_dir: str, vision_reference: VisionReference, options: dict[str, Any]
) -> None:
    runner = make_runner(model=vlm_dir, **options)
    cases = [(text, pictures(sizes)) for text, sizes in CASES if sizes] * 2
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [vision_reference.greedy(text, images, 20) for text, images in cases]
    assert tokens(runner, *(prompt_with(*case) for case in cases), params=params) == expected
    if "max_model_len" in options:
        assert runner.llm.llm_engine.engine_core.engine_core.scheduler._num_preemptions > 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt": "none"}, "prompt has 0 placeholders .* for 1 pictures"),
        ({"prompt": "<image> <image>"}, "prompt has 2 placeholders"),
        ({"prompt": None, "prompt_token_ids": [1, 2]}, "prompt_token_ids has 0 placeholders"),
        ({"multi_modal_data": {"image": "a.png"}}, r"multi_modal_data\['image'\]\[0\] must be a PIL image"),
        ({"multi_modal_data": {"image": [None]}}, "a picture, or None with its uuid"),
        ({"multi_modal_data": {"video": 1}}, "of 'image' alone"),
        ({"multi_modal_data": [1]}, "multi_modal_data must be a dict"),
        ({"multi_modal_data": {"image": [picture(9, 9)] * 1000}}, "at most 999 pictures"),
        (
            {"multi_modal_data": {"image": {"image_embeds": np.zeros((3, 5))}}},
            "image_embeds must be an array of floats",
        ),
        ({"multi_modal_data": {"image": {"image_embeds": np.full((3, 64), np.nan)}}}, "image_embeds must be finite"),
        ({"multi_modal_uuids": {"image": ["a", "b"]}}, "there are 1 pictures"),
        ({"multi_modal_uuids": {"image": [3]}}, "multi_modal_uuids must be a str"),
        (
            {"multi_modal_data": {"image": [None]}, "multi_modal_uuids": {"image": ["unknown"]}},
            "'unknown' in the cache",
        ),
        ({"mm_processor_kwargs": {"speed": 3}}, "mm_processor_kwargs must be size"),
        ({"mm_processor_kwargs": {"size": {"longest_edge": 10**9}}}, "'size'. must be"),
        ({"mm_processor_kwargs": {"size": {"longest_edge": 4096}}}, "a picture of at most .* tokens"),
        ({"prompt_embeds": np.zeros((3, 64), np.float32)}, "not with prompt_embeds"),
        ({"multi_modal_data": {"image": np.zeros((1, 40_000, 3), np.uint8)}}, "at most 50000000 in all"),
    ],
)
def test_what_cannot_be_served_is_an_error_at_the_caller(vlm: Runner, change: dict[str, Any], match: str) -> None:
    prompt = {**prompt_with("a <image>", [picture(30, 30)]), **change}
    prompt = {name: value for name, value in prompt.items() if value is not None}
    with pytest.raises((ValueError, TypeError), match=match):
        vlm.generate([prompt], GREEDY)
    assert tokens(vlm, "A text"), "nobody else notices"


def test_chats_may_hold_pictures(vlm: Runner, vision_reference: VisionReference) -> None:
    image = picture(70, 30)
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "What?"}]
    (output,) = vlm.chat([[{"role": "user", "content": parts}]], GREEDY)
    text = "<|im_start|>user\n<image>What?<|im_end|>\n<|im_start|>assistant\n"
    (expected,) = tokens(vlm, {**prompt_with(text, [image])})
    ids = vision_reference.inputs(text, [image])["input_ids"][0].tolist()
    assert output.prompt_token_ids == ids[1:], "without the token that begins a completion's prompt"
    assert len(expected) == len(output.outputs[0].token_ids)


@IN_PROCESS
def test_every_way_to_give_a_picture_gives_the_same(vlm: Runner) -> None:
    image = picture(70, 30)
    (expected,) = tokens(vlm, prompt_with("a <image> b", [image]))
    ids = vlm.llm.get_tokenizer().encode("a <image> b")
    whole = vlm.llm.renderer.render_cmpl([prompt_with("a <image> b", [image])])[0]
    expanded = {"prompt_token_ids": whole["prompt_token_ids"], "multi_modal_data": {"image": image}}
    ways = [
        prompt_with("a <image> b", np.asarray(image)),
        {"prompt_token_ids": ids, "multi_modal_data": {"image": [image]}},
        expanded,
        whole,
        prompt_with("a <image> b", [image], multi_modal_uuids={"image": "it"}),
        prompt_with("a <image> b", [None], multi_modal_uuids={"image": ["it"]}),
    ]
    assert tokens(vlm, *ways) == [expected] * len(ways)
    embeds = np.random.default_rng(0).normal(size=(2, 5, 64)).astype(np.float32)
    one, both = tokens(
        vlm,
        prompt_with("a <image> b", {"image_embeds": embeds[0]}),
        prompt_with("a <image> <image>", [embeds[0], torch.from_numpy(embeds[1])]),
    )
    assert one != expected and both != one


@IN_PROCESS
def test_a_prefix_is_found_again_with_its_pictures_alone(vlm: Runner) -> None:
    text, image, other = (
        "What is there to be seen on this picture? <image> Say it.",
        picture(100, 37),
        picture(100, 37, 3),
    )
    answers = vlm.generate([prompt_with(text, [image])], GREEDY)
    again, different = (vlm.generate([prompt_with(text, [each])], GREEDY)[0] for each in (image, other))
    assert again.num_cached_tokens >= 32 > 16 <= different.num_cached_tokens < 32
    assert again.outputs[0].token_ids == answers[0].outputs[0].token_ids != different.outputs[0].token_ids


@IN_PROCESS
def test_beams_see_the_pictures(vlm: Runner) -> None:
    from corespan import BeamSearchParams

    params = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    (output,) = vlm.llm.beam_search([prompt_with("a <image> b", [picture(70, 30)])], params)
    (expected,) = tokens(vlm, prompt_with("a <image> b", [picture(70, 30)]))
    assert output.sequences[0].tokens[-8:] == expected


def test_what_the_core_has_is_not_sent_again_and_a_miss_is_answered(vlm: Runner) -> None:
    prompt = prompt_with("A <image> that comes again", [picture(90, 60, seed=11)])
    expected = tokens(vlm, prompt)
    vlm.call("reset_prefix_cache")
    assert tokens(vlm, prompt, prompt) == expected * 2
    for forget in ("reset_mm_cache", "reset_prefix_cache"):
        assert vlm.call(forget) in (None, True)
    assert tokens(vlm, prompt) == expected, "the core was sent it whole, once it had said that it lacks it"
    vlm.call("sleep", 1)
    vlm.call("wake_up")
    assert tokens(vlm, prompt) == expected


@pytest.mark.parametrize("client_kind", ["sync_mp", "async_mp"], indirect=True)
def test_a_new_core_gets_the_pictures_of_what_was_unfinished(make_runner: Any, vlm_dir: str) -> None:
    runner = make_runner(model=vlm_dir, engine_restart=3)
    prompt = prompt_with("A <image> that comes again", [picture(90, 60)])
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    expected = tokens(runner, prompt, params=params)
    output = runner.with_neighbour(prompt, params, lambda: kill_core(runner))
    assert [list(output.outputs[0].token_ids)] == expected


def kill_core(runner: Runner) -> None:
    engine = runner.engine if runner.kind == "async_mp" else runner.engine.llm_engine
    os.kill(engine.engine_core._connection.current.process.ready.pid, signal.SIGKILL)


@IN_PROCESS
def test_what_was_prepared_before_is_counted(make_runner: Any, vlm_dir: str) -> None:
    runner = make_runner(model=vlm_dir, disable_log_stats=False)
    tokens(runner, *[prompt_with("a <image>", [picture(30, 30)])] * 3)
    counts = {each.name: each.value for each in runner.llm.get_metrics() if "mm_cache" in each.name}
    assert counts == {"vllm:mm_cache_queries": 3, "vllm:mm_cache_hits": 2}


def test_the_documented_example_runs(
    vlm_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parent.parent / "docs" / "pictures.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    assert "HuggingFaceTB/SmolVLM2-256M-Video-Instruct" in code
    picture(70, 50).save(tmp_path / "holiday.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    names: dict[str, Any] = {}
    exec(code.replace("HuggingFaceTB/SmolVLM2-256M-Video-Instruct", vlm_dir), names)
    names["llm"].shutdown()
    assert capsys.readouterr().out.strip()


@IN_PROCESS
def test_native_kernels_see_the_same_in_any_chunks(
    make_runner: Any, vlm_dir: str, vision_reference: VisionReference
) -> None:
    cases = [(text, pictures(sizes)) for text, sizes in CASES if sizes]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    results = []
    for options in ({}, {"max_num_batched_tokens": 8, "max_num_seqs": 3, "enable_prefix_caching": False}):
        runner = make_runner(model=vlm_dir, dtype="bfloat16", **options)
        outputs = runner.generate([prompt_with(*case) for case in cases], params)
        results.append([(each.prompt_logprobs, each.outputs[0].token_ids) for each in outputs])
    assert results[0] == results[1]
    expected, (found, _) = vision_reference.logprobs(*cases[0]), results[0][0]
    ids = vision_reference.inputs(*cases[0])["input_ids"][0].tolist()
    near = [each[token_id].logprob for each, token_id in zip(found[1:], ids[1:], strict=True)]
    assert np.abs(near - expected[np.arange(len(ids) - 1), ids[1:]]).mean() < 0.1


@IN_PROCESS
def test_options_of_the_preparation_go_with_a_call(vlm: Runner, vision_reference: VisionReference) -> None:
    options: dict[str, Any] = {"do_image_splitting": False}
    prompt = prompt_with("a <image>", [picture(70, 30)])
    expected = vision_reference.greedy("a <image>", [picture(70, 30)], 8, **options)
    (whole,) = vlm.llm.generate(prompt, GREEDY, use_tqdm=False, mm_processor_kwargs=options)
    assert list(whole.outputs[0].token_ids) == expected
    assert tokens(vlm, {**prompt, "mm_processor_kwargs": options}) == [expected] != tokens(vlm, prompt)
    parts = [{"type": "image_pil", "image_pil": picture(70, 30)}]
    (small,) = vlm.llm.chat([{"role": "user", "content": parts}], GREEDY, mm_processor_kwargs=options, use_tqdm=False)
    (large,) = vlm.llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    assert len(small.prompt_token_ids) < len(large.prompt_token_ids)
