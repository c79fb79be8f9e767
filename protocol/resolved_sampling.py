"""`ResolvedSampling`: what the core needs to know of how a request is sampled, and nothing else.

The shell makes it of the caller's `SamplingParams` and of what the model's files say, once both are checked. What no
shell would send does not decode.
"""

import sys
from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from .params import GREEDY_TEMPERATURE, MAX_LOGPROB_TOKEN_IDS, SamplingParams
from .repetition import RepetitionDetectionParams
from .structured_outputs import StructuredOutputsParams

_LARGEST_INT = 2**63 - 1
_Count = Annotated[int, Meta(ge=0, le=_LARGEST_INT)]
_TokenId = Annotated[int, Meta(ge=0, le=_LARGEST_INT)]  # whether the model has it, the core checks
_Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_NumLogprobs = Annotated[int, Meta(ge=-1, le=_LARGEST_INT)]  # -1: the whole vocabulary


class ResolvedSampling(msgspec.Struct, frozen=True, array_like=True, tag="sampling", gc=False):
    """Fields that `SamplingParams` has too mean the same, but for a `temperature` of exactly 0, which is greedy.

    `eos_token_id` and `stop_token_ids` end the request; the latter are named as its stop reason. `end_token_ids`: what
    is not drawn before `min_tokens`. `bad_words_token_ids`: sequences that are not completed. `for_processors`: the
    params as users' logits processors are shown them, in engines that have some. `beam_length` marks a step of a beam
    search under a grammar: so many tokens at the prompt's end are the beam's, and logprobs are reported of tokens that
    the grammar allows.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: _Count = 0  # 0: off
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=sys.float_info.max)] = 1.0
    max_tokens: Annotated[int, Meta(ge=1, le=_LARGEST_INT)] | None = None  # None: as many as max_model_len allows
    min_tokens: _Count = 0
    eos_token_id: _TokenId | None = None
    stop_token_ids: tuple[_TokenId, ...] = ()
    end_token_ids: tuple[_TokenId, ...] = ()
    bad_words_token_ids: tuple[Annotated[tuple[_TokenId, ...], Meta(min_length=1)], ...] = ()
    allowed_token_ids: Annotated[tuple[_TokenId, ...], Meta(min_length=1)] | None = None
    logit_bias: dict[_TokenId, _Finite] | None = None
    logprobs: _NumLogprobs | None = None
    logprob_token_ids: Annotated[tuple[_TokenId, ...], Meta(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)] | None = (
        None
    )
    prompt_logprobs: _NumLogprobs | None = None
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    skip_reading_prefix_cache: bool = False
    for_processors: SamplingParams | None = None
    beam_length: _Count | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many logprobs come with each token besides its own; -1: the whole vocabulary; None: none at all."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)


def resolved(
    params: SamplingParams,
    eos_token_id: int | None = None,
    other_end_ids: Collection[int] = (),
    bad_words_token_ids: Sequence[Sequence[int]] = (),
    for_processors: SamplingParams | None = None,
) -> ResolvedSampling:
    """`params`, which are sound, in the core's form.

    `eos_token_id` and `other_end_ids` are the model's. With `ignore_eos` none of them ends the request, but all stay
    masked while `min_tokens` is not reached.
    """
    stop_token_ids = list(params.stop_token_ids or ())
    other_end_ids = sorted(set(other_end_ids).difference(stop_token_ids, (eos_token_id,)))
    end_token_ids = {*stop_token_ids, *other_end_ids} | ({eos_token_id} if eos_token_id is not None else set())
    if not params.ignore_eos:
        stop_token_ids += other_end_ids
    return ResolvedSampling(
        temperature=0.0 if params.temperature < GREEDY_TEMPERATURE else params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        eos_token_id=None if params.ignore_eos else eos_token_id,
        stop_token_ids=tuple(stop_token_ids),
        end_token_ids=tuple(sorted(end_token_ids)) if params.min_tokens else (),
        bad_words_token_ids=tuple(map(tuple, bad_words_token_ids)),
        allowed_token_ids=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        logit_bias=params.logit_bias,
        logprobs=params.logprobs,
        logprob_token_ids=None if params.logprob_token_ids is None else tuple(params.logprob_token_ids),
        prompt_logprobs=params.prompt_logprobs,
        structured_outputs=params.structured_outputs,
        repetition_detection=params.repetition_detection,
        skip_reading_prefix_cache=bool(params.skip_reading_prefix_cache) or params.prompt_logprobs is not None,
        for_processors=for_processors,
    )
