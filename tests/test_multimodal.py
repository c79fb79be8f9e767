"""Pictures in prompts over the three clients: a SmolVLM's answers are transformers', and what cannot be served is an
error at the caller."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from clients import IN_PROCESS, Runner
from tiny_vlm import VisionReference, build_tiny_vlm, picture

from corespan import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CASES: list[tuple[str, list[tuple[int, int]]]] = [
    ("What is <image>?", [(100, 37)]),
    ("<image>", [(20, 20)]),
    ("Compare <image> and <image> now", [(128, 300), (41, 500)]),
    ("A text alone", []),
    ("Look: <image><image><image> well", [(64, 64), (300, 2), (65, 129)]),
]


@pytest.fixture(scope="session")
def vlm_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_vlm(tmp_path_factory.mktemp("tiny_vlm")))


@pytest.fixture(scope="session")
def vision_reference(vlm_dir: str) -> VisionReference:
    return VisionReference(vlm_dir)


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


def prompt_with(text: str, images: list[Any], **options: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": images}, **options} if images else {"prompt": text}


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
