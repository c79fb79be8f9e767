"""The command line of `corespan bench`: what is measured, and with which options."""

import argparse

from ..command_parser import CommandParser
from . import latency, serve, throughput

_KINDS = {"serve": serve, "latency": latency, "throughput": throughput}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what is measured", required=True, metavar="KIND", parser_class=CommandParser)
    for name, module in _KINDS.items():
        kind = kinds.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        module.add_arguments(kind)
        kind.set_defaults(measure=module.run)


def run(options: argparse.Namespace) -> int:
    """Raises what the measurement raises: ValueError for options that make no sense, OSError for files."""
    return int(options.measure(options))
