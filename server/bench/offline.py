"""The engine that `bench latency` and `bench throughput` measure."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...engine.engine_args import EngineArgs

if TYPE_CHECKING:
    from ...engine.llm import LLM


@contextmanager
def running_llm(options: argparse.Namespace) -> "Iterator[LLM]":
    """An `LLM` of the command's engine options, shut down at the end. Raises what its start raises."""
    from ...engine.llm import LLM

    llm = LLM.from_engine_args(EngineArgs.from_cli_args(options))
    try:
        yield llm
    finally:
        llm.shutdown()
