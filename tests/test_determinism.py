"""A seeded request gives the same answer alone, among 64, from the prefix cache, in chunks and after a preemption, over
every client and for each of its children: the same tokens in float32, and the same bits in bfloat16."""

from collections.abc import Iterator
from typing import Any

import pytest
from clients import IN_PROCESS, SMALL_ENGINE, Runner
from prompts import token_ids
from safetensors.torch import load_file, save_file
from tiny_llama import build_tiny_llama

from corespan import LLM, CompletionOutput, RequestOutput, SamplingParams

SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"min_p": 0.02, "presence_penalty": 0.6, "repetition_penalty": 1.2},
    {"temperature": 1.4, "frequency_penalty": 0.4, "logit_bias": {77: 2.0}, "min_tokens": 20, "bad_words": [" the"]},
]
PROMPT_LENGTHS = (33, 37, 48, 41)
NUM_CHILDREN = 3
ROOMY = {"max_num_seqs": 64, "num_gpu_blocks_override": 401}
CRAMPED = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 8, "max_model_len": 128}


PROMPTS = [{"prompt_token_ids": token_ids(length)} for length in PROMPT_LENGTHS]


def seeded(kind: int, child: int = 0, **fields: Any) -> SamplingParams:
    """The sampling of that kind; `child`: what the request's child of that index is on its own."""
    return SamplingParams(
        **{"seed": 100 * kind + child, "max_tokens": 40, "ignore_eos": True, "logprobs": 3} | SAMPLING[kind] | fields
    )


Figures = tuple[list[int], list[dict[int, float]] | None]


class Engines:
    """A roomy engine and a cramped one. `exact`: logprobs must be the same bits too, not only tokens the same."""

    def __init__(self, make_runner: Any, exact: bool, **engine_args: Any) -> None:
        self.exact = exact
        self.roomy = make_runner(**ROOMY, **engine_args)
        self.cramped = make_runner(**CRAMPED, disable_log_stats=False, **engine_args)

    def figures(self, answer: CompletionOutput) -> Figures:
        if not self.exact:
            return list(answer.token_ids), None
        values = [{token: each.logprob for token, each in entry.items()} for entry in answer.logprobs or ()]
        return list(answer.token_ids), values

    def of(self, outputs: list[RequestOutput]) -> list[list[Figures]]:
        return [[self.figures(answer) for answer in output.outputs] for output in outputs]

    def alone(self, kind: int, child: int) -> Figures:
        self.roomy.call("reset_prefix_cache")
        (output,) = self.roomy.generate(PROMPTS[kind], seeded(kind, child))
        assert output.num_cached_tokens == 0
        return self.figures(output.outputs[0])

    def num_preemptions(self) -> float:
        metrics = {metric.name: metric for metric in self.cramped.call("get_metrics")}
        return float(metrics["vllm:num_preemptions"].value)


@pytest.fixture(scope="session")
def bfloat16_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_llama(tmp_path_factory.mktemp("tiny_bfloat16"), dtype="bfloat16"))


@pytest.fixture(scope="session")
def featureless_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All logits are zero: every token is as likely as any other, so an answer is nothing but the sampling noise."""
    folder = build_tiny_llama(tmp_path_factory.mktemp("featureless"), dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"].zero_()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="session")
def noise_in_float32(featureless_dir: str) -> list[list[Figures]]:
    runner = Runner("inproc", model=featureless_dir, dtype="float32", **SMALL_ENGINE)
    outputs = runner.generate(PROMPTS, [seeded(kind, n=NUM_CHILDREN) for kind in range(len(SAMPLING))])
    runner.shutdown()
    return [[(list(answer.token_ids), None) for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="session")
def first_seen() -> dict[str, Any]:
    """What the first client gave; the others must give the same."""
    return {}


@pytest.fixture(params=["float32", "bfloat16"])
def engines(
    request: pytest.FixtureRequest, make_runner: Any, tiny_llama_dir: str, bfloat16_dir: str
) -> Iterator[Engines]:
    if request.param == "float32":
        yield Engines(make_runner, exact=False, model=tiny_llama_dir)
        return
    skip_without_native_kernels()
    yield Engines(make_runner, exact=True, model=bfloat16_dir)


def skip_without_native_kernels() -> None:
    from corespan.core.kernels import library

    if not library.is_available():
        pytest.skip("bits depend on the batch without the native kernels")


def check_everywhere(engines: Engines) -> list[list[Figures]]:
    """Every kind of sampling and each of its children, in every way; returns them."""
    kinds = range(len(SAMPLING))
    expected = [[engines.alone(kind, child) for child in range(NUM_CHILDREN)] for kind in kinds]
    parents = [seeded(kind, n=NUM_CHILDREN) for kind in kinds]
    crowd = [SamplingParams(max_tokens=8 + at % 30, ignore_eos=True) for at in range(64 - NUM_CHILDREN * len(parents))]
    others = [{"prompt_token_ids": token_ids(5 + at, seed=at)} for at in range(len(crowd))]

    engines.roomy.call("reset_prefix_cache")
    together = engines.roomy.generate([*others[:20], *PROMPTS, *others[20:]], [*crowd[:20], *parents, *crowd[20:]])
    assert engines.of(together[20:24]) == expected
    again = engines.roomy.generate(PROMPTS, parents)
    assert engines.of(again) == expected
    assert [output.num_cached_tokens for output in again] == [16 * ((length - 1) // 16) for length in PROMPT_LENGTHS]

    for kind in kinds:
        assert engines.of(engines.cramped.generate(PROMPTS[kind], seeded(kind)))[0] == expected[kind][:1]  # in chunks
        before = engines.num_preemptions()
        first = SamplingParams(max_tokens=100, ignore_eos=True)  # since it began first, the other one is preempted
        pair = engines.cramped.generate_at_once([others[10], PROMPTS[kind]], [first, seeded(kind)])
        assert engines.of(pair[1:])[0] == expected[kind][:1]
        assert engines.num_preemptions() > before
    assert engines.of(engines.cramped.generate(PROMPTS, parents)) == expected
    return expected


def test_a_seeded_request_is_the_same_everywhere_and_so_is_each_child(
    engines: Engines, first_seen: dict[str, Any]
) -> None:
    figures = check_everywhere(engines)

    assert figures == first_seen.setdefault(f"exact: {engines.exact}", figures)


def test_the_noise_in_bfloat16_is_that_of_float32(
    make_runner: Any, featureless_dir: str, noise_in_float32: list[list[Figures]]
) -> None:
    assert check_everywhere(Engines(make_runner, exact=False, model=featureless_dir)) == noise_in_float32


@IN_PROCESS
def test_prompt_logprobs_in_bfloat16_are_the_same_bits_everywhere(make_runner: Any, bfloat16_dir: str) -> None:
    skip_without_native_kernels()
    engines = Engines(make_runner, exact=True, model=bfloat16_dir)
    asking = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=3)

    def figures(output: RequestOutput) -> list[dict[int, float]]:
        return [{token: each.logprob for token, each in entry.items()} for entry in (output.prompt_logprobs or ())[1:]]

    alone = [figures(engines.roomy.generate(prompt, asking)[0]) for prompt in PROMPTS]

    assert [figures(output) for output in engines.roomy.generate(PROMPTS * 16, asking)] == alone * 16
    before = engines.num_preemptions()
    assert [figures(output) for output in engines.cramped.generate_at_once(PROMPTS, [asking] * 4)] == alone
    assert engines.num_preemptions() > before


def test_the_real_model_gives_the_same_bits_in_any_company(smollm2_gguf: str, make_llm: Any) -> None:
    skip_without_native_kernels()
    texts = ["The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):\n    "]
    texts.append("The quick brown fox jumps over the lazy dog. " * 12)
    params = SamplingParams(seed=3, temperature=0.8, max_tokens=12, ignore_eos=True, logprobs=2)
    roomy = make_llm(model=smollm2_gguf, max_model_len=256)
    cramped = make_llm(model=smollm2_gguf, max_model_len=256, num_gpu_blocks_override=16, max_num_batched_tokens=48)

    def figures(llm: LLM, prompts: list[str]) -> list[Any]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(answer.token_ids, list(answer.logprobs)) for output in outputs for answer in output.outputs]

    alone = [figures(roomy, [text])[0] for text in texts]

    assert figures(roomy, texts * 3) == alone * 3
    assert figures(cramped, texts) == alone
