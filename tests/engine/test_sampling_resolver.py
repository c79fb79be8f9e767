"""What a request's sampling comes to, given the model: its vocabulary, its end tokens, its tokenizer."""

from typing import Any

import pytest

from corespan.engine.requests.sampling_resolver import SamplingResolver
from corespan.protocol.config import ModelConfig
from corespan.protocol.errors import VLLMValidationError
from corespan.protocol.params import SamplingParams
from corespan.protocol.resolved_sampling import ResolvedSampling
from corespan.protocol.structured_outputs import StructuredOutputsParams

VOCAB = 1000


def model_config(**fields: Any) -> ModelConfig:
    settings = {"model": "/m", "served_model_name": "m", "tokenizer": None, "max_model_len": 64}
    return ModelConfig(**{**settings, "hf_config": {"vocab_size": VOCAB}, **fields})


class LetterTokenizer:
    """One id per character; a word behind a space has other ids than at the start, and "xy" only one there. "~" encodes
    to nothing."""

    def __init__(self, eos_token_id: int | None = 2, max_token_id: int = 5000) -> None:
        self.eos_token_id = eos_token_id
        self.max_token_id = max_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        if text == " xy":
            return [700]
        if text.startswith(" ") and len(text) > 1:
            return [500 + ord(text[1]), *map(ord, text[2:])]
        return [ord(letter) for letter in text if letter != "~"]


def resolve(params: SamplingParams, tokenizer: LetterTokenizer | None = None, **config: Any) -> ResolvedSampling:
    return SamplingResolver(model_config(**config), tokenizer).resolve(params).sampling


@pytest.mark.parametrize("token_id", [VOCAB, VOCAB + 5, 2**40])
@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused_before_sending(field: str, token_id: int) -> None:
    def params(token_id: int) -> SamplingParams:
        return SamplingParams(**{field: {token_id: 1.0} if field == "logit_bias" else [3, token_id]})

    resolve(params(VOCAB - 1))
    resolve(params(0))
    with pytest.raises(VLLMValidationError, match=rf"{field} must be token ids within the vocabulary, 0\.\.999, got"):
        resolve(params(token_id))


def test_allowed_ids_are_those_the_tokenizer_knows() -> None:
    params = SamplingParams(allowed_token_ids=[900])
    resolve(params)
    resolve(params, LetterTokenizer(max_token_id=900))
    with pytest.raises(VLLMValidationError, match=r"allowed_token_ids .* 0\.\.899"):
        resolve(params, LetterTokenizer(max_token_id=899))
    with pytest.raises(VLLMValidationError, match=r"0\.\.999"):
        resolve(SamplingParams(allowed_token_ids=[1000]), LetterTokenizer())


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("count", "max_logprobs", "legal"),
    [
        (20, 20, True),
        (21, 20, False),
        (10**6, 20, False),
        (-1, 20, False),
        (-1, VOCAB, True),
        (-1, -1, True),
        (VOCAB, -1, True),
        (VOCAB + 1, -1, False),
        (10**6, 10**7, False),
        (0, 0, True),
        (1, 0, False),
    ],
)
def test_logprob_counts_are_held_to_max_logprobs_and_the_vocabulary(
    field: str, count: int, max_logprobs: int, legal: bool
) -> None:
    params = SamplingParams(**{field: count})
    if legal:
        resolve(params, max_logprobs=max_logprobs)
    else:
        with pytest.raises(VLLMValidationError, match=f"{field} must be at most .*, got {count}"):
            resolve(params, max_logprobs=max_logprobs)


def test_a_thinking_budget_needs_a_reasoning_parser_and_there_is_none() -> None:
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    resolve(SamplingParams(thinking_token_budget=-1))
    for budget in (0, 100):
        with pytest.raises(VLLMValidationError, match=f"thinking_token_budget must be None.*parser.*got {budget}"):
            resolve(SamplingParams(thinking_token_budget=budget))


def test_further_end_tokens_of_the_model_become_stop_tokens() -> None:
    params = SamplingParams(stop_token_ids=[9], min_tokens=1)
    sampling = resolve(params, LetterTokenizer(2), generation_config={"eos_token_id": [2, 8, 7]})
    assert sampling.eos_token_id == 2
    assert sampling.stop_token_ids == (9, 7, 8)
    assert sampling.end_token_ids == (2, 7, 8, 9)


@pytest.mark.parametrize("listed", [2, [2], None, []])
def test_a_single_end_token_is_no_stop_token(listed: Any) -> None:
    sampling = resolve(SamplingParams(min_tokens=1), LetterTokenizer(2), generation_config={"eos_token_id": listed})
    assert (sampling.eos_token_id, sampling.stop_token_ids, sampling.end_token_ids) == (2, (), (2,))


def test_ignore_eos_ignores_every_end_token_but_not_the_users_own() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[7], min_tokens=1)
    sampling = resolve(params, LetterTokenizer(2), generation_config={"eos_token_id": [2, 7, 8]})
    assert (sampling.eos_token_id, sampling.stop_token_ids) == (None, (7,))
    assert sampling.end_token_ids == (2, 7, 8)


def test_an_end_token_that_the_model_lacks_ends_nothing() -> None:
    resolver = SamplingResolver(model_config(), LetterTokenizer(VOCAB))
    assert resolver.resolve(SamplingParams()).sampling.eos_token_id is None
    assert resolver.end_token_ids == set()


def test_equal_params_are_resolved_once_and_others_are_not_taken_for_them() -> None:
    resolver = SamplingResolver(model_config(), LetterTokenizer())
    params = SamplingParams(stop_token_ids=[9], logit_bias={3: 1.0})
    first = resolver.resolve(params)
    assert resolver.resolve(SamplingParams(stop_token_ids=[9], logit_bias={3: 1.0})) is first
    assert params.stop_token_ids is not None and params.logit_bias is not None
    params.stop_token_ids.append(11)
    params.logit_bias[3] = 2.0
    second = resolver.resolve(params)
    assert (first.sampling.stop_token_ids, first.sampling.logit_bias) == ((9,), {3: 1.0})
    assert (second.sampling.stop_token_ids, second.sampling.logit_bias) == ((9, 11), {3: 2.0})


@pytest.mark.parametrize("value", [-1, "many", 1.5, True, [1]])
def test_what_has_been_set_since_construction_is_checked(value: Any) -> None:
    params = SamplingParams()
    resolver = SamplingResolver(model_config(), None)
    resolver.resolve(params)
    params.max_tokens = value
    with pytest.raises(VLLMValidationError, match="max_tokens must be None or an integer of at least 1"):
        resolver.resolve(params)


def test_bad_words_are_banned_at_the_start_and_behind_a_space() -> None:
    sampling = resolve(SamplingParams(bad_words=["ab", " c", "xy"]), LetterTokenizer())
    assert sampling.bad_words_token_ids == ((97, 98), (597, 98), (99,), (599,), (120, 121), (700,))


@pytest.mark.parametrize(
    ("word", "token_ids"),
    [
        ("\n\n", [[10, 10]]),
        ("\t", [[9]]),
        ("\nthe", [[10, 116, 104, 101]]),
        (" ", [[32]]),
        (" \n", [[510], [32, 10]]),  # at the start of a text, and behind one
    ],
)
def test_a_bad_word_that_begins_with_white_space_bans_nothing_but_itself(word: str, token_ids: list[list[int]]) -> None:
    sampling = resolve(SamplingParams(bad_words=[word]), LetterTokenizer())
    assert [list(spelled) for spelled in sampling.bad_words_token_ids] == token_ids


def test_bad_words_that_cannot_be_banned_are_refused() -> None:
    with pytest.raises(VLLMValidationError, match="bad_words must be empty when the engine has no tokenizer"):
        resolve(SamplingParams(bad_words=["a"]))
    with pytest.raises(VLLMValidationError, match="bad_words must be text that the tokenizer encodes"):
        resolve(SamplingParams(bad_words=["~"]), LetterTokenizer())
    with pytest.raises(VLLMValidationError, match=r"bad_words must be token ids within the vocabulary, 0\.\.97"):
        resolve(SamplingParams(bad_words=["ab"]), LetterTokenizer(), hf_config={"vocab_size": 98})


def test_only_a_constraint_needs_a_tokenizer() -> None:
    resolve(SamplingParams())
    with pytest.raises(VLLMValidationError, match="need a tokenizer") as error:
        resolve(SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))
    assert error.value.parameter == "structured_outputs"
