"""Options that commands share, and what is made of them: an engine, sampling parameters."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..client.spawn import core_ahead
from ..engine.model_files.short_names import DEFAULT_MODEL, SHORT_NAMES
from .streaming import Statistics
from .terminal import is_terminal, note, shown_while

if TYPE_CHECKING:
    from ..engine.llm_engine import LLMEngine
    from ..protocol.params import SamplingParams

MODEL_HELP = (
    f"a short name ({', '.join(SHORT_NAMES)}), a folder in Hugging Face layout, a .gguf file, or a hub id "
    f"[{DEFAULT_MODEL}]"
)


def add_engine_options(command: argparse.ArgumentParser) -> None:
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
        "--quantization",
        choices=["int8", "gguf", "dequantize"],
        help="weights in int8, in a GGUF file's own blocks, or in the dtype [the blocks, else the dtype]",
    )
    engine.add_argument(
        "--max-model-len", metavar="N", help="tokens of prompt and completion, e.g. 4096 or 4K [the model's]"
    )
    add_stats_option(command)


def add_stats_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        default=is_terminal(sys.stderr),
        help="at the end, tokens and tokens a second on standard error [where that is a terminal]",
    )


def add_remote_options(command: argparse.ArgumentParser, url: str | None = None) -> None:
    remote = command.add_argument_group("a server instead of an engine of one's own")
    shown = "none: run the model here" if url is None else "%(default)s"
    remote.add_argument(
        "--url", default=url, help=f"an OpenAI-compatible server, e.g. http://localhost:8000/v1 [{shown}]"
    )
    remote.add_argument("--model-name", metavar="NAME", help="which of the server's models [its first]")
    remote.add_argument("--api-key", metavar="KEY", help="what to send as the key [OPENAI_API_KEY]")


def add_chat_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--system", "--system-prompt", metavar="TEXT", help="the system message that opens the conversation"
    )
    command.add_argument(
        "--chat-template", metavar="TEMPLATE", help="a jinja2 template, its file or its name [the model's]"
    )


def add_sampling_options(command: argparse.ArgumentParser, temperature: float, top_p: float, max_tokens: int) -> None:
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
    add("--json-schema", metavar="SCHEMA", help="answer in JSON of this schema: the schema itself, or @FILE")


def sampling_params(options: argparse.Namespace) -> "SamplingParams":
    """Raises ValueError naming what is wrong."""
    from ..protocol.params import RequestOutputKind, SamplingParams
    from ..protocol.structured_outputs import StructuredOutputsParams

    schema = None if options.json_schema is None else _schema(options.json_schema)
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        stop=options.stop,
        max_tokens=options.max_tokens,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        output_kind=RequestOutputKind.DELTA,
    )


@contextmanager
def running_engine(options: argparse.Namespace) -> Iterator["tuple[LLMEngine, Statistics]"]:
    """The engine, shut down at the end, and what its completions are counted in, shown at the end with --stats."""
    with core_ahead(), shown_while(f"Loading {options.model} ..."):
        from ..engine.engine_args import EngineArgs
        from ..engine.llm_engine import LLMEngine

        engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=options.model,
                revision=options.revision,
                dtype=options.dtype,
                quantization=options.quantization,
                max_model_len=options.max_model_len,
                max_num_seqs=1,
                seed=None,  # without --seed no two runs are alike
                disable_log_stats=True,
            )
        )
    statistics = Statistics()
    try:
        yield engine, statistics
        if options.stats and statistics.num_tokens:
            note(str(statistics))
    finally:
        engine.shutdown()


def _schema(text: str) -> dict[str, Any]:
    source = "--json-schema"
    if text.startswith("@"):
        source = text[1:]
        text = Path(source).read_text(encoding="utf-8")
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError(f"{source} must be a JSON object that is a schema, got {text.strip()[:80]}")
    return schema
