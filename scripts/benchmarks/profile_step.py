"""Where the time of a decode step goes, in process, at several numbers of sequences.

The parts of the core's step: `schedule`; `prepare` (the batch brought up to date, the model's inputs built); `model`
(embedding and layers); `sample` (logits, tokens); `update` (the scheduler takes the tokens in). `output` is the shell's
part and no part of the core's step. `native` is the time within calls of the native kernels, and `bookkeeping` whatever
else the core's step consists of: all of its Python, numpy and torch. Milliseconds, medians over steps.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

from stepped_engine import SteppedEngine
from subjects import print_columns

from corespan.core.kernels import library
from corespan.core.profile_ranges import record_ranges

PARTS = ("schedule", "prepare", "model", "sample", "update")
COLUMNS = (*PARTS, "core_step", "native", "bookkeeping", "output")


class Clock:
    """Seconds in each range of the step under way, and in the native kernels."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def watch_native_calls(self) -> None:
        run = library.Recording.run

        def timed(recording: library.Recording, first: int = 0) -> None:
            with self.range("native"):
                run(recording, first)

        library.Recording.run = timed

    def take_step(self, engine: SteppedEngine) -> dict[str, float]:
        self.seconds.clear()
        with self.range("whole"):
            engine.step()
        seconds = self.seconds
        seconds["core_step"] = seconds["schedule"] + seconds["execute"] + seconds["update"]
        seconds["bookkeeping"] = seconds["core_step"] - seconds["native"]
        seconds["output"] = seconds["whole"] - seconds["core_step"]
        return dict(seconds)


def main() -> None:
    options = parse_options()
    if not library.is_available():
        raise SystemExit("the native kernels are not built, or switched off: nothing to tell their time by")
    limits = {"max_num_seqs": max(options.sequences), "max_model_len": 2 * options.context + options.steps + 256}
    engine = SteppedEngine(options.model, **limits | options.engine_args)
    clock = Clock()
    clock.watch_native_calls()
    record_ranges(clock.range)
    rows = []
    for count in options.sequences:
        engine.fill(count, options.context, options.steps + 1)
        engine.step()
        steps = [clock.take_step(engine) for _ in range(options.steps)]
        engine.clear()
        milliseconds = {name: 1e3 * statistics.median(step[name] for step in steps) for name in COLUMNS}
        share = statistics.median(step["bookkeeping"] / step["core_step"] for step in steps)
        row = {"sequences": count} | {name: round(value, 3) for name, value in milliseconds.items()}
        rows.append(row | {"bookkeeping_share": round(share, 4)})
        print(json.dumps(rows[-1]), flush=True)
    print_columns([list(rows[0]), *([f"{value:,}" for value in row.values()] for row in rows)])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/profile_step", description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="[%(default)s]")
    add("--sequences", nargs="+", type=int, default=[1, 64, 256], metavar="N", help="[1 64 256]")
    add("--context", type=int, default=128, metavar="N", help="tokens in each sequence's prompt [%(default)s]")
    add("--steps", type=int, default=50, metavar="N", help="steps of each kind [%(default)s]")
    add("--engine-args", type=json.loads, default={}, metavar="JSON", help='such as {"quantization": "int8"}')
    return parser.parse_args()


if __name__ == "__main__":
    main()
