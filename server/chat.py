"""The interactive chat: a conversation that remembers, answers that stream, Ctrl-C that stops only the answer."""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from .conversation import Conversation
from .options import running_engine, sampling_params
from .streaming import Interruption, Statistics, stream_text
from .terminal import enable_line_editing, is_terminal, note, read_text, write, write_all

if TYPE_CHECKING:
    from ..engine.llm_engine import LLMEngine
    from ..protocol.params import SamplingParams

SETTINGS = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
}
HELP = '''\
/help               this list; /? too
/clear              forget the conversation
/system TEXT        set the system message and forget the conversation; without TEXT show it
/set NAME VALUE     set max_tokens, temperature, top_p, top_k, min_p, repetition_penalty or seed; alone: show them
/regen              answer the last question again
/bye                leave; /exit and /quit too, or Ctrl-D
A paste of several lines is one message. A line that ends in a backslash goes on in the next; """ opens and closes a
message of several lines. Ctrl-C stops an answer.'''


class ChatSession(Conversation):
    """An engine answers. Old turns are dropped when the context is full."""

    def __init__(
        self,
        engine: "LLMEngine",
        params: "SamplingParams",
        system: str | None = None,
        chat_template: str | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        super().__init__(params, system)
        self.engine = engine
        self.chat_template = chat_template
        self.statistics = Statistics() if statistics is None else statistics

    def _begin(self, interruption: Interruption) -> Iterator[str]:
        """Raises ValueError where not even the question alone fits the context, or there is no chat template."""
        prompt = {"prompt_token_ids": self._render()}
        return stream_text(self.engine, prompt, self.params, interruption, self.statistics)

    def _render(self) -> list[int]:
        """The conversation as token ids, without its oldest turns where these would leave no room for the answer."""
        tokenizer = self.engine.get_tokenizer()
        max_model_len = self.engine.vllm_config.model_config.max_model_len
        room = max_model_len - min(self.params.max_tokens or 1, max_model_len // 2)
        while True:
            text: str = tokenizer.apply_chat_template(
                self.messages, chat_template=self.chat_template, add_generation_prompt=True, tokenize=False
            )
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if len(token_ids) <= room:
                return token_ids
            if len(self.turns) == 1:
                raise ValueError(f"the message is {len(token_ids)} tokens long; at most {room} fit the context")
            del self.turns[:2]


def run_chat(options: argparse.Namespace) -> int:
    """Talks to the model, or answers one question. Ctrl-C stops an answer, /help lists what else can be said."""
    params = sampling_params(options)
    if options.url is not None:
        from .remote import RemoteChat, running_remote

        with running_remote(options) as remote:
            return _chat(RemoteChat(remote, params, options.system), options.question)
    with running_engine(options) as (engine, statistics):
        session = ChatSession(engine, params, options.system, options.chat_template, statistics)
        return _chat(session, options.question)


def _chat(session: Conversation, question: str | None) -> int:
    if question is None:
        return converse(session)
    write_all(session.answer(question, Interruption()))
    return 0


def converse(session: Conversation) -> int:
    """Reads questions from standard input until its end and prints the answers. Returns the exit status: 1 where
    something read from a pipe or file was refused; who sits at a terminal has seen it."""
    if sys.stdin is None:
        return 0
    interactive = is_terminal(sys.stdin)
    if interactive:
        enable_line_editing()
        note("Ctrl-C stops an answer, Ctrl-D leaves, /help lists more.")
    failed = False
    with Interruption() as interruption:
        while True:
            try:
                with interruption.raised():
                    said = read_text("> " if interactive else "", "... " if interactive else "")
                if not said:
                    continue
                if not respond(session, said, interruption):
                    break
            except EOFError:
                if interactive:
                    write("\n")
                break
            except KeyboardInterrupt:
                note("\nCtrl-D leaves.")
            except ValueError as error:
                note(f"corespan: {error}")
                failed = True
    return 1 if failed and not interactive else 0


def respond(session: Conversation, said: str, interruption: Interruption) -> bool:
    """Answers a question or does what a command says; False: to leave. Raises ValueError for what is refused."""
    name, _, argument = said.partition(" ")
    argument = argument.strip()
    if not name.startswith("/") or not name[1:].replace("?", "h").isalpha():  # a path is a question
        _print_answer(session, said, interruption)
    elif name in ("/help", "/?"):
        note(HELP)
    elif name == "/clear":
        session.turns.clear()
    elif name == "/system":
        if argument:
            session.system = argument
            session.turns.clear()
        else:
            note(session.system or "no system message")
    elif name == "/set":
        _set(session, argument.removeprefix("parameter ").split())
    elif name == "/regen":
        if not session.turns:
            raise ValueError("there is no question to answer again")
        question = session.turns[-2]["content"]
        del session.turns[-2:]
        _print_answer(session, question, interruption)
    elif name in ("/bye", "/exit", "/quit"):
        return False
    else:
        raise ValueError(f"there is no command {name}; /help lists them")
    return True


def _print_answer(session: Conversation, question: str, interruption: Interruption) -> None:
    for text in session.answer(question, interruption):
        write(text)
    write(" [stopped]\n" if interruption.take() else "\n")


def _set(session: Conversation, words: list[str]) -> None:
    if not words:
        note("\n".join(f"{name} {getattr(session.params, name)}" for name in SETTINGS))
        return
    if len(words) != 2 or words[0] not in SETTINGS:
        raise ValueError(f"/set takes a name and a value; names are {', '.join(SETTINGS)}")
    name, text = words
    try:
        value = SETTINGS[name](text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None
    session.params = msgspec.structs.replace(session.params, **{name: value})
