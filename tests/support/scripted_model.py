"""A served model whose answers are written down: what an API makes of an answer, whatever a model would say."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

from http_server import ServerThread

from corespan.engine.outputs.request_output import CompletionOutput, RequestOutput
from corespan.protocol.params import RequestOutputKind, SamplingParams
from corespan.server.models import ChatSettings, ServedModel, SingleModel


class ScriptedLLM:
    """Stands in for AsyncLLM behind a server: `engine` renders, `say` tells what the next answers are."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.prompts: list[str] = []
        self.requests: list[tuple[SamplingParams, dict[str, Any]]] = []
        self.say()

    def say(
        self, *pieces: str | BaseException, finish_reason: str = "stop", stop_reason: int | str | None = None
    ) -> None:
        """Each piece is one output of the engine; an exception is raised in its place."""
        self._pieces: Sequence[str | BaseException] = pieces
        self._ending = (finish_reason, stop_reason)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **settings: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        self.prompts.append(prompt.get("prompt") or "")
        self.requests.append((params, {**settings, "cache_salt": prompt.get("cache_salt")}))
        outputs = [(piece, self._token_ids(piece)) for piece in self._pieces]
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            failure = next((piece for piece, _ in outputs if isinstance(piece, BaseException)), None)
            whole = "".join(str(piece) for piece, _ in outputs)
            outputs = [(failure or whole, [token_id for _, token_ids in outputs for token_id in token_ids])]
        for number, (piece, token_ids) in enumerate(outputs):
            if isinstance(piece, BaseException):
                raise piece
            last = number == len(outputs) - 1
            finish_reason, stop_reason = self._ending if last else (None, None)
            answers = [
                CompletionOutput(index, piece, list(token_ids), None, None, finish_reason, stop_reason)
                for index in range(params.n)
            ]
            yield RequestOutput(
                request_id, prompt.get("prompt"), prompt["prompt_token_ids"], None, answers, last, num_cached_tokens=1
            )

    def _token_ids(self, piece: str | BaseException) -> list[int]:
        if isinstance(piece, BaseException):
            return []
        token_ids: list[int] = self._engine.get_tokenizer().encode(piece, add_special_tokens=False)
        return token_ids

    def shutdown(self) -> None:
        """The engine behind it is somebody else's."""


class Scripted(NamedTuple):
    """A server, and the model behind it."""

    thread: ServerThread
    llm: ScriptedLLM

    @property
    def url(self) -> str:
        return self.thread.url


def serve_scripted(engine: Any, tool_parser: str = "hermes", reasoning_parser: str | None = "qwen3") -> Scripted:
    thread = ServerThread()
    llm = ScriptedLLM(engine)
    chat = ChatSettings(enable_auto_tool_choice=True, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    thread.serve(SingleModel(ServedModel(llm, ["tiny"], chat)))  # type: ignore[arg-type]
    return Scripted(thread, llm)
