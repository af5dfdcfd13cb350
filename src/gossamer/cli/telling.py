"""Saying something to somebody who may be gone: a closed stream, a pipe that nobody reads, a terminal that was shut."""

import contextlib
import sys
from collections.abc import Callable

from rich.console import Console


def tell(sentence: object) -> None:
    """A line on stderr, or nothing where that cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        print(sentence, file=sys.stderr)


def lines_to(console: Console) -> Callable[[str], None]:
    """What shows a line of progress, and lets training go on where nobody sees it."""

    def show(line: str) -> None:
        # At a broken pipe rich asks for the end of the program, and is quiet from then on.
        with contextlib.suppress(OSError, ValueError, SystemExit):
            console.print(line)

    return show
