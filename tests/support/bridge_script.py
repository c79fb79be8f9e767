"""A user's program, for tests of process life: builds a client over the fake core, prints what it generates.

Imported by the scripts that tests write; a script passes the FIFO or file it wants to be seen through as an argument.
"""

from typing import Any

from bridge import Bridge, request

__all__ = ["Bridge", "generate_once", "request"]


def generate_once(kind: str = "sync_mp", **options: Any) -> list[int]:
    bridge = Bridge(kind, **options)
    tokens = bridge.generate(request("only"))["only"]
    bridge.close()
    return tokens
