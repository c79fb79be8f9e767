"""What the commands write to and read from: standard streams that may be closed or full, and a terminal's niceties."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator

QUOTES = '"""'


def write(text: str) -> None:
    """Writes to standard output at once. Raises OSError that names standard output, BrokenPipeError as it is."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(f"cannot write to standard output: {error.strerror or error}") from error


def write_all(pieces: Iterable[str]) -> None:
    """A text as it comes, and the end of its line."""
    for text in pieces:
        write(text)
    write("\n")


def note(text: str) -> None:
    """A line on standard error; lost where there is none."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def discard_output() -> None:
    """Sends what is still buffered for standard output nowhere, so that the interpreter's last flush cannot fail."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def is_terminal(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)
    return bool(isatty is not None and isatty())


@contextlib.contextmanager
def shown_while(text: str) -> Iterator[None]:
    """Shows a line on a terminal's standard error while the body runs, and takes it away afterwards."""
    if not is_terminal(sys.stderr):
        yield
        return
    sys.stderr.write(text)
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def enable_line_editing() -> None:
    """Editing, recall, and pastes of several lines as one text, for `input()` where there is GNU readline."""
    with contextlib.suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


def read_text(prompt: str, continued: str) -> str:
    """A line, or several: after a backslash at a line's end, and from \"\"\" to \"\"\". Raises EOFError at the end."""
    text = input(prompt)
    if text.lstrip().startswith(QUOTES):
        text = text.lstrip()[len(QUOTES) :]
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + input(continued)
        return text.rstrip()[: -len(QUOTES)].strip("\n")
    while text.endswith("\\"):
        text = text[:-1] + "\n" + input(continued)
    return text.strip()
