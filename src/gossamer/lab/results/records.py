"""The records of runs, other result files, and the tables made of them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gossamer.lab.json_files import read_object
from gossamer.lab.training.result import check_result, with_current_keys
from gossamer.lab.training.run import Run

Record = dict[str, Any]
_NEEDED = ("run_id", "config", "diverged", "accuracy", "validation_accuracy", "sparsity", "train_loss")
_OF_ONE: Mapping[str, Any] = MappingProxyType(
    {"diverged": False, "train_loss": None, "accuracy": None, "validation_accuracy": None}
)
"""What the result of a run that was trained alone may lack: it has not diverged, and may have a perplexity instead."""
_KINDS: Mapping[str, type] = MappingProxyType(
    dict.fromkeys(("run_id", "tier", "part"), str)
    | dict.fromkeys(("options", "hardware", "retired"), dict)
    | {"diverged": bool, "seed": int, "nonzeros_by_tensor": list, "input_nonzeros": list}
)


def read_record(path: Path, needed: Sequence[str] = ()) -> Record:
    """The record of a run of a batch, or the result of one that was trained alone; it has all that tables show, and
    what else is `needed`."""
    remedy = ": delete it to train the run again"
    record = with_current_keys(read_object(path, "the record of a run", remedy))
    alone = "mode" in record and "runs_in_batch" not in record
    shown = {**(_OF_ONE if alone else {}), **record}
    if lacking := [name for name in (*_NEEDED, *needed) if name not in shown]:
        raise ValueError(f"expected the record of a run in {path}, got one without {', '.join(lacking)}{remedy}")
    check_result(record, path)
    if wrong := [name for name, kind in _KINDS.items() if not isinstance(record.get(name, kind()), kind)]:
        got = ", ".join(f"{name} = {record[name]!r:.40}" for name in wrong)
        raise ValueError(f"expected the record of a run in {path}, got one with {got}{remedy}")
    try:
        config = Run.from_dict(record["config"]).to_dict()
    except ValueError as error:
        raise ValueError(f"expected the record of a run in {path}, got {error}{remedy}") from error
    return {**shown, "config": config}


def read_records(folder: Path, needed: Sequence[str] = ()) -> list[Record]:
    return [read_record(path, needed) for path in sorted(folder.glob("*.json"))]


def read_objects(folder: Path) -> list[dict[str, Any]]:
    """Result files that are not of runs."""
    return [read_object(path, remedy=": delete it") for path in sorted(folder.glob("*.json"))]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(cells) for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation; one value has no spread."""
    mean = f"{statistics.mean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def percent(records: Iterable[Record], key: str = "accuracy") -> list[float]:
    """An accuracy of the records, in percent; those without a validation set have no validation accuracy."""
    return [100.0 * record[key] for record in records if record[key] is not None]


def asked_sparsity(record: Record) -> float:
    return float(record["config"].get("sparsity") or 0.0)


def machine(record: Record) -> str:
    hardware = record["hardware"]
    return str(hardware.get("gpu", hardware.get("cpu", "CPU")))
