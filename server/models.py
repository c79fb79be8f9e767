"""The models that a server offers, and how a request gets hold of one.

`ModelHost` is the interface: `use(name)` gives the model, kept loaded until the request is done with it. `SingleModel`
is the host of one engine, `model_pool.ModelPool` of several.
"""

import asyncio
import copy
import dataclasses
import itertools
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..engine.text.renderer import Renderer
from ..engine.text.tokenizer import Tokenizer
from ..protocol.lora import LoRARequest
from ..protocol.params import SamplingParams
from .http.errors import ApiError, model_not_found
from .parsers.registry import (
    AUTO,
    guess_reasoning_parser,
    guess_tool_parser,
    reasoning_parser_class,
    tool_parser_class,
)

if TYPE_CHECKING:
    from ..engine.async_llm import AsyncLLM

logger = logging.getLogger("corespan.server")

T = TypeVar("T")

NUM_TEXT_THREADS = 4


@dataclass(frozen=True)
class ChatSettings:
    """How a model's chats are rendered and its answers read. `tool_parser` and `reasoning_parser` are names."""

    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    exclude_tools_when_tool_choice_none: bool = False
    tool_parser: str | None = None
    reasoning_parser: str | None = None


class ServedModel:
    """One engine under the names it is served as, the first of which answers carry.

    `adapters`: those that are asked for as models, by name. `adapter`: with which requests are answered; `named` gives
    the model with another.
    """

    def __init__(self, engine: "AsyncLLM", names: Sequence[str], chat: ChatSettings | None = None) -> None:
        self.engine = engine
        self.names = list(names)
        self.chat = resolve_parsers(chat or ChatSettings(), engine)
        self.created = int(time.time())
        self.defaults: SamplingParams = engine.get_default_sampling_params()
        self.adapters: dict[str, LoRARequest] = {}
        self.adapter: LoRARequest | None = None
        self._adapter_numbers = itertools.count(1)
        self._adapters_changing = asyncio.Lock()
        self._text_threads = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="corespan-text")

    @property
    def name(self) -> str:
        return self.names[0]

    def named(self, name: str | None) -> "ServedModel":
        """This model under one of its names, or with the adapter of that name. Raises ApiError for any other."""
        if not name or name in self.names:
            return self
        if name not in self.adapters:
            raise model_not_found(name, [*self.names, *self.adapters])
        model = copy.copy(self)
        model.names, model.adapter = [name], self.adapters[name]
        return model

    async def load_adapter(self, name: str, path: str, in_place: bool = False) -> None:
        """Has the engine read an adapter that requests can name as their model. Raises ApiError for a name that is
        taken, ValueError for an adapter that cannot be used."""
        async with self._adapters_changing:
            known = self.adapters.get(name)
            if name in self.names or (known is not None and not in_place):
                raise ApiError(f"the name {name!r} is taken; see /v1/models", param="lora_name")
            number = next(self._adapter_numbers) if known is None else known.lora_int_id
            request = LoRARequest(name, number, path, self.name, load_inplace=known is not None)
            await self.engine.add_lora(request)
            self.adapters[name] = LoRARequest(name, number, path, self.name)

    async def unload_adapter(self, name: str) -> None:
        """Raises ApiError where there is none of that name."""
        async with self._adapters_changing:
            if name not in self.adapters:
                raise model_not_found(name, list(self.adapters))
            await self.engine.remove_lora(self.adapters.pop(name).lora_int_id)

    @property
    def root(self) -> str:
        return self.engine.model_config.model

    @property
    def max_model_len(self) -> int:
        return self.engine.model_config.max_model_len

    @property
    def renderer(self) -> Renderer:
        return self.engine.renderer

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ValueError for a model that runs on token ids alone."""
        return self.engine.get_tokenizer()

    async def in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """`work(*arguments)` off the event loop: tokenising, templates and grammars must not hold up streams."""
        return await asyncio.get_running_loop().run_in_executor(self._text_threads, work, *arguments)

    def close(self) -> None:
        self._text_threads.shutdown(wait=False, cancel_futures=True)
        self.engine.shutdown()


def resolve_parsers(chat: ChatSettings, engine: "AsyncLLM") -> ChatSettings:
    """`auto` replaced by what the chat template tells. Raises ValueError for a parser that there is not."""
    template = chat.chat_template or ""
    if not template and engine.tokenizer is not None:
        known = engine.tokenizer.chat_template
        template = known if isinstance(known, str) else json.dumps(known or "", ensure_ascii=False)
    tool_parser, reasoning_parser = chat.tool_parser, chat.reasoning_parser
    if tool_parser == AUTO:
        tool_parser = _told("tool call", guess_tool_parser(template))
    if reasoning_parser == AUTO:
        reasoning_parser = _told("reasoning", guess_reasoning_parser(template))
    if tool_parser is not None:
        tool_parser_class(tool_parser)
    if reasoning_parser is not None:
        reasoning_parser_class(reasoning_parser)
    return dataclasses.replace(chat, tool_parser=tool_parser, reasoning_parser=reasoning_parser)


def _told(what: str, parser: str | None) -> str | None:
    """The parser that the chat template tells, logged."""
    if parser is None:
        option = what.replace(" ", "-")
        logger.warning("The chat template tells no %s parser: none is used; --%s-parser NAME names one", what, option)
    else:
        logger.info("The %s parser by the chat template: %s", what, parser)
    return parser


class ModelHost(ABC):
    """Raises ApiError from `use` for a name that is not served, and while nothing can be served."""

    @abstractmethod
    def use(self, name: str | None) -> AbstractAsyncContextManager[ServedModel]:
        """The model of that name, or the first where the request names none."""

    @abstractmethod
    def listing(self) -> list[dict[str, Any]]:
        """An entry of /v1/models for every name."""

    @abstractmethod
    def loaded(self) -> list[ServedModel]: ...

    def failure(self) -> BaseException | None:
        """Why nothing can be served any more, where that is so."""
        return None

    @abstractmethod
    async def close(self) -> None:
        """Ends the engines."""


class SingleModel(ModelHost):
    """One model, there from start to end."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        yield self.model.named(name)

    def listing(self) -> list[dict[str, Any]]:
        model = self.model
        adapters = [adapter_entry(request, model) for request in model.adapters.values()]
        return [model_entry(name, model) for name in model.names] + adapters

    def loaded(self) -> list[ServedModel]:
        return [self.model]

    def failure(self) -> BaseException | None:
        return self.model.engine.dead_error if self.model.engine.errored else None

    async def close(self) -> None:
        await asyncio.to_thread(self.model.close)


def model_entry(name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "corespan",
        "root": model.root,
        "parent": None,
        "max_model_len": model.max_model_len,
        "permission": [
            {
                "id": f"modelperm-{model.created:x}",
                "object": "model_permission",
                "created": model.created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


def adapter_entry(request: LoRARequest, model: ServedModel) -> dict[str, Any]:
    """As of a model whose parent is the one that it adapts."""
    own = {"id": request.lora_name, "root": request.lora_path, "parent": model.name, "max_model_len": None}
    return model_entry(request.lora_name, model) | own
