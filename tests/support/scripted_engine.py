"""An engine that says what it was told to, and a chat with it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from corespan.protocol.params import RequestOutputKind, SamplingParams
from corespan.server.chat import ChatSession


class ScriptedEngine:
    """Stands in for LLMEngine: answers each request with the next script, a piece a step; callables are called."""

    def __init__(self, *scripts: list[str | Callable[[], str]], max_model_len: int = 10_000) -> None:
        self.scripts = list(scripts)
        self.prompts: list[str] = []
        self.aborted: list[str] = []
        self.running: list[str | Callable[[], str]] = []
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))

    def get_tokenizer(self) -> "ScriptedEngine":
        return self

    def apply_chat_template(
        self, messages: list[dict[str, str]], chat_template: str | None, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert add_generation_prompt and not tokenize
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> str:
        assert params.output_kind is RequestOutputKind.DELTA
        self.prompts.append("".join(map(chr, prompt["prompt_token_ids"])))
        self.running = list(self.scripts.pop(0))
        return request_id

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        piece = self.running.pop(0)
        completion = SimpleNamespace(text=piece if isinstance(piece, str) else piece(), token_ids=[1])
        return [SimpleNamespace(prompt_token_ids=[1, 2], outputs=[completion])]

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        self.running = []


def session(engine: ScriptedEngine, system: str | None = None, max_tokens: int = 16) -> ChatSession:
    params = SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
    return ChatSession(engine, params, system)  # type: ignore[arg-type]
