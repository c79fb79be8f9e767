"""From a request's fields to `SamplingParams`: the request's own values over the model's defaults."""

import json
import logging
from typing import Any

from ...protocol.params import RequestOutputKind, SamplingParams
from ...protocol.repetition import RepetitionDetectionParams
from ...protocol.structured_outputs import StructuredOutputsParams
from .errors import ApiError
from .schema import GenerationRequest

logger = logging.getLogger("corespan.server")

_PLAIN_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "prompt_logprobs",
    "logprob_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stream_interval",
)
"""Fields whose name and meaning are those of SamplingParams."""

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MAX_STOP_STRINGS = 64
WHITESPACE = r"[ \t\r\n]{1,24}"
"""Between the parts of JSON that an API asks for: enough to indent it, but no model can go on with it for ever."""


def sampling_params(
    request: GenerationRequest,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    structured_outputs: StructuredOutputsParams | None = None,
    skip_special_tokens: bool | None = None,
) -> SamplingParams:
    """Raises VLLMValidationError or ApiError naming the field."""
    fields = {name: getattr(defaults, name) for name in _DEFAULTED}
    given = {name: value for name in _PLAIN_FIELDS if (value := getattr(request, name)) is not None}
    if isinstance(request.stop, list) and len(request.stop) > MAX_STOP_STRINGS:
        raise ApiError(f"stop holds {len(request.stop)} strings; at most {MAX_STOP_STRINGS} are taken", param="stop")
    fields.update(given)
    if skip_special_tokens is not None and request.skip_special_tokens is None:
        fields["skip_special_tokens"] = skip_special_tokens
    if request.repetition_detection is not None:
        fields["repetition_detection"] = RepetitionDetectionParams(**request.repetition_detection)
    if request.vllm_xargs is not None:
        fields["extra_args"] = request.vllm_xargs
    return SamplingParams.from_optional(
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=structured_outputs,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        **fields,
    )


def structured_outputs_of(request: GenerationRequest) -> StructuredOutputsParams | None:
    """What `response_format`, `structured_outputs` or the older `guided_*` fields hold the output to."""
    kinds: dict[str, Any] = dict(request.structured_outputs or {})
    guided = {
        "json": request.guided_json,
        "regex": request.guided_regex,
        "choice": request.guided_choice,
        "grammar": request.guided_grammar,
    }
    for kind, value in guided.items():
        if value is not None:
            _warn_once(f"guided_{kind}", f"structured_outputs.{kind}")
            kinds[kind] = value
    if request.response_format is not None:
        kinds.update(_from_response_format(request.response_format))
        if ("json" in kinds or "json_object" in kinds) and not kinds.get("disable_any_whitespace"):
            kinds.setdefault("whitespace_pattern", WHITESPACE)
    if not kinds:
        return None
    try:
        return StructuredOutputsParams(**kinds)
    except TypeError as error:
        raise ApiError(f"structured_outputs: {error}", param="structured_outputs") from None


def _from_response_format(response_format: dict[str, Any]) -> dict[str, Any]:
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        described = response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, (dict, bool)):
            raise ApiError(
                "response_format.json_schema.schema must be a JSON schema", param="response_format.json_schema.schema"
            )
        return {"json": json.dumps(schema)}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(response_format)}
    raise ApiError(
        f"response_format.type must be 'text', 'json_object', 'json_schema' or 'structural_tag', got {kind!r}",
        param="response_format.type",
    )


_warned: set[str] = set()


def _warn_once(old: str, new: str) -> None:
    if old not in _warned:
        _warned.add(old)
        logger.warning("The request field %s is deprecated: send %s", old, new)
