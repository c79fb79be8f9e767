"""The options of `corespan serve` that are the server's own; the engine's are `EngineArgs`."""

import argparse
import contextlib
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from .models import ChatSettings


def _option(default: Any, help: str, **kwargs: Any) -> Any:
    """A field with what argparse needs for it. A list as default makes an option that takes several values."""
    metadata = {"help": help, **kwargs}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


_GROUPS = {
    "network": "host",
    "access": "api_key",
    "model and chat": "served_model_name",
    "tools and reasoning": "response_role",
    "answers": "return_tokens_as_token_ids",
    "several models": "max_loaded_models",
    "what is served": "enable_tokenizer_info_endpoint",
    "processes": "api_server_count",
    "limits": "max_queued_requests",
    "logs": "enable_log_requests",
}
"""Groups of --help, each with its first field; the next fields belong to it too."""
_FIRST_OF_GROUP = {first: name for name, first in _GROUPS.items()}


@dataclass
class ServeOptions:
    """Names and defaults are vLLM's where the thing is the same."""

    host: str | None = _option(None, "address to listen on [all]")
    port: int = _option(8000, "port to listen on")
    uds: str | None = _option(None, "path of a Unix socket to listen on instead of host and port")
    root_path: str = _option("", "path under which a proxy serves this server")
    api_key: list[str] = _option([], "key that clients must send; several may be given [VLLM_API_KEY]")
    allowed_origins: list[str] = _option(["*"], "CORS: allowed origins, a JSON list", json=True)
    allowed_methods: list[str] = _option(["*"], "CORS: allowed methods, a JSON list", json=True)
    allowed_headers: list[str] = _option(["*"], "CORS: allowed headers, a JSON list", json=True)
    allow_credentials: bool = _option(False, "CORS: allow credentials")
    ssl_keyfile: str | None = _option(None, "TLS: file of the private key")
    ssl_certfile: str | None = _option(None, "TLS: file of the certificate")
    ssl_ca_certs: str | None = _option(None, "TLS: file of the authorities that sign clients' certificates")
    ssl_cert_reqs: int = _option(0, "TLS: whether clients need a certificate (0 no, 1 optional, 2 yes)")
    served_model_name: list[str] = _option([], "names of the model; answers carry the first [the model as given]")
    chat_template: str | None = _option(None, "chat template: a file, or its text in one line [the model's]")
    chat_template_content_format: Literal["auto", "string", "openai"] = _option(
        "auto", "what the template takes a message's content for"
    )
    trust_request_chat_template: bool = _option(False, "take chat templates from requests")
    default_chat_template_kwargs: dict[str, Any] = _option({}, "variables for the chat template, JSON", json=True)
    response_role: str = _option("assistant", "role of the answers")
    lora_modules: list[str] = _option(
        [], "LoRA adapters, asked for as models: NAME=PATH, or JSON with name and path (needs --enable-lora)"
    )
    lora_root: str | None = _option(None, "folder from which adapters may be loaded over HTTP (needs --enable-admin)")
    enable_auto_tool_choice: bool = _option(False, "let the model choose tools (needs --tool-call-parser)")
    tool_call_parser: str | None = _option(None, "how the model spells tool calls; auto: look at its template")
    exclude_tools_when_tool_choice_none: bool = _option(False, "hide tools from the template with tool_choice none")
    reasoning_parser: str | None = _option(None, "how the model spells reasoning; auto: look at its template")
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = _option(
        "both", "under which names answers carry reasoning"
    )
    return_tokens_as_token_ids: bool = _option(False, "spell tokens in logprobs as token_id:N")
    enable_force_include_usage: bool = _option(False, "end every stream with its usage")
    enable_prompt_tokens_details: bool = _option(False, "accepted; usage always has the details")
    max_loaded_models: int = _option(1, "of several models, how many are loaded at a time")
    max_sleeping_models: int = _option(2, "how many others sleep, with their process but no weights, at most")
    model_keep_alive: dict[str, float] = _option(
        {}, "seconds an idle model stays loaded, JSON: {MODEL: SECONDS} [until its room is needed]", json=True
    )
    enable_tokenizer_info_endpoint: bool = _option(False, "serve /tokenizer_info")
    disable_web_ui: bool = _option(False, "serve no page at /")
    enable_admin: bool = _option(False, "serve the controls: sleep, pause, caches, profiles")
    strict_max_tokens: bool = _option(False, "refuse max_tokens beyond the context instead of cutting it")
    vllm_error_format: bool = _option(False, "spell errors as vLLM does, not as OpenAI")
    sse_keep_alive_interval: float = _option(0.0, "seconds of silence after which a stream sends a comment [never]")
    api_server_count: int = _option(1, "processes that serve the API of one engine")
    max_queued_requests: int = _option(0, "requests in flight, in a process, beyond which new ones get 503 [no limit]")
    max_request_bytes: int = _option(64 * 2**20, "size of a request's body beyond which it gets 413")
    keep_alive_timeout: int = _option(120, "seconds an idle connection stays open")
    shutdown_timeout: float = _option(30.0, "seconds running requests get to finish at shutdown")
    enable_log_requests: bool = _option(False, "log each request")
    disable_uvicorn_access_log: bool = _option(False, "log no line per request")
    uvicorn_log_level: str = _option("info", "level of the server's log")

    def __post_init__(self) -> None:
        """Raises ValueError for options that do not go together or name what there is not."""
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("--enable-auto-tool-choice needs --tool-call-parser NAME")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("--ssl-keyfile and --ssl-certfile go together")
        if self.api_server_count < 1:
            raise ValueError(f"--api-server-count must be at least 1, got {self.api_server_count}")
        if self.max_loaded_models < 1:
            raise ValueError(f"--max-loaded-models must be at least 1, got {self.max_loaded_models}")
        if self.max_sleeping_models < 0:
            raise ValueError(f"--max-sleeping-models must be at least 0, got {self.max_sleeping_models}")
        for name, seconds in self.model_keep_alive.items():
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
                raise ValueError(f"--model-keep-alive of {name!r} must be seconds of at least 0, got {seconds!r}")
        self.adapters()
        if not self.api_key and (key := os.environ.get("VLLM_API_KEY")):
            self.api_key = [key]

    @property
    def error_style(self) -> Literal["openai", "vllm"]:
        return "vllm" if self.vllm_error_format else "openai"

    def adapters(self) -> dict[str, str]:
        """The paths of `lora_modules`, by name. Raises ValueError for entries that are neither of its two forms."""
        found: dict[str, str] = {}
        for entry in self.lora_modules:
            name, _, path = entry.partition("=")
            if entry.lstrip().startswith("{"):
                with contextlib.suppress(ValueError):
                    module = json.loads(entry)
                    name, path = module.get("name"), module.get("path")
            if not (isinstance(name, str) and isinstance(path, str) and name and path):
                raise ValueError(f'--lora-modules takes NAME=PATH or {{"name": ..., "path": ...}}, got {entry!r}')
            if name in found or name in self.served_model_name:
                raise ValueError(f"--lora-modules: the name {name!r} is taken")
            found[name] = path
        return found

    def chat_settings(self) -> ChatSettings:
        template = self.chat_template
        if template is not None and (path := Path(template)).is_file():
            template = path.read_text(encoding="utf-8")
        return ChatSettings(
            chat_template=template,
            chat_template_content_format=self.chat_template_content_format,
            chat_template_kwargs=self.default_chat_template_kwargs,
            trust_request_chat_template=self.trust_request_chat_template,
            response_role=self.response_role,
            enable_auto_tool_choice=self.enable_auto_tool_choice,
            exclude_tools_when_tool_choice_none=self.exclude_tools_when_tool_choice_none,
            tool_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
        )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        groups = {name: parser.add_argument_group(name) for name in _GROUPS}
        group = groups["network"]
        for each in fields(cls):
            group = groups.get(_FIRST_OF_GROUP.get(each.name, ""), group)
            flag = "--" + each.name.replace("_", "-")
            default = each.default_factory() if callable(each.default_factory) else each.default
            described = str(each.metadata["help"])
            if default not in (None, [], {}, False, "", 0.0, 0) and "[" not in described:
                described += f" [{default}]"
            settings: dict[str, Any] = {"help": described.replace("%", "%%"), "default": argparse.SUPPRESS}
            if isinstance(default, bool):
                settings["action"] = argparse.BooleanOptionalAction if default else "store_true"
            elif each.metadata.get("json"):
                settings["type"] = _json_of(type(default))
            elif isinstance(default, list):
                settings["nargs"] = "+"
            elif isinstance(default, (int, float)):
                settings["type"] = type(default)
            elif get_origin(each.type) is Literal:
                settings["choices"] = get_args(each.type)
            group.add_argument(flag, **settings)

    @classmethod
    def from_namespace(cls, options: argparse.Namespace) -> "ServeOptions":
        return cls(**{each.name: getattr(options, each.name) for each in fields(cls) if hasattr(options, each.name)})


def _json_of(kind: type) -> Any:
    def parse(text: str) -> Any:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
        if not isinstance(value, kind):
            raise argparse.ArgumentTypeError(f"must be a JSON {'list' if kind is list else 'object'}")
        return value

    return parse
