"""What `bench latency` and `bench throughput` share: their options, the engine that they measure, how it answers."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.engine_args import EngineArgs

if TYPE_CHECKING:
    from ...engine.llm import LLM
    from ...protocol.params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--n", type=int, default=1, metavar="N", help="answers a request [%(default)s]")
    add("--disable-detokenize", action="store_true", help="answers are token ids alone")
    add("--output-json", metavar="FILE", help="write the result as JSON")
    EngineArgs.add_cli_args(parser)


@contextmanager
def running_llm(options: argparse.Namespace) -> "Iterator[LLM]":
    """An `LLM` of the command's engine options, shut down at the end. Raises what its start raises."""
    from ...engine.llm import LLM

    llm = LLM.from_engine_args(EngineArgs.from_cli_args(options))
    try:
        yield llm
    finally:
        llm.shutdown()


def params_of(options: argparse.Namespace, max_tokens: int) -> "SamplingParams":
    """Answers of exactly that length."""
    from ...protocol.params import SamplingParams

    return SamplingParams(
        n=options.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=max_tokens,
        detokenize=not options.disable_detokenize,
    )


def save(options: argparse.Namespace, result: dict[str, Any]) -> None:
    if options.output_json:
        Path(options.output_json).write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
