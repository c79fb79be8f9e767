"""From a caller's `SamplingParams` to what a request goes by: a checked copy for the shell, and the core's form of it.

Owned by the input processor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ...protocol.config import ModelConfig
from ...protocol.errors import VLLMValidationError
from ...protocol.param_checks import NOT_ENCODABLE, below_vocab, check_logprob_limit, reject
from ...protocol.params import SamplingParams
from ...protocol.resolved_sampling import ResolvedSampling, resolved

_MAX_KNOWN = 64


class EncodesText(Protocol):
    """The part of a tokenizer that bad words need."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class SamplingTokenizer(EncodesText, Protocol):
    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def max_token_id(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Resolved:
    """Shared by requests of equal params, and changed by none. `params`: what the shell goes by."""

    params: SamplingParams
    sampling: ResolvedSampling


class SamplingResolver:
    """Knows the model's limits and end tokens. Safe to call from several threads."""

    def __init__(self, model_config: ModelConfig, tokenizer: SamplingTokenizer | None) -> None:
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._eos_token_id = None if tokenizer is None else tokenizer.eos_token_id
        if self._eos_token_id is not None and self._eos_token_id >= model_config.vocab_size:
            self._eos_token_id = None  # the model never draws it
        self._other_end_ids = _listed_end_ids(model_config) - {self._eos_token_id}
        self._validate_params = _users_validations(model_config.logits_processors)
        self._known: dict[bytes, Resolved] = {}  # by the encoded params, what was resolved lately

    @property
    def end_token_ids(self) -> set[int]:
        """Every token that ends a generation by itself."""
        return self._other_end_ids | ({self._eos_token_id} if self._eos_token_id is not None else set())

    def resolve(self, params: SamplingParams) -> Resolved:
        """Raises ValueError (VLLMValidationError where one parameter is at fault) or TypeError for params that are
        wrong, or that this model or one of the users' logits processors cannot serve.
        """
        if self._validate_params:
            return self._resolve(params)
        try:
            key = msgspec.msgpack.encode(params)
        except NOT_ENCODABLE:  # numbers of other kinds, or what a check has a name for
            return self._resolve(params)
        if (known := self._known.get(key)) is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = self._resolve(params)
        return known

    def _resolve(self, given: SamplingParams) -> Resolved:
        params = given.clone()
        bad_words = self._bad_words(params)
        self._check_against_model(params)
        for validate in self._validate_params:
            validate(params)
        for_processors = params if self._validate_params else None
        return Resolved(params, resolved(params, self._eos_token_id, self._other_end_ids, bad_words, for_processors))

    def _check_against_model(self, params: SamplingParams) -> None:
        if params.thinking_token_budget is not None:
            legal = "None: the engine has no reasoning parser, which would tell thinking from answering"
            reject("thinking_token_budget", params.thinking_token_budget, legal)
        vocab_size = self._model_config.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            check_logprob_limit(name, getattr(params, name), self._model_config.max_logprobs, vocab_size)
        for name in ("logit_bias", "stop_token_ids", "logprob_token_ids"):
            below_vocab(name, getattr(params, name) or (), vocab_size)
        if params.allowed_token_ids:
            known = vocab_size if self._tokenizer is None else min(vocab_size, self._tokenizer.max_token_id + 1)
            below_vocab("allowed_token_ids", params.allowed_token_ids, known)
        if params.structured_outputs is not None:
            if self._tokenizer is None:
                name = "structured_outputs"
                raise VLLMValidationError(f"{name} need a tokenizer, and the engine has none", parameter=name)
            from ...shared.grammar import check_grammar  # llguidance, only for requests that need it

            check_grammar(params.structured_outputs)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each bad word's token ids, as it stands at the start of a text and behind a space."""
        if params.bad_words and self._tokenizer is None:
            reject("bad_words", params.bad_words, "empty when the engine has no tokenizer")
        banned: list[list[int]] = []
        for word in params.bad_words or ():
            assert self._tokenizer is not None
            spellings = spellings_of(self._tokenizer, word)
            if not spellings[0]:
                reject("bad_words", word, "text that the tokenizer encodes to at least one token")
            for token_ids in spellings:
                below_vocab("bad_words", token_ids, self._model_config.vocab_size)
            banned += spellings
        return banned


def spellings_of(tokenizer: EncodesText, word: str) -> list[list[int]]:
    """A bad word's tokens at the start of a text and, where they are others, behind a space.

    A word that begins with other white space has no such variant: it follows on whatever precedes it.
    """
    bare = word.lstrip(" ")
    if bare and not bare[0].isspace():
        alone, behind = (tokenizer.encode(text, add_special_tokens=False) for text in (bare, " " + bare))
    else:
        alone = tokenizer.encode(word, add_special_tokens=False)
        letter = tokenizer.encode("a", add_special_tokens=False)
        behind = tokenizer.encode("a" + word, add_special_tokens=False)
        # Some tokenizers put a space in front of every text, which is not there behind a letter.
        behind = behind[len(letter) :] if behind[: len(letter)] == letter else alone
    return [alone] if behind == alone else [alone, behind]


def _listed_end_ids(model_config: ModelConfig) -> set[int]:
    """What generation_config.json, or else config.json, lists as end tokens."""
    listed = model_config.generation_config.get("eos_token_id", model_config.hf_config.get("eos_token_id"))
    return {listed} if isinstance(listed, int) else set(listed or ())


def _users_validations(processors: Sequence[str]) -> list[Callable[[SamplingParams], None]]:
    """Each logits processor's `validate_params`. Imports their modules, and with them what these import."""
    if not processors:
        return []
    from ...shared.logits_processors import load_processor_class  # only for engines that have some

    return [load_processor_class(path).validate_params for path in processors]
