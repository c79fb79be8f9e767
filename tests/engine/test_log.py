"""The log: seen in programs that set nothing up, left alone in those that do."""

import subprocess
import sys

from deadlines import DEADLINE

PROGRAM = """
import logging, sys
{setup}
from corespan.engine.log import configure_logging
configure_logging()
configure_logging()
logging.getLogger("corespan.engine").info("an event")
logging.getLogger("another").info("not ours")
"""


def stderr_of(setup: str, level: str) -> str:
    environment = {"PYTHONPATH": ":".join(sys.path), "VLLM_LOGGING_LEVEL": level}
    program = PROGRAM.format(setup=setup)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True, timeout=DEADLINE
    ).stderr


def test_events_are_shown_once_at_the_level_asked_for() -> None:
    shown = stderr_of("", "INFO")

    assert shown.count("an event") == 1
    assert "not ours" not in shown
    assert stderr_of("", "WARNING") == ""


def test_a_programs_own_logging_is_left_alone() -> None:
    assert stderr_of("logging.basicConfig(level='ERROR')", "INFO") == ""
    assert stderr_of("logging.basicConfig(level='INFO', format='mine %(message)s')", "INFO").count("mine an event") == 1
