"""The interactive chat: a conversation that remembers, answers that stream, Ctrl-C that stops only the answer."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .streaming import Interruption, stream_text

if TYPE_CHECKING:
    from ..engine.llm_engine import LLMEngine
    from ..protocol.params import SamplingParams

Message = dict[str, str]


class ChatSession:
    """The messages so far and the engine that answers them. Old turns are dropped when the context is full."""

    def __init__(self, engine: "LLMEngine", params: "SamplingParams", system: str | None = None) -> None:
        self.engine = engine
        self.params = params
        self.opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[Message] = []

    def answer(self, question: str, interruption: Interruption) -> Iterator[str]:
        """Yields the answer's text as it grows. Both sides are remembered, an interrupted answer as far as it got.

        Raises ValueError where not even the question alone fits the context, or the model has no chat template; the
        question is then forgotten.
        """
        self.turns.append({"role": "user", "content": question})
        try:
            prompt_token_ids = self._render()
        except ValueError:
            self.turns.pop()
            raise
        said: list[str] = []
        try:
            for text in stream_text(self.engine, {"prompt_token_ids": prompt_token_ids}, self.params, interruption):
                said.append(text)
                yield text
        finally:
            self.turns.append({"role": "assistant", "content": "".join(said)})

    def _render(self) -> list[int]:
        """The conversation as token ids, without its oldest turns where these would leave no room for the answer."""
        tokenizer = self.engine.get_tokenizer()
        max_model_len = self.engine.vllm_config.model_config.max_model_len
        room = max_model_len - min(self.params.max_tokens or 1, max_model_len // 2)
        while True:
            conversation = self.opening + self.turns
            text: str = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if len(token_ids) <= room:
                return token_ids
            if len(self.turns) == 1:
                raise ValueError(f"the message is {len(token_ids)} tokens long; at most {room} fit the context")
            del self.turns[:2]


def converse(session: ChatSession) -> None:
    """Reads questions from standard input until its end and prints the answers."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and recall for input()
        print("Ctrl-C stops an answer, Ctrl-D leaves.", file=sys.stderr)
    with Interruption() as interruption:
        while True:
            try:
                with interruption.raised():
                    question = input("> " if interactive else "").strip()
            except EOFError:
                if interactive:
                    print()
                return
            except KeyboardInterrupt:
                print("\nCtrl-D leaves.", file=sys.stderr)
                continue
            if question:
                _print_answer(session, question, interruption)


def _print_answer(session: ChatSession, question: str, interruption: Interruption) -> None:
    try:
        for text in session.answer(question, interruption):
            print(text, end="", flush=True)
    except ValueError as error:
        print(f"corespan: {error}", file=sys.stderr)
        return
    print(" [stopped]" if interruption.take() else "")
