"""The command `gossamer` before gossamer is there.

Whatever is imported of that package imports torch, which takes seconds. Somebody may press Ctrl-C in them: that is one
line and exit code 130, and not a traceback out of torch. And a stream that the caller has closed (`2>&-`) has to be
there first, or the next file that is opened takes its number, and gets what C libraries say.
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
    if before is signal.default_int_handler:  # what runs in the background may ignore interrupts, and goes on doing so
        signal.signal(signal.SIGINT, _leave)
    from gossamer.cli import main as carry_out

    signal.signal(signal.SIGINT, before)
    carry_out()


def open_closed_streams() -> None:
    """Connect standard streams that are closed to nothing."""
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
    """At once: an exception would pass through imports, which may swallow it or say something else."""
    with contextlib.suppress(OSError):
        os.write(2, b"gossamer: stopped while it was starting\n")
    os._exit(130)
