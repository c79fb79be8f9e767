"""POST /v1/completions: prompts in, texts out, whole or as a stream; echo and prompt log-probabilities exact."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...engine.outputs.request_output import CompletionOutput, RequestOutput
from ...engine.text.prompts import EngineInput
from ...protocol.params import SamplingParams
from ..models import ServedModel
from .errors import ApiError
from .generation import Caller, Usage, generate, public_finish_reason
from .hang_up import until_hung_up
from .logprobs import CompletionLogprobs, prompt_logprobs_body
from .prompts import completion_prompts, room_for_output
from .responses import encode, json_response, read_body
from .sampling import sampling_params, structured_outputs_of
from .schema import CompletionRequest
from .server import server_of
from .sse import DONE, ChunkFrame, event

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: Request) -> Response:
    body = await read_body(request, CompletionRequest)
    call = CompletionCall(request, body)
    if body.stream:
        return server_of(request).event_stream(call.events(), call.caller.request_id)
    return json_response(await until_hung_up(request, call.whole()))


@dataclass(slots=True)
class _Choice:
    """One answer as it grows: `logprobs` carries the text offset on."""

    index: int
    logprobs: CompletionLogprobs | None
    begun: bool = False


class CompletionCall:
    """One request: checked, run and spelled."""

    model: ServedModel  # from when the request holds one

    def __init__(self, request: Request, body: CompletionRequest) -> None:
        self.server = server_of(request)
        self.body = body
        self.caller = Caller.of(request, body)
        self.id = f"cmpl-{self.caller.request_id}"
        self.created = int(time.time())
        self.n = body.n or 1
        self._drops_output = bool(body.echo) and body.max_tokens == 0

    async def whole(self) -> dict[str, Any]:
        async with self.server.models.use(self.body.model) as self.model:
            prompts, params = await self._prepare()
            usage = Usage(len(prompts), counts_answers=not self._drops_output)
            choices: list[dict[str, Any]] = []
            async with aclosing(generate(self.model, prompts, params, self.id, self.caller)) as outputs:
                async for number, output in outputs:
                    usage.count(number, output)
                    for answer in output.outputs:
                        choice = self._choice(number * self.n + answer.index)
                        choices.append(self._whole_choice(choice, prompts[number], output, answer))
            choices.sort(key=lambda choice: int(choice["index"]))
            return self._envelope(choices) | {"usage": usage.body()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with self.server.models.use(self.body.model) as self.model:
            prompts, params = await self._prepare()
            usage = Usage(len(prompts), counts_answers=not self._drops_output)
            shows_usage = self.body.include_usage or self.server.options.enable_force_include_usage
            shared = self._envelope([])
            frame = ChunkFrame(shared, null_usage=shows_usage and not self.body.running_usage)
            choices: dict[int, _Choice] = {}
            async with aclosing(generate(self.model, prompts, params, self.id, self.caller)) as outputs:
                async for number, output in outputs:
                    usage.count(number, output)
                    chunks = b""
                    for answer in output.outputs:
                        index = number * self.n + answer.index
                        choice = choices.get(index)
                        if choice is None:
                            choice = choices[index] = self._choice(index)
                        part = self._part(choice, prompts[number], output, answer)
                        if part is not None:
                            extra = {"usage": usage.body()} if self.body.running_usage else None
                            chunks += frame.event(part, extra)
                    if chunks:
                        yield chunks
            if shows_usage:
                yield event(encode(shared | {"usage": usage.body()}))
            yield DONE

    async def _prepare(self) -> tuple[list[EngineInput], SamplingParams]:
        body, model = self.body, self.model
        body.check_common()
        if body.suffix:
            raise ApiError("suffix is not supported by this model", param="suffix")
        if body.echo and body.prompt_logprobs is None:
            body.prompt_logprobs = body.logprobs
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = sampling_params(
            body,
            model.defaults,
            max_tokens=1 if self._drops_output else max_tokens,
            logprobs=body.logprobs,
            structured_outputs=structured_outputs_of(body),
        )
        prompts = await completion_prompts(model, body)
        room_for_output(model, prompts, body.max_tokens, self.server.options.strict_max_tokens)
        return prompts, params

    def _choice(self, index: int) -> _Choice:
        logprobs = None
        if self.body.logprobs is not None:
            as_ids = bool(self.body.return_tokens_as_token_ids) or self.server.options.return_tokens_as_token_ids
            logprobs = CompletionLogprobs(self.model.tokenizer, self.body.logprobs, as_ids)
        return _Choice(index, logprobs)

    def _whole_choice(
        self, choice: _Choice, prompt: EngineInput, output: RequestOutput, answer: CompletionOutput
    ) -> dict[str, Any]:
        spelled = self._part(choice, prompt, output, answer) or {}
        if self.body.prompt_logprobs is not None:
            spelled["prompt_logprobs"] = prompt_logprobs_body(output)
        if self.body.return_token_ids:
            spelled["prompt_token_ids"] = list(output.prompt_token_ids or ())
        return spelled

    def _part(
        self, choice: _Choice, prompt: EngineInput, output: RequestOutput, answer: CompletionOutput
    ) -> dict[str, Any] | None:
        """What this output adds to the answer; None where that is nothing."""
        text, token_ids = answer.text, list(answer.token_ids)
        entries: list[Any] = list(answer.logprobs or ())
        if self._drops_output:
            text, token_ids, entries = "", [], []
        first = not choice.begun
        choice.begun = True
        scored_ids = token_ids
        if self.body.echo and first:
            text = self._prompt_text(prompt, output) + text
            if choice.logprobs is not None:
                scored_ids = [*(output.prompt_token_ids or ()), *token_ids]
                entries = [*(output.prompt_logprobs or ()), *entries]
        finish_reason = public_finish_reason(answer)
        if not text and finish_reason is None and not entries and not self.body.return_token_ids:
            return None
        part: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": None if choice.logprobs is None else choice.logprobs.piece(scored_ids, entries),
            "finish_reason": finish_reason,
            "stop_reason": None if answer.finish_reason is None else answer.stop_reason,
        }
        if self.body.return_token_ids:
            part["token_ids"] = token_ids
            if self.body.stream and first:
                part["prompt_token_ids"] = list(output.prompt_token_ids or ())
        return part

    def _prompt_text(self, prompt: EngineInput, output: RequestOutput) -> str:
        """As it was given; token ids are decoded."""
        text = prompt.get("prompt")
        if text is None:
            text = self.model.tokenizer.decode(list(output.prompt_token_ids or ()), skip_special_tokens=False)
        return text

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
            "system_fingerprint": None,
        }
