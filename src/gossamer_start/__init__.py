"""The command `gossamer` before the package is imported.

Importing the package imports torch, which takes seconds. Ctrl-C during that time gives one line and exit code 130
instead of a traceback from torch. Streams that the caller has closed (`2>&-`) are opened first; otherwise the next file
would get their number, and the messages of C libraries.
"""

import contextlib
import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Start the command line."""
    open_closed_streams()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a background process may ignore interrupts, and keeps doing so
        signal.signal(signal.SIGINT, _leave)
    from gossamer.cli import main as carry_out

    signal.signal(signal.SIGINT, before)
    carry_out()


def open_closed_streams() -> None:
    """Connect closed standard streams to the null device."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once: an exception would pass through imports, which may swallow or replace it."""
    with contextlib.suppress(OSError):
        os.write(2, b"gossamer: stopped while it was starting\n")
    os._exit(130)
