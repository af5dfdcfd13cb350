"""Run files and the tables made of them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gossamer._json import read_object

Record = dict[str, Any]
# What settings that came later were in the records from before them, where their default changed since.
BEFORE: Mapping[str, Any] = MappingProxyType({"removed_gradient": 1.0, "rate": None})


def read(folder: Path) -> list[Record]:
    return [read_record(path) for path in sorted(folder.glob("*.json"))]


def read_record(path: Path) -> Record:
    return read_object(path, expected="the record of a run", remedy=": delete it")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(cells) for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def mean_and_spread(values: Sequence[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {spread:.2f}"


def removed_gradient_of(record: Record) -> float:
    """The share of their gradient that removed weights followed in a run."""
    return float(record.get("removed_gradient", BEFORE["removed_gradient"]))
