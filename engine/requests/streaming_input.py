"""`StreamingInput`, a piece of a prompt that comes in pieces, and what pieces may ask for."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...protocol.errors import VLLMValidationError
from ...protocol.param_checks import reject_type
from ...protocol.params import RequestOutputKind, SamplingParams
from ...protocol.requests import EngineCoreRequest
from ..text.prompts import PromptType


@dataclass(frozen=True, slots=True)
class StreamingInput:
    """A piece of a prompt, answered before the next one follows. `sampling_params`: the request's own if None."""

    prompt: PromptType
    sampling_params: SamplingParams | None = None


_OF_THE_WHOLE_REQUEST = (
    "output_kind",
    "logprobs",
    "logprob_token_ids",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def check_streamable(params: SamplingParams) -> None:
    """Raises VLLMValidationError for params that make no sense while the prompt is still coming."""
    if params.n > 1:
        _refuse("n", params.n, "1")
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        _refuse("output_kind", params.output_kind, "CUMULATIVE or DELTA")
    if params.stop:
        _refuse("stop", params.stop, "empty")
    if params.prompt_logprobs is not None:
        _refuse("prompt_logprobs", params.prompt_logprobs, "None")


def _refuse(parameter: str, value: object, legal: str) -> None:
    message = f"{parameter} is {value!r}; with a prompt that comes in pieces it must be {legal}"
    raise VLLMValidationError(message, parameter=parameter, value=value)


def with_params(piece: Any, params: SamplingParams) -> StreamingInput:
    """`piece` with params that suit those the request began with. Raises TypeError and VLLMValidationError."""
    if not isinstance(piece, StreamingInput):
        raise TypeError(f"a prompt's generator must yield StreamingInput, not {type(piece).__name__}")
    own = params if piece.sampling_params is None else piece.sampling_params
    if not isinstance(own, SamplingParams):
        reject_type("sampling_params", own, "a SamplingParams")
    check_streamable(own)
    for name in _OF_THE_WHOLE_REQUEST:
        if getattr(own, name) != getattr(params, name):
            _refuse(name, getattr(own, name), f"that of the request, {getattr(params, name)!r}")
    return StreamingInput(piece.prompt, own)


def as_piece(request: EngineCoreRequest, cache_salt: str | None) -> EngineCoreRequest:
    """`request`, open for more prompt. `cache_salt`: what the request began with. Raises VLLMValidationError."""
    if request.prompt_embeds is not None:
        _refuse("prompt_embeds", f"an array of shape {np.shape(request.prompt_embeds)}", "None")
    if request.mm_features:
        _refuse("multi_modal_data", f"{len(request.mm_features)} pictures", "None")
    if request.cache_salt != cache_salt:
        _refuse("cache_salt", request.cache_salt, f"that of the request, {cache_salt!r}")
    request.resumable = True
    return request
