"""`corespan generate`: one completion, of a text or of a conversation's first message."""

import argparse
import sys

from .chat import ChatSession
from .options import running_engine, sampling_params
from .streaming import Interruption, stream_text
from .terminal import is_terminal, write_all


def run_generate(options: argparse.Namespace) -> int:
    """Completes a prompt and prints the completion as it is generated."""
    if not options.chat and (options.system is not None or options.chat_template is not None):
        raise ValueError("--system and --chat-template need --chat")
    prompt = _prompt(options)
    params = sampling_params(options)
    if options.url is not None:
        from .remote import RemoteChat, running_remote

        with running_remote(options) as remote:
            interruption = Interruption()
            if options.chat:
                write_all(RemoteChat(remote, params, options.system).answer(prompt, interruption))
            else:
                write_all(remote.complete(prompt, params, interruption))
        return 0
    with running_engine(options) as (engine, statistics):
        if options.chat:
            session = ChatSession(engine, params, options.system, options.chat_template, statistics)
            pieces = session.answer(prompt, Interruption())
        else:
            pieces = stream_text(engine, prompt, params, statistics=statistics)
        write_all(pieces)
    return 0


def _prompt(options: argparse.Namespace) -> str:
    prompt: str | None = options.prompt
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and (sys.stdin is None or is_terminal(sys.stdin)):
        raise ValueError("no prompt: give one as an argument or on standard input")
    if sys.stdin is None:
        raise ValueError("standard input is closed")
    return sys.stdin.read()
