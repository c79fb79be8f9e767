"""The console script `corespan`: the parser, one line for each error, the exit status. Each command has a module."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from ..client.standard_streams import fill_standard_descriptors
from ..engine.hub import DEFAULT_MODEL, ModelFetchError
from ..protocol.errors import EngineDeadError
from . import bench_serve
from .chat import run_chat
from .command_parser import CommandParser
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 for an error told in one line, 130 after Ctrl-C."""
    fill_standard_descriptors()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = build_parser("serve" in arguments, "run-batch" in arguments).parse_args(arguments)
    if options.command is run_vllm:
        run_vllm(options)
        return 0
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if sys.stdout is None and options.command is not run_serve:
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


def build_parser(with_serve: bool = True, with_batch: bool = True) -> argparse.ArgumentParser:
    """The parser. What `serve` and `run-batch` have for options takes imports that others do without: on demand."""
    parser = argparse.ArgumentParser(prog="corespan", description="Runs language models on this machine.")
    parser.add_argument("--version", action="version", version=f"corespan {__version__}")
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

    _add_serve_command(commands, with_serve)
    _add_batch_command(commands, with_batch)

    command = commands.add_parser("bench", help="measure a server", description="Measures a server under load.")
    kinds = command.add_subparsers(title="what is measured", required=True, metavar="KIND")
    kind = kinds.add_parser("serve", help="a server that answers streams", description=bench_serve.__doc__)
    bench_serve.add_arguments(kind)
    kind.set_defaults(command=bench_serve.run)

    command = commands.add_parser("run-vllm", help="run a script written for vLLM", description=run_vllm.__doc__)
    command.add_argument("script", help="a Python file")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script finds in sys.argv")
    command.set_defaults(command=run_vllm)
    return parser


def _add_serve_command(commands: "argparse._SubParsersAction[CommandParser]", with_options: bool) -> None:
    command = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serves a model over HTTP: OpenAI's API at http://localhost:8000/v1.",
        conflict_handler="resolve",  # where server and engine have an option of one name, the server's counts
        epilog=ENVIRONMENT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if with_options:
        from .serve_command import add_arguments

        add_arguments(command)
    command.set_defaults(command=run_serve)


def run_serve(options: argparse.Namespace) -> int:
    from .serve_command import run

    return run(options)


def _add_batch_command(commands: "argparse._SubParsersAction[CommandParser]", with_options: bool) -> None:
    command = commands.add_parser(
        "run-batch",
        help="answer the requests of a file",
        description="Answers the requests of an OpenAI batch file, each as the server would.",
        conflict_handler="resolve",
        epilog=ENVIRONMENT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if with_options:
        from .run_batch import add_arguments

        add_arguments(command)
    command.set_defaults(command=run_batch)


def run_batch(options: argparse.Namespace) -> int:
    from .run_batch import run

    return run(options)


def run_complete(options: argparse.Namespace) -> int:
    """Completes a prompt by a server and prints the completion as it comes."""
    return run_generate(options)


def run_pull(options: argparse.Namespace) -> int:
    """Fetches a model: a short name into corespan's cache, a hub id into the hub client's. Prints where it lies.

    What is there already is checked, and fetched again where it is damaged."""
    from ..engine.model_source import fetch_model

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
