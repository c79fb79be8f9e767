"""The command line of `corespan serve`: the server's options, every engine option, and a YAML file of both."""

import argparse
import logging
from dataclasses import fields

from ..engine.engine_args import AsyncEngineArgs
from ..engine.hub import DEFAULT_MODEL
from .serve_options import ServeOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=f"what to serve [{DEFAULT_MODEL}]")
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; the command line comes before it")
    AsyncEngineArgs.add_cli_args(parser)
    ServeOptions.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Serves until told to stop. Raises ValueError for options that make no sense."""
    from .serve import serve

    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    server_options = ServeOptions.from_namespace(options)
    if options.model_tag is not None:
        options.model = options.model_tag
    names = server_options.served_model_name or [str(options.model)]
    engine_options = {each.name: getattr(options, each.name, each.default) for each in fields(AsyncEngineArgs)}
    engine_options |= {"served_model_name": names[0], "shutdown_timeout": 0.0}
    engine_args = AsyncEngineArgs.from_cli_args(argparse.Namespace(**engine_options))
    return serve(server_options, engine_args, names)
