"""Keeps descriptors 0, 1 and 2 taken. Engines and commands call it before they open anything.

In a program started with one of them closed, the next socket or file would get its number, and what a child process or
a library writes to "standard error" would go there.
"""

import os


def fill_standard_descriptors() -> None:
    """Opens /dev/null in the place of each standard stream that is closed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
