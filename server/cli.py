"""The console script `corespan`: parses arguments, builds an engine, prints. Everything else is the shell's."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import __version__
from ..engine.hub import DEFAULT_MODEL, SHORT_NAMES, ModelFetchError
from ..protocol.errors import EngineDeadError

if TYPE_CHECKING:
    from ..engine.llm_engine import LLMEngine
    from ..protocol.params import SamplingParams

MODEL_HELP = (
    f"a short name ({', '.join(SHORT_NAMES)}), a folder in Hugging Face layout, a .gguf file, or a hub id "
    f"[{DEFAULT_MODEL}]"
)
ENVIRONMENT_HELP = """\
environment:
  CORESPAN_CACHE                    folder for models (default: ~/.cache/corespan)
  VLLM_ENABLE_V1_MULTIPROCESSING=0  run the engine in this process
  VLLM_CPU_KVCACHE_SPACE            size of the KV cache, GiB
  VLLM_LOGGING_LEVEL                DEBUG, INFO, WARNING (default here) or ERROR
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 for an error told in one line, 130 after Ctrl-C."""
    options = build_parser().parse_args(arguments)
    if options.command is run_vllm:
        run_vllm(options)
        return 0
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        return int(options.command(options))
    except (ValueError, OSError, ModelFetchError, EngineDeadError) as error:
        if isinstance(error, BrokenPipeError):  # the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"corespan: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="corespan", description="Runs language models on this machine.")
    parser.add_argument("--version", action="version", version=f"corespan {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("pull", help="fetch a model into the cache", description=run_pull.__doc__)
    command.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="a short name or a hub id [%(default)s]")
    command.add_argument("--revision", help="branch, tag or commit of a hub id")
    command.set_defaults(command=run_pull)

    command = _add_engine_command(commands, "generate", "complete a prompt", run_generate.__doc__)
    command.add_argument("prompt", nargs="?", help="the text to complete; absent or -: read it from standard input")
    _add_sampling_options(command, temperature=0.0, top_p=1.0, max_tokens=256)
    command.set_defaults(command=run_generate)

    command = _add_engine_command(commands, "chat", "talk to the model", run_chat.__doc__)
    command.add_argument("--system", help="the system message that opens the conversation")
    _add_sampling_options(command, temperature=0.2, top_p=0.9, max_tokens=1024)
    command.set_defaults(command=run_chat)

    _add_serve_command(commands)

    command = commands.add_parser("run-vllm", help="run a script written for vLLM", description=run_vllm.__doc__)
    command.add_argument("script", help="a Python file")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script finds in sys.argv")
    command.set_defaults(command=run_vllm)
    return parser


def _add_serve_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serves a model over HTTP: OpenAI's API at http://localhost:8000/v1.",
        conflict_handler="resolve",  # where server and engine have an option of one name, the server's counts
        epilog=ENVIRONMENT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if {"serve", "-h", "--help"} & set(sys.argv):  # its options take imports that other commands do without
        from .serve_command import add_arguments

        add_arguments(command)
    command.set_defaults(command=run_serve)


def _add_engine_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, summary: str, description: str | None
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=ENVIRONMENT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    engine = command.add_argument_group("engine")
    engine.add_argument("--model", default=DEFAULT_MODEL, help=MODEL_HELP)
    engine.add_argument("--revision", help="branch, tag or commit of a hub id")
    engine.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32"],
        help="what to compute in; auto: float32 for a float32 checkpoint, bfloat16 for others [%(default)s]",
    )
    engine.add_argument(
        "--max-model-len", metavar="N", help="tokens of prompt and completion, e.g. 4096 or 4K [the model's]"
    )
    return command


def _add_sampling_options(command: argparse.ArgumentParser, temperature: float, top_p: float, max_tokens: int) -> None:
    sampling = command.add_argument_group("sampling")
    add = sampling.add_argument
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help="at most so many new tokens [%(default)s]")
    add("--temperature", type=float, default=temperature, metavar="T", help="0: greedy [%(default)s]")
    add("--top-p", type=float, default=top_p, metavar="P", help="sample among the likeliest, together P [%(default)s]")
    add("--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest tokens [all]")
    add("--min-p", type=float, default=0.0, metavar="P", help="drop tokens less likely than P times the likeliest")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: discourage what was already said")
    add("--seed", type=int, metavar="N", help="makes sampling repeatable")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")


def run_serve(options: argparse.Namespace) -> int:
    from .serve_command import run

    return run(options)


def run_pull(options: argparse.Namespace) -> int:
    """Fetches a model: a short name into corespan's cache, a hub id into the hub client's. Prints where it lies.

    What is there already is checked, and fetched again where it is damaged."""
    from ..engine.model_source import fetch_model

    print(fetch_model(options.model, options.revision))
    return 0


def run_generate(options: argparse.Namespace) -> int:
    """Completes a prompt and prints the completion as it is generated."""
    from .streaming import stream_text

    prompt = options.prompt
    if prompt is None or prompt == "-":
        if prompt is None and sys.stdin.isatty():
            raise ValueError("no prompt: give one as an argument or on standard input")
        prompt = sys.stdin.read()
    params = _sampling_params(options)
    engine = _build_engine(options)
    try:
        for text in stream_text(engine, prompt, params):
            print(text, end="", flush=True)
        print()
    finally:
        engine.shutdown()
    return 0


def run_chat(options: argparse.Namespace) -> int:
    """Talks to the model. Ctrl-C stops an answer, Ctrl-D leaves."""
    from .chat import ChatSession, converse

    params = _sampling_params(options)
    engine = _build_engine(options)
    try:
        converse(ChatSession(engine, params, options.system))
    finally:
        engine.shutdown()
    return 0


def run_vllm(options: argparse.Namespace) -> None:
    """Runs a script as it is; what it imports from vllm comes from corespan. What it raises is raised."""
    from ..vllm._run import run_script

    if not os.path.isfile(options.script):
        sys.exit(f"corespan: error: there is no file {options.script}")
    run_script(options.script, options.arguments)


def _sampling_params(options: argparse.Namespace) -> "SamplingParams":
    from ..protocol.params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        stop=options.stop,
        max_tokens=options.max_tokens,
        output_kind=RequestOutputKind.DELTA,
    )


def _build_engine(options: argparse.Namespace) -> "LLMEngine":
    from ..engine.engine_args import EngineArgs
    from ..engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=options.model,
            revision=options.revision,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            max_num_seqs=1,
            disable_log_stats=True,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
