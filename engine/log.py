"""Shows the engine's log in programs that have not set up logging themselves. Called when an engine is built."""

import logging
import sys

from ..protocol import envs


def configure_logging() -> None:
    """Gives the logger `corespan` a handler on standard error and the level VLLM_LOGGING_LEVEL.

    Does nothing where the program has handlers of its own or no standard error, and nothing the second time.
    """
    logger = logging.getLogger("corespan")
    if logger.handlers or logging.getLogger().handlers or sys.stderr is None:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(envs.VLLM_LOGGING_LEVEL)
