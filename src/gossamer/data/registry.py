"""The data sets by name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from pathlib import Path

from gossamer.data.cifar import CIFAR10, CIFAR100, load_cifar
from gossamer.data.sets import ImageSet

__all__ = ["DATA_SETS", "DataEntry", "load", "names"]


@dataclasses.dataclass(frozen=True)
class DataEntry:
    """A registered set: how it is called, what it is, how it is read."""

    name: str
    description: str
    load: Callable[[Path | str | None], ImageSet]


DATA_SETS: tuple[DataEntry, ...] = (
    DataEntry(
        "cifar10", "50,000 + 10,000 colour images, 32 × 32, 10 classes", lambda r: load_cifar(CIFAR10, r)
    ),
    DataEntry(
        "cifar100", "50,000 + 10,000 colour images, 32 × 32, 100 classes", lambda r: load_cifar(CIFAR100, r)
    ),
)


def names() -> tuple[str, ...]:
    return tuple(entry.name for entry in DATA_SETS)


def load(name: str, root: Path | str | None = None) -> ImageSet:
    """Load a set by name from `root`, or from the first place that has it (see `gossamer.data.locate`)."""
    for entry in DATA_SETS:
        if entry.name == name:
            return entry.load(root)
    nearest = difflib.get_close_matches(name, names(), n=3) or names()
    raise ValueError(f"expected the name of a data set, got {name!r}; did you mean {', '.join(nearest)}?")
