"""A chat, run: messages to prompt, tools to grammar, the engine's outputs to reasoning, content and tool calls.

It knows nothing of how an API spells the result: chat completions, responses and Anthropic's messages all read `steps`.
"""

import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from starlette.requests import Request

from ...engine.outputs.request_output import CompletionOutput
from ...engine.text.prompts import EngineInput
from ...protocol.params import SamplingParams
from ...protocol.structured_outputs import StructuredOutputsParams
from ..models import ServedModel
from ..parsers.base import AnswerParser, Delta, ReasoningParser, ToolParser
from ..parsers.guided import NamedCall, RequiredCalls, required_schema
from ..parsers.registry import reasoning_parser_class, tool_parser_class
from .errors import ApiError
from .generation import Caller, Usage, generate, public_finish_reason
from .guidance import behind_reasoning
from .logprobs import Entry
from .prompts import chat_prompt, plain_tool, room_for_output
from .sampling import WHITESPACE, sampling_params, structured_outputs_of
from .schema import ChatCompletionRequest

ToolMode = Literal["none", "auto", "required", "named"]
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


@dataclass(slots=True)
class Step:
    """What one of the engine's outputs brought to answer `index`. `finish_reason` comes once, with the last."""

    index: int
    delta: Delta
    token_ids: list[int]
    logprobs: Sequence[Entry] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class _Answer:
    parser: AnswerParser
    token_ids: list[int] = field(default_factory=list)


class ChatRun:
    """One chat request. `prompt`, `usage` and `prompt_logprobs` are there once the first step is."""

    def __init__(self, request: Request, body: ChatCompletionRequest, id_prefix: str, strict_max_tokens: bool) -> None:
        self.body = body
        self.caller = Caller.of(request, body)
        self.id = f"{id_prefix}{self.caller.request_id}"
        self.usage = Usage(1)
        self.prompt: EngineInput | None = None
        self.prompt_logprobs: Any = None
        self._strict_max_tokens = strict_max_tokens
        self._reasons_first = False  # also where a grammar holds the answer to calls
        self.functions = [plain_tool(tool)["function"] for tool in body.tools or ()]

    async def steps(self, model: ServedModel) -> AsyncGenerator[Step, None]:
        """The answers as they come; with `body.stream` off, one step an answer.

        Raises ApiError, and what the engine raises, before the first step for all that is wrong with the request.
        """
        self._check()
        mode, name = self._tool_mode(model)
        params = self._sampling_params(model, mode, name)
        prompt = self.prompt = await chat_prompt(model, self.body)
        guided = params.structured_outputs
        if guided is not None and (framed := behind_reasoning(guided, _reasoning_parser(model, prompt))) is not None:
            params.structured_outputs, self._reasons_first = framed, True
        room_for_output(model, [prompt], params.max_tokens, self._strict_max_tokens)
        answers: dict[int, _Answer] = {}
        async with aclosing(generate(model, [prompt], params, self.id, self.caller)) as outputs:
            async for _, output in outputs:
                self.usage.count(0, output)
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs = output
                for part in output.outputs:
                    answer = answers.get(part.index)
                    if answer is None:
                        answer = answers[part.index] = self._new_answer(model, mode, name, prompt)
                    yield self._step(model, answer, part, mode)

    def _step(self, model: ServedModel, answer: _Answer, part: CompletionOutput, mode: ToolMode) -> Step:
        answer.token_ids.extend(part.token_ids)
        delta = answer.parser.feed(part.text)
        finish_reason = public_finish_reason(part)
        if finish_reason is not None:
            delta.add(answer.parser.finish())
            self.usage.reasoning_tokens += _count_reasoning(model, answer)
            if finish_reason == "stop" and mode in ("auto", "required") and answer.parser.has_calls:
                finish_reason = "tool_calls"
        if self.body.parallel_tool_calls is False:
            delta.calls = [call for call in delta.calls if call.index == 0]
        hides_reasoning = self.body.include_reasoning is False and answer.parser.reasoning is not None
        if hides_reasoning:
            delta.reasoning = ""
        return Step(
            index=part.index,
            delta=delta,
            token_ids=[] if hides_reasoning else list(part.token_ids),  # these, and their scores, would tell it
            logprobs=None if hides_reasoning else cast(Sequence[Entry] | None, part.logprobs),
            finish_reason=finish_reason,
            stop_reason=None if finish_reason is None else part.stop_reason,
        )

    def _check(self) -> None:
        body = self.body
        body.check_common()
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if body.audio is not None or "audio" in (body.modalities or ()):
            raise ApiError("this model does not speak: audio output is not supported", param="modalities")
        names = [function["name"] for function in self.functions]
        for number, function_name in enumerate(names):
            if not _TOOL_NAME.fullmatch(function_name) or names.index(function_name) != number:
                what = "is there twice" if function_name in names[:number] else "is no valid name"
                raise ApiError(f"tools.{number}: {function_name!r} {what}", param=f"tools.{number}.function.name")

    def _tool_mode(self, model: ServedModel) -> tuple[ToolMode, str | None]:
        """What `tool_choice` asks for, and the name of the one function where it names one."""
        choice = self.body.tool_choice
        if choice is None:
            choice = "auto" if self.functions else "none"
        if isinstance(choice, str):
            if choice == "any":
                choice = "required"
            if choice not in ("none", "auto", "required"):
                raise ApiError("tool_choice must be 'none', 'auto', 'required' or a function", param="tool_choice")
            if not self.functions:
                if choice == "required":
                    raise ApiError("tool_choice 'required' needs tools", param="tool_choice")
                return "none", None
            if choice == "auto" and not model.chat.enable_auto_tool_choice:
                raise ApiError(
                    "tool_choice 'auto' needs a server started with --enable-auto-tool-choice and --tool-call-parser",
                    param="tool_choice",
                )
            if choice == "auto" and model.chat.tool_parser is None:
                raise ApiError(
                    "tool_choice 'auto' needs a tool parser, and this model's chat template tells none; start the "
                    "server with --tool-call-parser NAME",
                    param="tool_choice",
                )
            return choice, None  # type: ignore[return-value]
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if name not in [function["name"] for function in self.functions]:
            raise ApiError(f"tool_choice names the function {name!r}, which is none of the tools", param="tool_choice")
        return "named", str(name)

    def _sampling_params(self, model: ServedModel, mode: ToolMode, name: str | None) -> SamplingParams:
        body = self.body
        structured = structured_outputs_of(body)
        if mode == "named":
            if body.structured_outputs is not None:
                raise ApiError("structured_outputs and a named tool exclude each other", param="structured_outputs")
            (function,) = [function for function in self.functions if function["name"] == name]
            schema = function.get("parameters") or {"type": "object", "properties": {}}
            structured = StructuredOutputsParams(json=json.dumps(schema), whitespace_pattern=WHITESPACE)
        elif mode == "required":
            only_one = body.parallel_tool_calls is False
            calls = json.dumps(required_schema(self.functions, only_one))
            structured = StructuredOutputsParams(json=calls, whitespace_pattern=WHITESPACE)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return sampling_params(
            body,
            model.defaults,
            max_tokens=model.defaults.max_tokens if max_tokens is None else max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=structured,
            # A parser's tags may be special tokens.
            skip_special_tokens=False if mode == "auto" or model.chat.reasoning_parser is not None else None,
        )

    def _new_answer(self, model: ServedModel, mode: ToolMode, name: str | None, prompt: EngineInput) -> _Answer:
        tools: ToolParser | None = None
        if mode == "named":
            tools = NamedCall(str(name))
        elif mode == "required":
            tools = RequiredCalls(self.functions)
        elif mode == "auto" and model.chat.tool_parser is not None:
            tools = tool_parser_class(model.chat.tool_parser)(self.functions)
        reads_reasoning = self._reasons_first or mode not in ("named", "required")
        reasoning = _reasoning_parser(model, prompt) if reads_reasoning else None
        return _Answer(AnswerParser(reasoning, tools))


def _reasoning_parser(model: ServedModel, prompt: EngineInput) -> ReasoningParser | None:
    if model.chat.reasoning_parser is None:
        return None
    return reasoning_parser_class(model.chat.reasoning_parser)(prompt.get("prompt") or "")


def _count_reasoning(model: ServedModel, answer: _Answer) -> int:
    """The answer's tokens up to the end of its reasoning, that end included."""
    reasoning = answer.parser.reasoning
    if reasoning is None or not reasoning.end_tag:
        return 0
    (end_id,) = model.tokenizer.convert_tokens_to_ids([reasoning.end_tag])
    # Where the tag is no token of the vocabulary, this is the unknown one, or None.
    if end_id in answer.token_ids and model.tokenizer.convert_ids_to_tokens([end_id]) == [reasoning.end_tag]:
        return answer.token_ids.index(end_id) + 1
    return len(answer.token_ids) if reasoning.in_reasoning else 0
