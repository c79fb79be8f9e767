"""Makes a request for the core of a prompt and its params: tokenised, checked, complete. Used by both engines.

Whatever is wrong with a request is raised here, at the caller, before anything is sent.
"""

import functools
import logging
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from ...protocol import envs
from ...protocol.config import VllmConfig
from ...protocol.errors import VLLMValidationError, errors_of
from ...protocol.param_checks import reject, reject_type
from ...protocol.params import RequestOutputKind, SamplingParams
from ...protocol.pooling import PoolingParams, ResolvedPooling
from ...protocol.requests import EngineCoreRequest
from ...protocol.resolved_sampling import ResolvedSampling
from ..text.prompts import EngineInput, check_arrival_time
from ..text.renderer import Renderer
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_inputs import check_encodable
from .parallel_sampling import NoiseSeeds
from .pooling_resolver import resolve_pooling, with_token_types
from .prepared_request import PreparedRequest
from .sampling_resolver import Resolved, SamplingResolver

logger = logging.getLogger("corespan.engine")


class InputProcessor:
    """Knows the model's limits. Safe to call from several threads."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        tokenizer: Tokenizer | None,
        renderer: Renderer | None = None,
        client_index: int = 0,
    ) -> None:
        self.model_config = vllm_config.model_config
        self.tokenizer = tokenizer
        self.renderer = renderer or Renderer(self.model_config, tokenizer)
        self.resolver = SamplingResolver(self.model_config, tokenizer)
        self._noise_seeds = NoiseSeeds(self.model_config.seed, client_index)

    @errors_of("processing the prompt")
    def process_inputs(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        output_kind: RequestOutputKind | None = None,
        beam_length: int | None = None,
        prompt_text: str | None = None,
    ) -> PreparedRequest:
        """A request under the caller's id; `assign_request_id` gives it the engine's. `output_kind`: None is `params`'.
        `beam_length`: how many of the prompt's tokens are a beam's, in a step of a beam search under a grammar.

        A `PreparedRequest` in place of a prompt keeps its own id and params; `prompt_text` is then its text.
        Raises TypeError for arguments of the wrong type and ValueError (VLLMValidationError where one parameter is at
        fault) for values that this model cannot serve.
        """
        if isinstance(prompt, PreparedRequest):
            return _adopted(request_id, prompt, prompt_text)
        core_params: ResolvedSampling | ResolvedPooling
        if isinstance(params, PoolingParams):
            _check_types(request_id, priority, trace_headers, arrival_time)
            core_params, seed = resolve_pooling(params, self.model_config), None
        else:
            resolved = self.check(request_id, params, arrival_time, trace_headers, priority)
            params, core_params, seed = resolved.params, resolved.sampling, resolved.params.seed
        rendered = self._render(prompt, params, tokenization_kwargs)
        token_ids = rendered["prompt_token_ids"]
        self._check_prompt(rendered, params)
        if isinstance(core_params, ResolvedSampling):
            core_params = self._with_lengths(core_params, len(token_ids), beam_length)
        if (token_types := rendered.get("token_type_ids")) is not None:
            core_params = with_token_types(core_params, token_types, len(token_ids), self.model_config)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=core_params,
            arrival_time=rendered["arrival_time"] if arrival_time is None else arrival_time,
            noise_seed=self._noise_seeds.of(seed),
            priority=priority,
            cache_salt=rendered.get("cache_salt"),
            trace_headers=None if trace_headers is None else dict(trace_headers),
            prompt_embeds=rendered.get("prompt_embeds"),
            mm_features=rendered.get("mm_features", []),
        )
        output_kind = params.output_kind if output_kind is None else output_kind
        return PreparedRequest(request, params, rendered.get("prompt"), output_kind)

    def check(
        self,
        request_id: str,
        params: SamplingParams,
        arrival_time: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> Resolved:
        """What `params` come to. Raises what `process_inputs` does for all but the prompt."""
        _check_types(request_id, priority, trace_headers, arrival_time)
        if not isinstance(params, SamplingParams):
            reject_type("params", params, "a SamplingParams, or a PoolingParams where the engine pools")
        if self.model_config.pooler is not None:
            raise ValueError(
                f"{self.model_config.served_model_name} pools and does not generate: use embed() or encode(), with "
                "PoolingParams, or start the engine with runner='generate'"
            )
        return self.resolver.resolve(params)

    def assign_request_id(self, prepared: PreparedRequest) -> None:
        """Give the request an internal id that no other has, and keep the caller's beside it.

        Raises ValueError for a request that has been through this before.
        """
        request = prepared.request
        if request.external_req_id is not None:
            raise ValueError(f"the request {request.external_req_id!r} has its internal id already; make a new request")
        request.external_req_id = request.request_id
        if not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
            request.request_id = f"{request.request_id}-{secrets.token_hex(4)}"

    def _with_lengths(
        self, sampling: ResolvedSampling, num_prompt_tokens: int, beam_length: int | None
    ) -> ResolvedSampling:
        if sampling.max_tokens is None:
            room = self.model_config.max_model_len - num_prompt_tokens
            sampling = msgspec.structs.replace(sampling, max_tokens=room)
        if beam_length is not None:
            sampling = msgspec.structs.replace(sampling, beam_length=beam_length)
        return sampling

    def _render(
        self, prompt: Any, params: SamplingParams | PoolingParams, kwargs: Mapping[str, Any] | None
    ) -> EngineInput:
        tok_params = self.renderer.default_cmpl_tok_params.with_kwargs(kwargs)
        if params.truncate_prompt_tokens is not None:
            tok_params = tok_params.with_kwargs({"truncate_prompt_tokens": params.truncate_prompt_tokens})
        (rendered,) = self.renderer.render_cmpl([prompt], tok_params)
        return rendered

    def _check_prompt(self, rendered: EngineInput, params: SamplingParams | PoolingParams) -> None:
        token_ids = rendered["prompt_token_ids"]
        if not token_ids:
            raise ValueError("the prompt is empty: it has no token")
        max_model_len, most = self.model_config.max_model_len, self.model_config.max_prompt_len
        if len(token_ids) > most:
            room = ", which leaves room for one token of output" if most < max_model_len else ""
            raise VLLMValidationError(
                f"the prompt has {len(token_ids)} tokens; with max_model_len {max_model_len} it may have at most {most}"
                f"{room}",
                parameter="input_tokens",
                value=len(token_ids),
            )
        vocab_size = self.model_config.vocab_size
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < vocab_size:
                raise VLLMValidationError(
                    f"the prompt holds the token id {token_id}; this model's ids are 0..{vocab_size - 1}",
                    parameter="prompt_token_ids",
                    value=token_id,
                )
        asks_for_logprobs = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
        if rendered["type"] == "embeds" and asks_for_logprobs:
            raise ValueError("prompt_logprobs need a prompt of token ids; this one consists of prompt_embeds")


def _adopted(request_id: str, prepared: PreparedRequest, prompt_text: str | None) -> PreparedRequest:
    """The request, whose own id wins over `request_id`. Warns, the first time, that rendered prompts are the way."""
    _warn_of_prepared_requests()
    if prepared.request_id != request_id:
        logger.warning("The prepared request's own id %r wins over %r", prepared.request_id, request_id)
    if prompt_text is not None:
        prepared.prompt = prompt_text
    return prepared


@functools.cache
def _warn_of_prepared_requests() -> None:
    logger.warning("add_request() was handed a prepared request; pass a prompt rendered by Renderer instead")


def _check_types(request_id: object, priority: object, trace_headers: object, arrival_time: object) -> None:
    if not isinstance(request_id, str):
        reject_type("request_id", request_id, "a str")
    check_encodable(request_id)
    if isinstance(priority, bool) or not isinstance(priority, int):
        reject_type("priority", priority, "an int")
    if not -(2**63) <= priority < 2**63:
        reject("priority", priority, "a signed 64-bit integer")
    check_arrival_time(arrival_time)
    if trace_headers is not None and not isinstance(trace_headers, Mapping):
        reject_type("trace_headers", trace_headers, "None or a dict from str to str")
    for name, value in (trace_headers or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            reject_type("trace_headers", {name: value}, "None or a dict from str to str")
        check_encodable(name + value)
