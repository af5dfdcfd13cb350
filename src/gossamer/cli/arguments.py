"""Kinds of arguments that several commands have, with the names that their help shows."""

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import arg

RecipeName = Annotated[tyro.conf.Positional[str], arg(metavar="RECIPE")]
Assignments = Annotated[
    tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], arg(metavar="KEY=VALUE [KEY=VALUE ...]")
]
Folder = Annotated[Path, arg(metavar="DIR")]
OptionalFolder = Annotated[Path | None, arg(metavar="DIR")]
OptionalFile = Annotated[Path | None, arg(metavar="FILE")]
NetworkFile = Annotated[tyro.conf.Positional[Path], arg(metavar="FILE")]
OptionalName = Annotated[str | None, arg(metavar="NAME")]
OptionalNumber = Annotated[int | None, arg(metavar="INT")]


def at_home(path: Path) -> Path:
    """The path with ~ resolved, which a shell leaves alone in --out=~/runs."""
    return path.expanduser()


def joined(given: tuple[tuple[str, ...], ...]) -> list[str]:
    """All assignments of an option that can be given several times."""
    return [assignment for several in given for assignment in several]
