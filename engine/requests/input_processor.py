"""Makes an `EngineCoreRequest` of a prompt and its params: tokenised, checked, complete. Used by both engines.

Whatever is wrong with a request is raised here, in the caller's face, before anything is sent.
"""

import itertools
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ...protocol import envs
from ...protocol.config import VllmConfig
from ...protocol.errors import VLLMValidationError, errors_of
from ...protocol.param_checks import below_vocab, reject, reject_type
from ...protocol.params import SamplingParams
from ...protocol.requests import EngineCoreRequest
from ..text.prompts import EngineInput
from ..text.renderer import Renderer, truncate
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_inputs import check_encodable
from .parallel_sampling import NoiseSeeds
from .structured_output_check import validate_structured_outputs


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
        self._generations = itertools.count(1)
        self.renderer = renderer or Renderer(self.model_config, tokenizer)
        self._noise_seeds = NoiseSeeds(self.model_config.seed, client_index)
        self._generation_config = dict(self.model_config.generation_config)
        if "eos_token_id" in self.model_config.hf_config:
            self._generation_config.setdefault("eos_token_id", self.model_config.hf_config["eos_token_id"])
        self._validate_params = _users_validations(self.model_config.logits_processors)

    @errors_of("processing the prompt")
    def process_inputs(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> tuple[EngineCoreRequest, str | None]:
        """A request under the caller's id (`assign_request_id` gives it the engine's), and the prompt's text if known.

        `params` is left as it was. Raises TypeError for arguments of the wrong type and ValueError
        (VLLMValidationError where one parameter is at fault) for values that this model cannot serve.
        """
        _check_types(request_id, params, priority, trace_headers, arrival_time)
        params = params.clone()
        self._check_params(params)
        rendered = self._render(prompt, params, tokenization_kwargs)
        token_ids = rendered["prompt_token_ids"]
        _check_arrival_time(rendered["arrival_time"])
        self._check_prompt(rendered, params)
        self._complete(params, len(token_ids))
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            arrival_time=rendered["arrival_time"] if arrival_time is None else arrival_time,
            noise_seed=self._noise_seeds.of(params.seed),
            priority=priority,
            cache_salt=rendered.get("cache_salt"),
            trace_headers=None if trace_headers is None else dict(trace_headers),
            prompt_embeds=rendered.get("prompt_embeds"),
        )
        return request, rendered.get("prompt")

    def check(self, request_id: str, params: SamplingParams) -> None:
        """Raises what `process_inputs` raises for these."""
        _check_types(request_id, params, 0, None, None)
        self._check_params(params.clone())

    @errors_of("checking the prepared request")
    def check_prepared(self, request: EngineCoreRequest) -> None:
        """Raises TypeError and ValueError for a request, made by the caller, that this model cannot serve."""
        _check_types(
            request.request_id,
            request.sampling_params,
            request.priority,
            request.trace_headers,
            request.arrival_time,
        )
        self._check_params(request.sampling_params)
        try:
            msgspec.convert(
                msgspec.to_builtins(msgspec.structs.replace(request, prompt_embeds=None)), EngineCoreRequest
            )
        except msgspec.ValidationError as error:
            raise TypeError(f"the prepared request {request.request_id!r} is malformed: {error}") from None
        embeds = request.prompt_embeds
        kind: dict[str, Any] = {"type": "token"} if embeds is None else {"type": "embeds", "prompt_embeds": embeds}
        (rendered,) = self.renderer.render_cmpl([{**kind, "prompt_token_ids": request.prompt_token_ids}])
        self._check_prompt(rendered, request.sampling_params)
        if not 0 <= request.noise_seed < 2**64:
            raise ValueError(f"noise_seed must be an integer in [0, 2**64), got {request.noise_seed}")
        below_vocab("output_token_ids", request.output_token_ids, self.model_config.vocab_size)

    def assign_request_id(self, request: EngineCoreRequest) -> None:
        """Give the request an internal id that no other has, and keep the caller's beside it.

        Raises ValueError for a request that has been through this before.
        """
        if request.external_req_id is not None:
            raise ValueError(f"the request {request.external_req_id!r} has its internal id already; make a new request")
        request.external_req_id = request.request_id
        if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
            request.generation = next(self._generations)
        else:
            request.request_id = f"{request.request_id}-{secrets.token_hex(4)}"

    def _check_params(self, params: SamplingParams) -> None:
        """Everything about params: once more what their construction checks, for fields may have been set since; and
        what depends on the model, the tokenizer and the users' logits processors."""
        params.__post_init__()
        params.verify(self.model_config, self._tokenizer_len(params))
        validate_structured_outputs(params, has_tokenizer=self.tokenizer is not None)
        for validate in self._validate_params:
            validate(params)

    def _tokenizer_len(self, params: SamplingParams) -> int | None:
        """What `allowed_token_ids` are checked against; looking through the vocabulary is left until they are there."""
        if self.tokenizer is None or not params.allowed_token_ids:
            return None
        return self.tokenizer.max_token_id + 1

    def _render(self, prompt: Any, params: SamplingParams, kwargs: Mapping[str, Any] | None) -> EngineInput:
        tok_params = self.renderer.default_cmpl_tok_params.with_kwargs(kwargs)
        if params.truncate_prompt_tokens is not None:
            tok_params = tok_params.with_kwargs({"truncate_prompt_tokens": params.truncate_prompt_tokens})
        (rendered,) = self.renderer.render_cmpl([prompt], tok_params)
        return truncate(rendered, tok_params, self.model_config.max_model_len)

    def _check_prompt(self, rendered: EngineInput, params: SamplingParams) -> None:
        token_ids = rendered["prompt_token_ids"]
        if not token_ids:
            raise ValueError("the prompt is empty: it has no token")
        limit = self.model_config.max_model_len
        if len(token_ids) >= limit:
            raise VLLMValidationError(
                f"the prompt has {len(token_ids)} tokens; with max_model_len {limit} it may have at most {limit - 1}, "
                "which leaves room for one token of output",
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
        if rendered["type"] == "embeds" and params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs need a prompt of token ids; this one consists of prompt_embeds")

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Fills in what the core works by: the model's end tokens, its room for output, bad words as token ids."""
        if params.max_tokens is None:
            params.max_tokens = self.model_config.max_model_len - num_prompt_tokens
            params.min_tokens = min(params.min_tokens, params.max_tokens)
        eos_token_id = None if self.tokenizer is None else self.tokenizer.eos_token_id
        if eos_token_id is not None and eos_token_id >= self.model_config.vocab_size:
            eos_token_id = None
        params.update_from_generation_config(self._generation_config, eos_token_id)
        params.update_bad_words(self.tokenizer, self.model_config.vocab_size)


def refuse_lora(lora_request: object) -> None:
    """Raises VLLMValidationError for anything but None, or a list of it, which stands for the model as it is."""
    requests = lora_request if isinstance(lora_request, (list, tuple)) else [lora_request]
    if any(request is not None for request in requests):
        reject("lora_request", lora_request, "None: the engine has no LoRA adapters")


def _users_validations(processors: Sequence[str]) -> list[Callable[[SamplingParams], None]]:
    """Each logits processor's `validate_params`. Imports their modules, and with them what these import."""
    if not processors:
        return []
    from ...shared.logits_processors import load_class  # only for engines that have some

    return [load_class(path).validate_params for path in processors]


def _check_types(
    request_id: object, params: object, priority: object, trace_headers: object, arrival_time: object
) -> None:
    if not isinstance(request_id, str):
        reject_type("request_id", request_id, "a str")
    check_encodable(request_id)
    if not isinstance(params, SamplingParams):
        reject_type("params", params, "a SamplingParams")
    if isinstance(priority, bool) or not isinstance(priority, int):
        reject_type("priority", priority, "an int")
    if not -(2**63) <= priority < 2**63:
        reject("priority", priority, "a signed 64-bit integer")
    _check_arrival_time(arrival_time)
    if trace_headers is not None and not isinstance(trace_headers, Mapping):
        reject_type("trace_headers", trace_headers, "None or a dict from str to str")
    for name, value in (trace_headers or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            reject_type("trace_headers", {name: value}, "None or a dict from str to str")
        check_encodable(name + value)


def _check_arrival_time(arrival_time: object) -> None:
    if arrival_time is None:
        return
    if isinstance(arrival_time, bool) or not isinstance(arrival_time, (int, float)):
        reject_type("arrival_time", arrival_time, "a number")
    if not math.isfinite(arrival_time):
        reject("arrival_time", arrival_time, "finite")
