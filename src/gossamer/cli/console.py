"""Console output that tolerates closed streams, broken pipes and closed terminals."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@dataclass(frozen=True)
class Answer:
    """What a command answers to programs (--json)."""

    values: Any
    code: int = 0
    """Exit code."""

    def __str__(self) -> str:
        """As JSON, which has neither infinities nor NaN: they are null."""
        plain = json.loads(json.dumps(self.values, default=str), parse_constant=lambda name: None)
        return json.dumps(plain, indent=2, ensure_ascii=False)


class Bar(Protocol):
    """Live progress of a command."""

    def line(self, text: str) -> None:
        """Print a line of progress, above the bar if there is one."""

    def move(self, share: float, doing: str | None = None) -> None:
        """Show that this share of the work is done, from 0 to 1, and what is being done."""


def tell(sentence: object) -> None:
    """Write a line to stderr, or nothing if stderr cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        print(sentence, file=sys.stderr)


def put(text: object) -> None:
    """Write a text to stdout, or nothing if stdout cannot be written, as after `| head`."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def lines_to(console: Console) -> Callable[[str], None]:
    """A function that prints a line of progress and ignores a closed output."""

    def show(line: str) -> None:
        # On a broken pipe, rich raises SystemExit once and prints nothing afterwards.
        with contextlib.suppress(OSError, ValueError, SystemExit):
            console.print(line, highlight=False)

    return show


@contextlib.contextmanager
def live_bar(console: Console, doing: str) -> Iterator[Bar]:
    """A bar with the time left, for as long as the block runs. Without a terminal there are only the lines."""
    own = console if console.is_terminal and not console.quiet else Console(stderr=True, markup=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=own, transient=True, disable=not own.is_terminal) as progress:
        yield _LiveBar(console, progress, doing)


class _LiveBar:
    def __init__(self, console: Console, progress: Progress, doing: str) -> None:
        self.line = lines_to(console)
        self._progress, self._task = progress, progress.add_task(doing, total=1.0)

    def move(self, share: float, doing: str | None = None) -> None:
        with contextlib.suppress(OSError, ValueError, SystemExit):
            self._progress.update(self._task, completed=share, description=doing)
