"""Functions and classes that vLLM's scripts use and no room of the engine needs."""

import argparse
import gc
import logging
import os
import random
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..engine.model_files.model_source import resolve_model
from ..engine.text.loading import load_tokenizer
from ..engine.text.tokenizer import Tokenizer

ChatCompletionMessageParam = dict[str, Any]


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes --max_model_len for --max-model-len."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given: Sequence[str] = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._with_dashes(argument) for argument in given], namespace)

    def _with_dashes(self, argument: str) -> str:
        option, equals, value = argument.partition("=")
        if not option.startswith("--") or option in self._option_string_actions:
            return argument
        return option.replace("_", "-") + equals + value


class CPUPlatform:
    """`is_cpu()` is true, and every other question of the kind, such as `is_cuda()`, is not."""

    device_type = device_name = "cpu"

    def __getattr__(self, name: str) -> Callable[[], bool]:
        if not name.startswith("is_"):
            raise AttributeError(f"current_platform has no {name!r} in corespan")
        return lambda: name == "is_cpu"

    def seed_everything(self, seed: int | None) -> None:
        set_random_seed(seed)


current_platform = CPUPlatform()


def random_uuid() -> str:
    return uuid.uuid4().hex


def get_open_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def set_random_seed(seed: int | None) -> None:
    """Seeds this process's generators: random, numpy's, and torch's where torch is loaded. None changes nothing."""
    if seed is None:
        return
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collects garbage: an engine that is dropped gives back what it holds."""
    gc.collect()


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def get_tokenizer(
    tokenizer_name: str | os.PathLike[str],
    *args: object,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    **kwargs: object,
) -> Tokenizer:
    """The tokenizer of a model, named as for `LLM`. Raises ValueError where it has none."""
    folder = resolve_model(os.fspath(tokenizer_name), revision).tokenizer_dir
    if folder is None:
        raise ValueError(f"{tokenizer_name} has no tokenizer")
    return load_tokenizer(folder, trust_remote_code=trust_remote_code)
