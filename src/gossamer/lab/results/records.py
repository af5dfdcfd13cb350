"""Run files and the tables made of them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gossamer.lab.json_files import read_object
from gossamer.settings import with_current_names

Record = dict[str, Any]
# What every record of a comparison has, whenever it was made.
_OF_A_RUN = (
    *("tier", "net", "data", "method", "sparsity", "asked_sparsity", "seed", "epochs", "settings", "hardware"),
    *("accuracy", "validation_accuracy", "train_loss"),
)
_TEXT, _NUMBER, _OPTIONAL = (str,), (int, float), (int, float, type(None))
_KINDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("tier", "net", "data", "method"), _TEXT),
        **dict.fromkeys(("sparsity", "asked_sparsity", "seed", "epochs", "accuracy"), _NUMBER),
        **dict.fromkeys(("validation_accuracy", "train_loss"), _OPTIONAL),
    }
)
# What settings that came later were in the records from before them, where their default changed since.
BEFORE: Mapping[str, Any] = MappingProxyType(
    {"pruned_grad_scale": 1.0, "rate": None, "mask_decay": 0.0, "mask_decay_cap": 0.0}
)


def read(folder: Path) -> list[Record]:
    return [read_record(path) for path in sorted(folder.glob("*.json"))]


def read_record(path: Path, needed: Sequence[str] = ()) -> Record:
    """One record; it has all that is `needed`, or an error names the file."""
    record = read_object(path, expected="the record of a run", remedy=": delete it")
    if lacking := [name for name in needed if name not in record]:
        raise ValueError(f"expected the record of a run in {path}, got one without {', '.join(lacking)}: delete it")
    return _with_current_names(record)


def _with_current_names(record: Record) -> Record:
    """Older records have settings under their former names."""
    parts = {
        key: with_current_names(record[key]) for key in ("settings", "settled") if isinstance(record.get(key), dict)
    }
    return {**with_current_names(record), **parts}


def read_races(folder: Path) -> list[Record]:
    """The records of a comparison, or of several."""
    return [read_run(path) for path in sorted(folder.glob("*.json"))]


def read_run(path: Path) -> Record:
    """One record of a comparison; it has all that the tables ask for."""
    record = read_record(path, _OF_A_RUN)
    if not isinstance(record["settings"], dict):
        raise ValueError(f"expected the record of a run in {path}, got one whose settings are no table: delete it")
    wrong = [name for name, kinds in _KINDS.items() if not isinstance(record[name], kinds) or record[name] is True]
    if wrong:
        told = ", ".join(f"{name} = {record[name]!r:.40}" for name in wrong)
        raise ValueError(f"expected the record of a run in {path}, got one with {told}: delete it")
    return record


def make_folder(path: Path) -> None:
    """Before anything is trained: a folder that records can be written into."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"expected a folder for records, got {path}, which is a file: choose another name (--out)")
    path.mkdir(parents=True, exist_ok=True)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(cells) for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def mean_and_spread(values: Sequence[float]) -> str:
    """Of one value there is no spread."""
    mean = f"{statistics.mean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def defaults_of(record: Record) -> dict[str, float | None]:
    """What a run had of the settings whose default has changed since."""
    then = {"mask_lr": 0.01, **BEFORE}  # in BEFORE it would be that of other methods, too
    return {
        name: record.get(name, then[name]) for name in ("mask_lr", "mask_decay", "mask_decay_cap", "pruned_grad_scale")
    }
