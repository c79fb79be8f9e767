"""What of the sampling parameters depends on the model: its vocabulary, its end tokens, its tokenizer."""

from typing import Any

import pytest

from corespan.protocol.config import ModelConfig
from corespan.protocol.errors import VLLMValidationError
from corespan.protocol.params import SamplingParams

VOCAB = 1000


def model_config(**fields: Any) -> ModelConfig:
    settings = {"model": "/m", "served_model_name": "m", "tokenizer": None, "max_model_len": 64}
    return ModelConfig(**{**settings, "hf_config": {"vocab_size": VOCAB}, **fields})


@pytest.mark.parametrize("token_id", [VOCAB, VOCAB + 5, 2**40])
@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused_before_sending(field: str, token_id: int) -> None:
    def params(token_id: int) -> SamplingParams:
        return SamplingParams(**{field: {token_id: 1.0} if field == "logit_bias" else [3, token_id]})

    params(VOCAB - 1).verify(model_config())
    params(0).verify(model_config())
    with pytest.raises(VLLMValidationError, match=rf"{field} must be token ids within the vocabulary, 0\.\.999, got"):
        params(token_id).verify(model_config())


def test_allowed_ids_are_those_the_tokenizer_knows() -> None:
    params = SamplingParams(allowed_token_ids=[900])
    params.verify(model_config())
    params.verify(model_config(), tokenizer_len=901)
    with pytest.raises(VLLMValidationError, match=r"allowed_token_ids .* 0\.\.899"):
        params.verify(model_config(), tokenizer_len=900)
    with pytest.raises(VLLMValidationError, match=r"0\.\.999"):
        SamplingParams(allowed_token_ids=[1000]).verify(model_config(), tokenizer_len=5000)


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
    config = model_config(max_logprobs=max_logprobs)
    if legal:
        params.verify(config)
    else:
        with pytest.raises(VLLMValidationError, match=f"{field} must be at most .*, got {count}"):
            params.verify(config)


def test_a_thinking_budget_needs_a_reasoning_parser_and_there_is_none() -> None:
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    SamplingParams(thinking_token_budget=-1).verify(model_config())
    for budget in (0, 100):
        with pytest.raises(VLLMValidationError, match=f"thinking_token_budget must be None.*parser.*got {budget}"):
            SamplingParams(thinking_token_budget=budget).verify(model_config())


def test_further_end_tokens_of_the_model_become_stop_tokens() -> None:
    params = SamplingParams(stop_token_ids=[9])
    params.update_from_generation_config({"eos_token_id": [2, 8, 7]}, 2)
    assert params.eos_token_id == 2
    assert params.stop_token_ids == [9, 7, 8]
    assert params.all_stop_token_ids == {2, 7, 8, 9}


@pytest.mark.parametrize("listed", [2, [2], None, []])
def test_a_single_end_token_is_no_stop_token(listed: Any) -> None:
    params = SamplingParams()
    params.update_from_generation_config({"eos_token_id": listed}, 2)
    assert (params.eos_token_id, params.stop_token_ids, params.all_stop_token_ids) == (2, [], {2})


def test_ignore_eos_ignores_every_end_token_but_not_the_users_own() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[7])
    params.update_from_generation_config({"eos_token_id": [2, 7, 8]}, 2)
    assert (params.eos_token_id, params.stop_token_ids) == (None, [7])
    assert params.all_stop_token_ids == {2, 7, 8}


class LetterTokenizer:
    """One id per character; a word behind a space has other ids than at the start, and "xy" only one there. "~" encodes
    to nothing."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        if text == " xy":
            return [700]
        if text.startswith(" ") and len(text) > 1:
            return [500 + ord(text[1]), *map(ord, text[2:])]
        return [ord(letter) for letter in text if letter != "~"]


def test_bad_words_are_banned_at_the_start_and_behind_a_space() -> None:
    params = SamplingParams(bad_words=["ab", " c", "xy"])
    params.update_bad_words(LetterTokenizer(), VOCAB)
    expected = [[97, 98], [597, 98], [99], [599], [120, 121], [700]]
    assert params.bad_words_token_ids == expected
    params.update_bad_words(LetterTokenizer(), VOCAB)
    assert params.bad_words_token_ids == expected


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
    params = SamplingParams(bad_words=[word])
    params.update_bad_words(LetterTokenizer(), VOCAB)
    assert params.bad_words_token_ids == token_ids


def test_bad_words_that_cannot_be_banned_are_refused() -> None:
    with pytest.raises(VLLMValidationError, match="bad_words must be empty when the engine has no tokenizer"):
        SamplingParams(bad_words=["a"]).update_bad_words(None)
    with pytest.raises(VLLMValidationError, match="bad_words must be text that the tokenizer encodes"):
        SamplingParams(bad_words=["~"]).update_bad_words(LetterTokenizer())
    with pytest.raises(VLLMValidationError, match=r"bad_words must be token ids within the vocabulary, 0\.\.97"):
        SamplingParams(bad_words=["ab"]).update_bad_words(LetterTokenizer(), 98)
