"""Kinds of arguments that several commands have, with the names that their help shows."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import arg

from gossamer.lab.training.run import full_key

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


def keys_as_options(given: Sequence[str]) -> str | None:
    """What is wrong with a command line that has keys of a run as options: --epochs 3 for --set epochs=3."""
    own = {"train": ("out", "set", "debug"), "sweep": ("out", "grid", "set", "together", "device", "debug")}
    if not given or given[0] not in own:
        return None
    for number, argument in enumerate(given):
        name, _, value = argument.removeprefix("--").partition("=")
        key = full_key(name.replace("-", "_"))
        if not argument.startswith("--") or name in own[given[0]] or key is None:
            continue
        following = given[number + 1 : number + 2]
        told = value or next((each for each in following if not each.startswith("-")), "VALUE")
        option = "--grid" if given[0] == "sweep" and "," in told else "--set"
        return f"expected the keys of a run behind {option}, got --{name}: gossamer {given[0]} … {option} {key}={told}"
    return None


def nameless_folder(given: Sequence[str]) -> str | None:
    """What is wrong with a command line that has --out "", as of a shell's variable that is not set: as a path that is
    the current folder, which nobody has asked for."""
    if "--out=" not in given and ("--out", "") not in pairwise(given):
        return None
    return "expected a folder behind --out, got an empty name: write --out . for the current folder"


def joined(given: tuple[tuple[str, ...], ...]) -> list[str]:
    """All assignments of an option that can be given several times; nothing behind it, as of a shell's variable that
    is not set, would be a run that nobody has asked for."""
    if () in given:
        raise ValueError("expected key=value behind --set and --grid, got nothing: write it, or leave the option out")
    return [assignment for several in given for assignment in several]
