"""The command `gossamer` before the package is imported.

Importing the package imports torch, which takes seconds. What needs none of it is answered here: help, and a command
that does not exist. Ctrl-C during the import gives one line and exit code 130 instead of a traceback from torch.
Streams that the caller has closed (`2>&-`) are opened first; otherwise the next file would get their number, and the
messages of C libraries.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import FrameType

HELP = Path(__file__).with_name("help.json")  # written by `python -m gossamer.cli.help_texts`


def main() -> None:
    """Start the command line."""
    open_closed_streams()
    code = answered(sys.argv[1:])
    if code is not None:
        sys.exit(code)
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a background process may ignore interrupts, and keeps doing so
        signal.signal(signal.SIGINT, _leave)
    from gossamer.cli import main as carry_out

    signal.signal(signal.SIGINT, before)
    carry_out()


def answered(given: Sequence[str]) -> int | None:
    """The exit code of a command line that asks for help or for an unknown command; None for all others."""
    helps: dict[str, str] = json.loads(HELP.read_text("utf-8"))
    command, *others = given or ("--help",)
    if command == "help":  # gossamer help train
        command, *others = *others[:1], "--help"
    if command in ("-h", "--help"):
        return _print(helps[""])
    if command.startswith("-"):
        return None
    if command not in helps:
        near = get_close_matches(command, [*filter(None, helps)], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(filter(None, helps))}."
        _print(f"gossamer: expected a command, got {command!r}: {hint} gossamer --help describes them\n", error=True)
        return 2
    return _print(helps[command]) if {"-h", "--help"} & {*others} else None


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


def _print(text: str, *, error: bool = False) -> int:
    """Write a text whatever the encoding of the terminal, and whether or not something reads it; returns 0."""
    stream = sys.stderr if error else sys.stdout
    with contextlib.suppress(OSError, ValueError):
        stream.write(text.encode(stream.encoding or "ascii", "replace").decode(stream.encoding or "ascii"))
        stream.flush()
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once: an exception would pass through imports, which may swallow or replace it."""
    with contextlib.suppress(OSError):
        os.write(2, b"gossamer: stopped while it was starting\n")
    os._exit(130)
