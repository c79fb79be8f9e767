"""The console script `corespan`: the parser, one line for each error, the exit status. Each command has a module."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..client.standard_streams import fill_standard_descriptors
from ..engine.model_files.short_names import DEFAULT_MODEL
from ..engine.model_files.wheels import ModelFetchError
from ..protocol.errors import EngineDeadError
from .chat import run_chat
from .command_parser import CommandParser
from .completion import SHELLS, completion_script
from .generate import run_generate
from .options import add_chat_options, add_engine_options, add_remote_options, add_sampling_options, add_stats_option
from .terminal import discard_output, note

ENVIRONMENT_HELP = """\
environment:
  CORESPAN_CACHE                    folder for models (default: ~/.cache/corespan)
  VLLM_ENABLE_V1_MULTIPROCESSING=0  run the engine in this process
  VLLM_CPU_KVCACHE_SPACE            size of the KV cache, GiB
  VLLM_LOGGING_LEVEL                DEBUG, INFO, WARNING (default here) or ERROR
"""


@dataclass(frozen=True)
class LazyCommand:
    """A command that lives in a module of its own, with `add_arguments(parser)` and `run(options)`."""

    module: str
    summary: str
    description: str

    def run(self, options: argparse.Namespace) -> int:
        return int(importlib.import_module(self.module, __package__).run(options))


LAZY_COMMANDS = {
    "serve": LazyCommand(
        ".serve_command",
        "serve a model over HTTP",
        "Serves a model over HTTP: OpenAI's API at http://localhost:8000/v1.",
    ),
    "run-batch": LazyCommand(
        ".run_batch",
        "answer the requests of a file",
        "Answers the requests of an OpenAI batch file, each as the server would.",
    ),
    "bench": LazyCommand(
        ".bench.command", "measure a server, or the engine", "Measures a server, or the engine alone."
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 for an error told in one line, 130 after Ctrl-C."""
    fill_standard_descriptors()
    arguments = sys.argv[1:] if arguments is None else arguments
    wanted = next((each for each in arguments if not each.startswith("-")), "")
    options = build_parser(wanted).parse_args(arguments)
    if options.command is run_vllm:
        run_vllm(options)
        return 0
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if sys.stdout is None and options.command != LAZY_COMMANDS["serve"].run:
        note("corespan: error: standard output is closed")
        return 1
    try:
        return int(options.command(options))
    except BrokenPipeError:  # the reader has seen enough
        discard_output()
        return 0
    except (ValueError, OSError, ModelFetchError, EngineDeadError) as error:
        note(f"corespan: error: {as_options(str(error), options)}")
        discard_output()
        return 1
    except KeyboardInterrupt:
        return 130


def as_options(message: str, options: argparse.Namespace) -> str:
    """An engine's error in the command's words: its options in place of Python's arguments, without those it lacks."""
    from dataclasses import fields

    from ..engine.engine_args import EngineArgs

    given = vars(options)
    message = message.replace("must be None or ", "must be ")
    for name in sorted((field.name for field in fields(EngineArgs) if "_" in field.name), key=len, reverse=True):
        if name not in given:
            message = re.sub(rf", {name}\b(?=[,)])|(?<=\(){name}, ", "", message)
    for name in given:
        if "_" in name or message.startswith(f"{name} must "):  # others are words of the language too
            message = re.sub(rf"(?<![\w-]){name}\b", "--" + name.replace("_", "-"), message)
    return message


def build_parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """The parser: of every command, or complete only for the one that is `wanted`, which is quicker."""
    parser = argparse.ArgumentParser(prog="corespan", description="Runs language models on this machine.")
    parser.add_argument("--version", action="version", version=f"corespan {__version__}")
    parser.add_argument("--completion", action=_Completion, choices=SHELLS, help="print a script that completes words")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=CommandParser)

    command = commands.add_parser("pull", help="fetch a model into the cache", description=run_pull.__doc__)
    command.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="a short name or a hub id [%(default)s]")
    command.add_argument("--revision", help="branch, tag or commit of a hub id")
    command.set_defaults(command=run_pull)

    command = _add_engine_command(commands, "generate", "complete a prompt", run_generate)
    command.add_argument("prompt", nargs="?", help="the text to complete; absent or -: read it from standard input")
    command.add_argument("--chat", action="store_true", help="the prompt is a message to answer, not a text to go on")
    add_remote_options(command)
    add_chat_options(command)
    add_sampling_options(command, temperature=0.0, top_p=1.0, max_tokens=256)

    command = _add_engine_command(commands, "chat", "talk to the model", run_chat)
    command.set_defaults(question=None)
    command.add_argument(
        "question", nargs="?", default=argparse.SUPPRESS, help="answer this and leave; absent: a conversation"
    )
    command.add_argument("-q", "--quick", dest="question", metavar="TEXT", default=argparse.SUPPRESS, help="the same")
    add_remote_options(command)
    add_chat_options(command)
    add_sampling_options(command, temperature=0.2, top_p=0.9, max_tokens=1024)

    command = commands.add_parser("complete", help="have a server complete a prompt", description=run_complete.__doc__)
    command.set_defaults(prompt=None)
    command.add_argument(
        "prompt",
        nargs="?",
        default=argparse.SUPPRESS,
        help="the text to complete; absent or -: read it from standard input",
    )
    command.add_argument("-q", "--quick", dest="prompt", metavar="TEXT", default=argparse.SUPPRESS, help="the same")
    add_remote_options(command, "http://localhost:8000/v1")
    add_stats_option(command)
    add_sampling_options(command, temperature=0.0, top_p=1.0, max_tokens=256)
    command.set_defaults(command=run_complete, chat=False, system=None, chat_template=None)

    for name, lazy in LAZY_COMMANDS.items():
        _add_lazy_command(commands, name, lazy, wanted in (None, name))

    command = commands.add_parser("run-vllm", help="run a script written for vLLM", description=run_vllm.__doc__)
    command.add_argument("script", help="a Python file")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script finds in sys.argv")
    command.set_defaults(command=run_vllm)
    return parser


def _add_lazy_command(
    commands: "argparse._SubParsersAction[CommandParser]", name: str, command: LazyCommand, with_options: bool
) -> None:
    """A command whose options take imports that others do without. `with_options`: it is the one that is wanted."""
    parser = commands.add_parser(
        name,
        help=command.summary,
        description=command.description,
        conflict_handler="resolve",  # where server and engine have an option of one name, the server's counts
        epilog=ENVIRONMENT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if with_options:
        importlib.import_module(command.module, __package__).add_arguments(parser)
    parser.set_defaults(command=command.run)


class _Completion(argparse.Action):
    """Prints the script and ends."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        print(completion_script(build_parser(), str(values)), end="")
        parser.exit()


def run_complete(options: argparse.Namespace) -> int:
    """Completes a prompt by a server and prints the completion as it comes."""
    return run_generate(options)


def run_pull(options: argparse.Namespace) -> int:
    """Fetches a model: a short name into corespan's cache, a hub id into the hub client's. Prints where it lies.

    What is there already is checked, and fetched again where it is damaged."""
    from ..engine.model_files.model_source import fetch_model

    print(fetch_model(options.model, options.revision))
    return 0


def run_vllm(options: argparse.Namespace) -> None:
    """Runs a script as it is; what it imports from vllm comes from corespan. What it raises is raised."""
    from ..vllm._run import run_script

    if not os.path.isfile(options.script):
        sys.exit(f"corespan: error: there is no file {options.script}")
    run_script(options.script, options.arguments)


def _add_engine_command(
    commands: "argparse._SubParsersAction[CommandParser]",
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int],
) -> CommandParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=run.__doc__,
        epilog=ENVIRONMENT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_options(command)
    command.set_defaults(command=run)
    return command


if __name__ == "__main__":
    sys.exit(main())
