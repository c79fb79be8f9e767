"""The sampler over mixed batches: a row's tokens are its own, a tiny temperature is greedy, faults stay in a row."""

import random

import msgspec
import numpy as np
import pytest
import torch
from sampler_driver import MAX_ROWS, Loop, as_resolved, draw_many, generate_alone, new_request, sample_rows, vllm_config

from corespan.core.sampling.metadata import SamplingBatch
from corespan.core.sampling.sampler import Sampler
from corespan.core.scheduler.runner_messages import NewRequestData
from corespan.protocol.params import SamplingParams
from corespan.protocol.resolved_sampling import ResolvedSampling, resolved

VOCAB = 200


def with_stop_ids(params: SamplingParams, *token_ids: int) -> ResolvedSampling:
    return resolved(params, token_ids[0], token_ids)


def with_bad_words(params: SamplingParams | ResolvedSampling, *words: list[int]) -> ResolvedSampling:
    return msgspec.structs.replace(as_resolved(params), bad_words_token_ids=tuple(map(tuple, words)))


def kinds() -> list[SamplingParams | ResolvedSampling]:
    """Requests that use each parameter, alone and together."""
    return [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=10),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(temperature=0.9, top_k=90, top_p=0.8, min_p=0.01),
        SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=0.4),
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.8, frequency_penalty=-1.0),
        SamplingParams(temperature=0, logit_bias={5: 6.0, 9: 4.0, 150: -100.0}),
        SamplingParams(allowed_token_ids=list(range(10, 60))),
        with_stop_ids(SamplingParams(temperature=0, min_tokens=8), *range(0, VOCAB, 3)),
        with_bad_words(SamplingParams(top_k=3), [7], [8, 9], *[[i] for i in range(100, 150)]),
        with_bad_words(SamplingParams(temperature=0), *[[i, i + 1] for i in range(150)]),
        SamplingParams(logprobs=3),
        SamplingParams(temperature=0, logprob_token_ids=[4, 9]),
    ]


def request_of(kind: SamplingParams, index: int) -> NewRequestData:
    return new_request(kind, seed=1000 + index, prompt=list(range(index % 5 + 1, index % 5 + 4 + index % 7)))


@pytest.mark.parametrize("seed", range(6))
def test_rows_equal_their_solo_run_while_others_join_leave_and_wait(seed: int) -> None:
    chance = random.Random(seed)
    waiting = [request_of(kind, index) for index, kind in enumerate(kinds() * 2)]
    chance.shuffle(waiting)
    loop, present = Loop(VOCAB), {}
    for _ in range(60):
        free = [row for row in range(MAX_ROWS) if row not in present]
        if waiting and free and chance.random() < 0.7:
            row = chance.choice(free)
            present[row] = waiting.pop()
            loop.add(row, present[row])
        sampled = [row for row in present if chance.random() < 0.8]
        chance.shuffle(sampled)
        if sampled:
            loop.step(sampled)
        for row in [row for row in present if len(loop.tokens[row]) - present[row].num_prompt_tokens >= 12]:
            request = present.pop(row)
            assert loop.remove(row) == generate_alone(request, 12, VOCAB), request.sampling_params
    assert len(waiting) < 12


def test_a_batch_that_goes_on_draws_what_a_new_one_would_at_every_token() -> None:
    params = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_k=10)]
    loop = Loop(VOCAB)
    for row, kind in enumerate(params):
        loop.add(row, new_request(kind, seed=row))
    for _ in range(40):
        loop.step([0, 1, 2])
    for length in range(3, 43):
        logits = torch.stack([loop.model.logits(loop.tokens[row][:length]) for row in range(3)])
        drawn = sample_rows(logits, params, range(3), outputs=[loop.tokens[row][3:length] for row in range(3)])
        assert drawn.token_ids.tolist() == [loop.tokens[row][length] for row in range(3)]


def test_a_seeded_row_is_the_same_whatever_its_mates() -> None:
    mine = SamplingParams(seed=42, temperature=0.8, top_k=50, top_p=0.95)
    logits = torch.randn(9, 3000, generator=torch.Generator().manual_seed(5))
    alone = sample_rows(logits[:1], [mine], [42]).token_ids[0]
    others = [SamplingParams(temperature=0.8), SamplingParams(temperature=0), SamplingParams(top_k=3, logprobs=2)]
    for mates in range(9):
        for place in (0, mates // 2, mates):
            params = [others[i % 3] for i in range(mates)]
            params.insert(place, mine)
            rows = torch.cat([logits[1 : place + 1], logits[:1], logits[place + 1 : mates + 1]])
            seeds = [7 * i for i in range(mates)]
            seeds.insert(place, 42)
            assert sample_rows(rows, params, seeds).token_ids[place] == alone


def test_a_row_without_parameters_gives_the_same_logprobs_beside_rows_with_every_parameter() -> None:
    plain = SamplingParams(logprobs=5)
    logits = torch.randn(len(kinds()) + 1, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    params = [plain, *kinds()]
    for mode in ("raw_logprobs", "processed_logprobs"):
        mixed = sample_rows(logits, params, mode=mode).logprobs
        alone = sample_rows(logits[:1], [plain], mode=mode).logprobs
        assert mixed is not None and alone is not None
        assert mixed.token_ids[0, :6].tolist() == alone.token_ids[0].tolist()
        assert mixed.logprobs[0, :6].tobytes() == alone.logprobs[0].tobytes()
        assert mixed.ranks[0] == alone.ranks[0]


def test_a_preempted_request_goes_on_with_the_tokens_it_would_have_had() -> None:
    for index, kind in enumerate(kinds()):
        request = request_of(kind, index)
        whole = generate_alone(request, 12, VOCAB)
        for generated in (1, 5, 11):
            again = new_request(
                kind, request.noise_seed, request.token_ids, whole[request.num_prompt_tokens :][:generated]
            )
            assert generate_alone(again, 12 - generated, VOCAB) == whole


@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-4, 1e-5, 1.1e-5, 9e-6, 1e-7, 1e-9, 1e-38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiny_temperature_gives_the_greedy_tokens_and_no_nan(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.randn(20, 5000, generator=torch.Generator().manual_seed(9)) * 5
    best = logits.argmax(1)
    logits[torch.arange(20), best] += 1.0
    logits = logits.to(dtype).float()
    for filters in ({}, {"top_p": 1e-4}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.1}):
        params = SamplingParams(temperature=temperature, seed=1, logprobs=2, **filters)
        for mode in ("raw_logprobs", "processed_logprobs"):
            drawn = sample_rows(logits, [params] * 20, mode=mode)
            assert drawn.token_ids.tolist() == best.tolist()
            assert drawn.logprobs is not None
            assert np.isfinite(drawn.logprobs.logprobs[:, 0]).all()
            assert not np.isnan(drawn.logprobs.logprobs).any()


@pytest.mark.parametrize("params", [SamplingParams(top_p=1e-4), SamplingParams(top_k=1), SamplingParams(min_p=1.0)])
def test_filters_that_leave_one_token_leave_the_greedy_one(params: SamplingParams) -> None:
    logits = (torch.randn(30, 1000, generator=torch.Generator().manual_seed(4)) * 4).bfloat16().float()
    greedy = sample_rows(logits, [SamplingParams(temperature=0)] * 30).token_ids
    if params.min_p:
        logits[torch.arange(30), torch.from_numpy(greedy)] += 1.0
    assert sample_rows(logits, [params] * 30).token_ids.tolist() == greedy.tolist()


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(min_p=0.2, logprobs=1)]
)
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_row_alone(params: SamplingParams, fault: float) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    sound = sample_rows(logits, [params] * 4).token_ids
    logits[2, 17] = fault
    drawn = sample_rows(logits, [params] * 4)
    assert list(drawn.failed) == [2]
    assert "not finite" in drawn.failed[2]
    assert drawn.token_ids.tolist() == [sound[0], sound[1], -1, sound[3]]


def test_a_row_without_any_token_left_fails_alone() -> None:
    params = [SamplingParams(), with_bad_words(SamplingParams(allowed_token_ids=[3]), [3]), SamplingParams(top_k=2)]
    drawn = sample_rows(torch.zeros(3, VOCAB), params)
    assert list(drawn.failed) == [1]
    assert "no token is left" in drawn.failed[1]


def test_every_row_may_fail() -> None:
    drawn = sample_rows(torch.full((2, VOCAB), float("nan")), [SamplingParams(), SamplingParams(top_k=3, logprobs=1)])
    assert sorted(drawn.failed) == [0, 1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1e-300),
        SamplingParams(repetition_penalty=1e300),
        SamplingParams(logit_bias={3: 1e308, 4: -1e308}, repetition_penalty=1e-300),
        SamplingParams(temperature=1e-5, logit_bias={3: 1e308}),
    ],
)
def test_extreme_values_do_not_break_a_row(params: SamplingParams) -> None:
    assert not sample_rows(torch.randn(1, VOCAB), [params], outputs=[[3, 4]]).failed


def test_bad_words_are_banned_where_their_beginning_was_generated() -> None:
    params = with_bad_words(SamplingParams(temperature=0), [7, 8, 9], [5], [7, 8])
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 8], logits[0, 5], logits[0, 4] = 4.0, 3.0, 2.0, 1.0
    for output, expected in [([7, 8], 8), ([7], 9), ([8], 9), ([], 9), ([1, 7, 8], 8)]:
        assert sample_rows(logits, [params], outputs=[output]).token_ids.tolist() == [expected]
    logits[0, 9] = logits[0, 8] = 0.0
    assert sample_rows(logits, [params]).token_ids.tolist() == [4]


def test_a_prompt_does_not_begin_a_bad_word() -> None:
    params = with_bad_words(SamplingParams(temperature=0), [7, 8])
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 1.0
    assert sample_rows(logits, [params], prompts=[[7]]).token_ids.tolist() == [8]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_every_end_token_until_it_is_reached(ignore_eos: bool) -> None:
    given = SamplingParams(temperature=0, min_tokens=2, ignore_eos=ignore_eos, stop_token_ids=[6])
    params = with_stop_ids(given, 4, 5)
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 5, 6, 7]] = torch.tensor([5.0, 4.0, 3.0, 2.0])
    drawn = [sample_rows(logits, [params], outputs=[[9] * count]).token_ids[0] for count in range(4)]
    assert drawn == [7, 7, 4, 4]


def test_min_tokens_gives_way_where_only_an_end_token_is_allowed() -> None:
    params = with_stop_ids(SamplingParams(temperature=0, min_tokens=5, allowed_token_ids=[4]), 4)
    assert sample_rows(torch.zeros(1, VOCAB), [params]).token_ids.tolist() == [4]


def test_a_stop_id_beyond_the_vocabulary_is_no_index() -> None:
    params = with_stop_ids(SamplingParams(temperature=0, min_tokens=5), 4, VOCAB + 7)
    assert not sample_rows(torch.zeros(1, VOCAB), [params]).failed


def test_penalties_count_generated_tokens_as_they_come() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    logits = torch.zeros(VOCAB)
    logits[[10, 20]] = torch.tensor([2.5, 2.0])
    batch = SamplingBatch(vllm_config(VOCAB), 1)
    batch.add(0, new_request(params, prompt=[10, 10, 10]))
    drawn = []
    for _ in range(5):
        token_ids = Sampler(batch).sample(logits[None].clone(), np.array([0])).token_ids
        batch.append_tokens(np.array([0]), token_ids)
        drawn.extend(token_ids.tolist())
    assert drawn == [10, 20, 10, 20, 10]


def test_repetition_penalty_counts_the_prompt() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, [10, 20]] = torch.tensor([3.0, 2.0])
    assert sample_rows(logits, [params], prompts=[[10]]).token_ids.tolist() == [20]
    assert sample_rows(logits, [params], prompts=[[11]]).token_ids.tolist() == [10]


def bitmask_of(*allowed: list[int]) -> np.ndarray:
    bits = np.zeros((len(allowed), (VOCAB + 31) // 32 * 32), dtype=np.uint8)
    for row, token_ids in enumerate(allowed):
        bits[row, token_ids] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def test_a_grammar_binds_its_lines_only() -> None:
    batch = SamplingBatch(vllm_config(VOCAB), 3)
    for row in range(3):
        batch.add(row, new_request(SamplingParams(temperature=0, logprobs=0)))
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(3, 1)
    drawn = Sampler(batch).sample(logits.clone(), np.arange(3), np.array([2, 0]), bitmask_of([5, 31, 32], [0, 199]))
    assert drawn.token_ids.tolist() == [199, 199, 32]
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprobs[2, 0] == pytest.approx(torch.log_softmax(logits[2], 0)[32].item(), abs=1e-4)
    empty = Sampler(batch).sample(logits.clone(), np.arange(3), np.array([1]), bitmask_of([]))
    assert list(empty.failed) == [1]


def test_an_untouched_batch_of_draws_does_not_change_its_logits() -> None:
    logits = torch.randn(2, VOCAB)
    untouched = logits.clone()
    batch = SamplingBatch(vllm_config(VOCAB), 2)
    batch.add(0, new_request(SamplingParams(logprobs=2)))
    batch.add(1, new_request(SamplingParams(logprobs=2, top_p=0.5)))
    Sampler(batch).sample(logits, np.arange(2))
    assert torch.equal(logits, untouched)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_without_native_kernels_the_answers_are_the_same(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [*kinds(), *[SamplingParams(logprobs=2, top_p=0.8, top_k=20, seed=i) for i in range(20)]]
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    logits[4, 8] = float("nan")
    with_kernels = sample_rows(logits, params, mode=mode)
    monkeypatch.setenv("CORESPAN_CPU_ISA", "none")
    without = sample_rows(logits, params, mode=mode)
    assert with_kernels.token_ids.tolist() == without.token_ids.tolist()
    assert with_kernels.failed == without.failed
    assert with_kernels.logprobs is not None and without.logprobs is not None
    assert with_kernels.logprobs.token_ids.tolist() == without.logprobs.token_ids.tolist()
    assert with_kernels.logprobs.ranks.tolist() == without.logprobs.ranks.tolist()
    assert with_kernels.logprobs.logprobs == pytest.approx(without.logprobs.logprobs, abs=1e-5)


def test_different_seeds_draw_different_tokens() -> None:
    assert len(set(draw_many(torch.zeros(VOCAB), SamplingParams(), 400).tolist())) > 100


def test_all_constraints_together_leave_what_each_of_them_allows() -> None:
    chance = np.random.default_rng(0)
    logits = torch.from_numpy(chance.normal(0, 3, (40, VOCAB)).astype(np.float32))
    params, outputs, left = [], [], []
    grammars = [sorted(chance.choice(VOCAB, 60, replace=False).tolist()) for _ in range(0, 40, 2)]
    for line in range(40):
        allowed = set(chance.choice(VOCAB, 120, replace=False).tolist())
        words = [[int(word), int(last)] for word, last in chance.integers(0, VOCAB, (30, 2))]
        stops, output = set(chance.choice(VOCAB, 20, replace=False).tolist()), [words[3][0]] * (line % 4)
        kind = SamplingParams(temperature=0, logprobs=2, min_tokens=2, allowed_token_ids=sorted(allowed))
        params.append(with_bad_words(with_stop_ids(kind, *stops), *words, [line]))
        outputs.append(output)
        allowed -= {word[1] for word in words if output[-1:] == word[:1]} | {line}
        allowed &= set(grammars[line // 2]) if line % 2 == 0 else allowed
        left.append((allowed - stops or allowed) if len(output) < 2 else allowed)
    batch = SamplingBatch(vllm_config(VOCAB), 40)
    for line in range(40):
        batch.add(line, new_request(params[line], output=outputs[line]))
    untouched = logits.clone()
    drawn = Sampler(batch).sample(logits, np.arange(40), np.arange(0, 40, 2), bitmask_of(*grammars))
    assert drawn.token_ids.tolist() == [
        max(ids, key=lambda token: logits[line, token]) for line, ids in enumerate(left)
    ]
    assert torch.equal(logits, untouched), "the draw masks what it reads; nobody copies or rewrites the logits for it"
    assert drawn.logprobs is not None
    raw = torch.log_softmax(logits, 1)
    assert drawn.logprobs.logprobs[:, 1:] == pytest.approx(raw.topk(2).values.numpy(), abs=1e-4)


def test_a_row_whose_min_tokens_are_there_is_drawn_like_any_other() -> None:
    batch = SamplingBatch(vllm_config(VOCAB), 2)
    batch.add(0, new_request(with_stop_ids(SamplingParams(temperature=0, min_tokens=2), 4)))
    batch.add(1, new_request(SamplingParams(temperature=0, min_tokens=2)))  # nothing would end it
    rows = np.arange(2)
    assert list(batch.masks) == [0]
    for _ in range(3):
        batch.append_tokens(rows, Sampler(batch).sample(torch.zeros(2, VOCAB), rows).token_ids)
    assert not batch.masks


def test_a_grammar_for_none_of_the_lines_binds_nothing() -> None:
    batch = SamplingBatch(vllm_config(VOCAB), 1)
    batch.add(0, new_request(SamplingParams(temperature=0)))
    nothing = np.empty((0, (VOCAB + 31) // 32), dtype=np.int32)
    drawn = Sampler(batch).sample(torch.eye(1, VOCAB), np.arange(1), np.empty(0, dtype=np.int64), nothing)
    assert drawn.token_ids.tolist() == [0]
