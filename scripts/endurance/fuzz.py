"""Fuzzes the bridge's decoder under atheris, which steers by the branches of the code that the bytes reach.

The first byte of an input says which kind of message it is for; the rest is cut into frames. Anything but ProtocolError
is a find: libFuzzer then writes the input to a file beside the corpus, and running on that file shows it again. Further
options are libFuzzer's own.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

FRAMES_SEPARATOR = b"\xc1\xc1"  # a byte that msgpack never uses
DEFAULT_RUNS = 200_000
RSS_LIMIT_MB = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=DEFAULT_RUNS, help="inputs to try, after those of the corpus")
    parser.add_argument(
        "--corpus", type=Path, default=ROOT / "build" / "fuzz", help="where inputs worth keeping are kept"
    )
    arguments, others = parser.parse_known_args()
    try:
        import atheris
    except ImportError:
        sys.exit('atheris is not installed (it has wheels for few versions of Python): pip install "corespan[fuzz]"')
    with atheris.instrument_imports(include=["corespan.protocol"]):
        import fuzzing

    def try_input(content: bytes) -> None:
        if content:
            fuzzing.is_accepted(content[0] % len(fuzzing.DECODERS), list(content[1:].split(FRAMES_SEPARATOR)))

    corpus = arguments.corpus
    corpus.mkdir(parents=True, exist_ok=True)
    for which, frames in enumerate(fuzzing.FRAMES):
        (corpus / f"message-{which}").write_bytes(bytes([which]) + FRAMES_SEPARATOR.join(frames))
    options = [
        f"-runs={arguments.runs}",
        f"-rss_limit_mb={RSS_LIMIT_MB}",
        "-max_len=16384",
        f"-artifact_prefix={corpus}-",
    ]
    atheris.Setup([sys.argv[0], *options, *others, str(corpus)], try_input)
    atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
