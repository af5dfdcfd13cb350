"""Console output that tolerates closed streams, broken pipes and closed terminals."""

import contextlib
import sys
from collections.abc import Callable

from rich.console import Console


def tell(sentence: object) -> None:
    """Write a line to stderr, or nothing if stderr cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        print(sentence, file=sys.stderr)


def lines_to(console: Console) -> Callable[[str], None]:
    """A function that prints a line of progress and ignores a closed output."""

    def show(line: str) -> None:
        # On a broken pipe, rich raises SystemExit once and prints nothing afterwards.
        with contextlib.suppress(OSError, ValueError, SystemExit):
            console.print(line)

    return show
