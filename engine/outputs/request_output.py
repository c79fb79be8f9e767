"""What a user gets back: `RequestOutput` and its `CompletionOutput`s. Made by the output processor, never changed by it
afterwards."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...protocol.lora import LoRARequest
from .logprobs import PromptLogprobs, SampleLogprobs, joined

if TYPE_CHECKING:
    from ..metrics.stats import RequestStateStats

logger = logging.getLogger("corespan.engine")


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt, or with `RequestOutputKind.DELTA` the new part of it.

    `cumulative_logprob` is the sum over all tokens so far; it and `logprobs` are None unless asked for.
    `finish_reason`: "stop", "length", "abort", "error", "repetition", or None while running. `stop_reason`: the stop
    string or stop token id that ended the answer, None for the model's own end token; with "error", what went wrong;
    with "repetition", "repetition_detected".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: ClassVar[None] = None  # another engine's name for what there is not here
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput:
    """What one request has produced. `request_id` is the caller's; `finished` is true once every answer is.

    `prompt` is None where only token ids were given. `prompt_logprobs`: None unless asked for, else one entry a prompt
    token, the first of them None. `num_cached_tokens`: prompt tokens that came from the prefix cache.
    """

    __slots__ = (
        "finished",
        "lora_request",
        "metrics",
        "num_cached_tokens",
        "outputs",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
    )

    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int] | None,
        prompt_logprobs: PromptLogprobs | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: "RequestStateStats | None" = None,
        num_cached_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
        **unknown: object,
    ) -> None:
        """What is `unknown` is ignored, with a warning."""
        if unknown:
            logger.warning("RequestOutput has no %s; ignored", ", ".join(sorted(unknown)))
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.num_cached_tokens = num_cached_tokens
        self.lora_request = lora_request

    def add(self, following: "RequestOutput", aggregate: bool) -> None:
        """Take in the same request's next output: join the pieces (`aggregate`), or keep the newer of each answer."""
        self.finished |= following.finished
        if following.metrics is not None:
            self.metrics = following.metrics
        if following.num_cached_tokens is not None:
            self.num_cached_tokens = following.num_cached_tokens
        if following.prompt_logprobs and not (aggregate and self.prompt_logprobs):
            self.prompt_logprobs = following.prompt_logprobs
        positions = {output.index: position for position, output in enumerate(self.outputs)}
        for output in following.outputs:
            position = positions.get(output.index)
            if position is None:
                self.outputs.append(output)
            elif aggregate:
                _extend(self.outputs[position], output)
            else:
                self.outputs[position] = output

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in _REPR_ORDER)
        return f"RequestOutput({fields})"


_REPR_ORDER = (
    "request_id",
    "prompt",
    "prompt_token_ids",
    "prompt_logprobs",
    "outputs",
    "finished",
    "metrics",
    "num_cached_tokens",
    "lora_request",
)


def _extend(output: CompletionOutput, following: CompletionOutput) -> None:
    output.text += following.text
    output.token_ids.extend(following.token_ids)
    if following.logprobs is not None:
        output.logprobs = following.logprobs if output.logprobs is None else joined(output.logprobs, following.logprobs)
    output.cumulative_logprob = following.cumulative_logprob
    output.finish_reason = following.finish_reason
    output.stop_reason = following.stop_reason
