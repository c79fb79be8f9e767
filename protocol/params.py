"""What a caller asks for: `SamplingParams` and `BeamSearchParams`. Theirs alone: the engine changes none of it.

Every value is checked at construction, and a request is made of a copy: so checked again, for fields may have been set
since. The core gets a form of its own, `resolved_sampling`.
"""

import copy
import difflib
import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from . import envs
from .param_checks import (
    as_bool,
    as_finite_float,
    as_int,
    checked_logit_bias,
    float_in,
    int_at_least,
    is_plain_dict,
    logit_bias_from_text,
    logprob_count,
    reject,
    reject_type,
    text_list,
    token_id_list,
)
from .repetition import RepetitionDetectionParams
from .structured_outputs import StructuredOutputsParams

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature the most likely token is taken outright; from here on the sampler draws."""

MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 128


class RequestOutputKind(enum.IntEnum):
    """What each output of a stream holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output, at the end


class SamplingType(enum.IntEnum):
    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


_FORMER_FIELDS = {
    "guided_decoding": "structured_outputs=StructuredOutputsParams(...)",
    **{
        f"guided_{kind}": f"structured_outputs=StructuredOutputsParams({kind}=...)"
        for kind in ("json", "regex", "choice", "grammar")
    },
    "best_of": "n",
    "use_beam_search": "LLM.beam_search(prompts, BeamSearchParams(...))",
    "logits_processors": "LLM(logits_processors=[...])",
}


class _SuggestsFields(type(msgspec.Struct)):  # type: ignore[misc]
    """Tells what to write in the place of a field that is not, or no longer, there."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except TypeError as error:
            for name in fields.keys() - set(cls.__struct_fields__):
                close = _FORMER_FIELDS.get(name) or next(
                    iter(difflib.get_close_matches(name, cls.__struct_fields__)), ""
                )
                if close:
                    raise TypeError(f"{cls.__name__} has no field {name!r}; use {close}") from error
            raise


class SamplingParams(msgspec.Struct, metaclass=_SuggestsFields, omit_defaults=True, repr_omit_defaults=True):
    """How one request is sampled, when it stops and what it returns. Field names and defaults are vLLM's.

    A `temperature` below 1e-5 means greedy, and then `top_p`, `top_k` and `min_p` are set to their neutral values;
    any other temperature is used exactly as given. `logprobs` and `prompt_logprobs` of -1 mean the whole vocabulary.
    `truncate_prompt_tokens` keeps the last k tokens of the prompt, -1: as many as the model can take.
    `thinking_token_budget` is refused where a request is made: no engine has a reasoning parser. Models have no routes
    to experts, and `routed_experts_prompt_start` changes nothing.
    `stream_interval`: tokens that a stream gathers for an output, None: as many as the engine's says.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as max_model_len leaves room for
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    routed_experts_prompt_start: int = 0
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    truncate_prompt_tokens: int | None = None
    stream_interval: int | None = None

    def __post_init__(self) -> None:
        """Check and normalise."""
        self._check_numbers()
        self._check_lengths()
        self._check_logprobs()
        self._check_tokens_and_texts()
        self._check_switches()
        if self.temperature < GREEDY_TEMPERATURE:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                reject("n", self.n, "1 with greedy sampling (temperature 0)")
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _check_numbers(self) -> None:
        most = envs.VLLM_MAX_N_SEQUENCES
        legal = f"an integer in [1, {most}]"
        self.n = as_int("n", self.n, legal)
        if not 1 <= self.n <= most:
            reject("n", self.n, legal)
        self.presence_penalty = float_in("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = float_in("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        legal = "a finite number greater than 0"
        self.repetition_penalty = as_finite_float("repetition_penalty", self.repetition_penalty, legal)
        if self.repetition_penalty <= 0:
            reject("repetition_penalty", self.repetition_penalty, legal)
        self.temperature = float_in("temperature", self.temperature, 0.0, 2.0)
        self.top_p = float_in("top_p", self.top_p, 0.0, 1.0, low_open=True)
        if isinstance(self.top_k, bool) or not hasattr(self.top_k, "__index__"):
            reject_type("top_k", self.top_k, "an integer")
        self.top_k = int_at_least("top_k", self.top_k, -1, "0 or -1 (off) or an integer of at least 1")
        self.min_p = float_in("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            self.seed = as_int("seed", self.seed, "None or a signed 64-bit integer")
            if self.seed == -1:
                self.seed = None

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            self.max_tokens = int_at_least("max_tokens", self.max_tokens, 1, "None or an integer of at least 1")
        self.min_tokens = int_at_least("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reject("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.truncate_prompt_tokens is not None:
            legal = "None, -1 (as the model allows) or an integer of at least 1"
            self.truncate_prompt_tokens = int_at_least("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, legal)
            if self.truncate_prompt_tokens == 0:
                reject("truncate_prompt_tokens", 0, legal)
        if self.thinking_token_budget is not None:
            legal = "None, -1 (none either) or an integer of at least 0"
            budget = int_at_least("thinking_token_budget", self.thinking_token_budget, -1, legal)
            self.thinking_token_budget = None if budget == -1 else budget
        if self.stream_interval is not None:
            legal = "None (the engine's) or an integer of at least 1"
            self.stream_interval = int_at_least("stream_interval", self.stream_interval, 1, legal)
        start = int_at_least("routed_experts_prompt_start", self.routed_experts_prompt_start, 0)
        self.routed_experts_prompt_start = start

    def _check_logprobs(self) -> None:
        self.logprobs = logprob_count("logprobs", self.logprobs)
        self.prompt_logprobs = logprob_count("prompt_logprobs", self.prompt_logprobs)
        if self.logprob_token_ids is not None:
            self.logprob_token_ids = token_id_list("logprob_token_ids", self.logprob_token_ids)
            count = len(self.logprob_token_ids)
            if not 1 <= count <= MAX_LOGPROB_TOKEN_IDS:
                reject("logprob_token_ids", self.logprob_token_ids, f"1..{MAX_LOGPROB_TOKEN_IDS} token ids")
            if self.logprobs is not None and self.logprobs != count:
                reject("logprobs", self.logprobs, f"None or the number of logprob_token_ids ({count})")

    def _check_tokens_and_texts(self) -> None:
        self.stop = [] if self.stop is None else text_list("stop", self.stop)
        stop_token_ids = [] if self.stop_token_ids is None else token_id_list("stop_token_ids", self.stop_token_ids)
        self.stop_token_ids = list(dict.fromkeys(stop_token_ids))
        self.bad_words = list(dict.fromkeys([] if self.bad_words is None else text_list("bad_words", self.bad_words)))
        if len(self.bad_words) > MAX_BAD_WORDS:
            reject("bad_words", self.bad_words, f"at most {MAX_BAD_WORDS} words")
        if self.logit_bias is not None:
            self.logit_bias = checked_logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = token_id_list("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                reject("allowed_token_ids", [], "None or a non-empty list of token ids")

    def _check_switches(self) -> None:
        for name in _SWITCHES:
            as_bool(name, getattr(self, name))
        if self.stop and not self.detokenize:
            reject("detokenize", False, "True when stop strings are given, since they are found in the text")
        if type(self.output_kind) is not RequestOutputKind:
            legal = "a RequestOutputKind"
            try:
                self.output_kind = RequestOutputKind(as_int("output_kind", self.output_kind, legal))
            except ValueError:
                reject("output_kind", self.output_kind, legal)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            reject("structured_outputs", self.structured_outputs, "a StructuredOutputsParams")
        if not isinstance(self.repetition_detection, RepetitionDetectionParams | None):
            reject("repetition_detection", self.repetition_detection, "a RepetitionDetectionParams")
        if self.extra_args is not None and not is_plain_dict(self.extra_args):
            reject("extra_args", self.extra_args, "None or a dict from strings to plain data")
        if self.skip_reading_prefix_cache is not None:
            as_bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)

    @staticmethod
    def from_optional(
        *,
        n: int | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        **fields: Any,
    ) -> "SamplingParams":
        """Build from optional values as HTTP requests have them: None means the default.

        `logit_bias` keys may be text; its values are clamped to [-100, 100].
        """
        optional = {
            "n": n,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
        }
        fields.update((name, value) for name, value in optional.items() if value is not None)
        if logit_bias is not None:
            fields["logit_bias"] = logit_bias_from_text(logit_bias)
        return SamplingParams(**fields)

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing mutable. Raises VLLMValidationError for what fields have been set to since."""
        return copy.deepcopy(self)

    @property
    def sampling_type(self) -> SamplingType:
        if self.temperature < GREEDY_TEMPERATURE:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def num_logprobs(self) -> int | None:
        """How many logprobs come with each token besides its own; -1: the whole vocabulary; None: none at all."""
        if self.logprob_token_ids is not None:
            return len(self.logprob_token_ids)
        return self.logprobs


_SWITCHES = (
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


class BeamSearchParams(msgspec.Struct, omit_defaults=True, repr_omit_defaults=True):
    """How a beam search runs; `length_penalty` is the exponent of the length a beam's score is divided by.

    With `structured_outputs` a beam goes on with what its grammar allows, at the model's own probabilities, and ends
    where the grammar does, `ignore_eos` or not.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        most = envs.VLLM_MAX_N_SEQUENCES
        legal = f"an integer in [1, {most}]"
        self.beam_width = int_at_least("beam_width", self.beam_width, 1, legal)
        if self.beam_width > most:
            reject("beam_width", self.beam_width, legal)
        self.max_tokens = int_at_least("max_tokens", self.max_tokens, 1)
        self.temperature = float_in("temperature", self.temperature, 0.0, 2.0)
        self.length_penalty = as_finite_float("length_penalty", self.length_penalty, "a finite number")
        as_bool("ignore_eos", self.ignore_eos)
        as_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            reject("structured_outputs", self.structured_outputs, "None or a StructuredOutputsParams")
