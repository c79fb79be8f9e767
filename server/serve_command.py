"""The command line of `corespan serve`: the server's options, every engine option, and a YAML file of both."""

import argparse
import logging
from dataclasses import fields

from ..engine.engine_args import AsyncEngineArgs
from ..engine.model_files.short_names import DEFAULT_MODEL
from .serve_options import ServeOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL ...] [--OPTION VALUE ...]"  # there are too many to list twice
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"what to serve [{DEFAULT_MODEL}]")
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; the command line comes before it")
    AsyncEngineArgs.add_cli_args(parser)
    ServeOptions.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Serves until told to stop. Raises ValueError for options that make no sense."""
    from .serve import serve

    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    server_options = ServeOptions.from_namespace(options)
    models = options.models or [str(options.model)]
    if len(set(models)) != len(models):
        raise ValueError(f"a model is named twice: {', '.join(models)}")
    if len(models) > 1 and server_options.served_model_name:
        raise ValueError("--served-model-name names one model; several are served under the names they are given by")
    if len(models) > 1 and server_options.api_server_count > 1:
        raise ValueError("--api-server-count above 1 is for one model; several share one process")
    unknown = set(server_options.model_keep_alive) - set(models)
    if unknown:
        raise ValueError(f"--model-keep-alive names {', '.join(sorted(unknown))}, which is not served")
    return serve(server_options, [engine_args_of(options, server_options, model) for model in models])


def engine_args_of(options: argparse.Namespace, server: ServeOptions, model: str) -> AsyncEngineArgs:
    """The engine's options. Of those that server and engine have both, the engine gets only what it reads."""
    mine = {each.name for each in fields(ServeOptions)} - {"enable_log_requests"}
    given = {name: value for name, value in vars(options).items() if name not in mine}
    name = server.served_model_name[0] if server.served_model_name else model
    given |= {"model": model, "served_model_name": name, "shutdown_timeout": 0.0}
    return AsyncEngineArgs.from_cli_args(argparse.Namespace(**given))
