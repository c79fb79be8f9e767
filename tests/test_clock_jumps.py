"""The wall clock is set back and forth while engines run: tokens, deadlines and statistics do not care."""

import ast
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

import corespan
from corespan import SamplingParams

ROOT = Path(corespan.__file__).parent
MAY_ASK_THE_WALL_CLOCK = {
    "core/packed_cache.py",
    "engine/beam_search.py",
    "engine/text/renderer.py",
    "engine/outputs/tracing.py",
    "engine/metrics/prometheus.py",
    "engine/metrics/stats.py",
    "server",
}
"""To say when something was, or how old a file is; never to wait, nor to measure without bounds."""

YEAR = 365 * 24 * 3600.0


def asks_the_wall_clock(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in ("time", "time_ns")
        and isinstance(node.value, ast.Name)
        and node.value.id == "time"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def test_nothing_waits_by_the_wall_clock() -> None:
    files = [
        path
        for room in ("protocol", "shared", "client", "core", "engine", "server")
        for path in (ROOT / room).rglob("*.py")
    ]
    asking = {str(path.relative_to(ROOT)) for path in files if asks_the_wall_clock(path)}
    assert {path for path in asking if path.partition("/")[0] not in MAY_ASK_THE_WALL_CLOCK} <= MAY_ASK_THE_WALL_CLOCK


def test_an_engine_goes_on_through_clock_jumps_and_counts_no_negative_time(
    make_runner: Any, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in runner.generate(["one", "two", "three"], params)]
    jumps = itertools.cycle([0.0, -YEAR, YEAR, -3600.0, 0.0, 2 * YEAR])
    genuine = time.time
    monkeypatch.setattr(time, "time", lambda: genuine() + next(jumps))

    jumping = make_runner(disable_log_stats=False)
    outputs = jumping.generate(["one", "two", "three"], params)

    assert [output.outputs[0].token_ids for output in outputs] == expected
    for output in outputs:
        times = output.metrics
        assert times.first_token_latency >= 0
        assert 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    histograms = [metric for metric in jumping.call("get_metrics") if hasattr(metric, "sum")]
    assert histograms and all(histogram.sum >= 0 for histogram in histograms)
