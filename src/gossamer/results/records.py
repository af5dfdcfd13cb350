"""Run files and the tables made of them."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(folder: Path) -> list[Record]:
    return [read_record(path) for path in sorted(folder.glob("*.json"))]


def read_record(path: Path) -> Record:
    try:
        record = json.loads(path.read_text())
    except (RecursionError, ValueError) as error:
        raise ValueError(f"expected the record of a run in {path}, got something else ({error}): delete it") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected the record of a run in {path}, got a {type(record).__name__}: delete it")
    return record


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(cells) for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def mean_and_spread(values: Sequence[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {spread:.2f}"
