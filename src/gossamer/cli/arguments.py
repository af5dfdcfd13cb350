"""Argument types that several commands share, and checks of the command line before it is parsed."""

from collections.abc import Sequence
from itertools import pairwise
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
OptionalNetworkFile = Annotated[tyro.conf.Positional[Path | None], arg(metavar="FILE")]
AnyFile = Annotated[tyro.conf.Positional[Path], arg(metavar="PATH")]
OptionalName = Annotated[str | None, arg(metavar="NAME")]
OptionalNames = Annotated[tuple[str, ...] | None, arg(metavar="[NAME [NAME ...]]")]
OptionalNumber = Annotated[int | None, arg(metavar="INT")]
_REPEATABLE = ("--set", "--grid")


def at_home(path: Path) -> Path:
    """The path with ~ expanded, which shells do not do in --out=~/runs."""
    return path.expanduser()


def repeated(given: Sequence[str]) -> str | None:
    """The problem of a command line with a repeated option, of which only the last one would count; None if there is
    none."""
    names = [each.partition("=")[0].replace("_", "-") for each in given if each.startswith("--")]
    twice = next((name for name in names if names.count(name) > 1 and name not in _REPEATABLE), None)
    return f"expected {twice} once, got it {names.count(twice)} times: keep one of them" if twice else None


def nameless_folder(given: Sequence[str]) -> str | None:
    """The problem of a command line with --out "", as from an unset shell variable: it would mean the current
    folder."""
    if "--out=" not in given and ("--out", "") not in pairwise(given):
        return None
    return "expected a folder after --out, got an empty name: write --out . for the current folder"


def joined(given: tuple[tuple[str, ...], ...]) -> list[str]:
    """All assignments of a repeatable option. An option without assignments, as from an unset shell variable, is an
    error, because it would start the wrong run."""
    if () in given:
        raise ValueError("expected key=value after --set and --grid, got nothing: add it, or omit the option")
    return [assignment for several in given for assignment in several]
