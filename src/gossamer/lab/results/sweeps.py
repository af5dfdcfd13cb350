"""Sweeps: the settings in which runs differ, and their outcomes over seeds."""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from gossamer.lab.results.records import Record, mean_and_spread, percent

_NOT_SHOWN = {"seed", "device", "data_root"}


def sweep_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: one row for all seeds of the same settings, in the order of the records."""
    settings = [_flat(record["config"]) for record in records]
    names = [name for name in dict.fromkeys(name for each in settings for name in each) if name not in _NOT_SHOWN]
    differ = [name for name in names if len({json.dumps(each.get(name)) for each in settings}) > 1]
    groups: dict[str, list[tuple[dict[str, Any], Record]]] = defaultdict(list)
    for each, record in zip(settings, records, strict=True):
        groups[json.dumps([each.get(name) for name in names])].append((each, record))
    columns = differ or ["model"]
    rows = [[*(_text(group[0][0].get(name)) for name in columns), *_cells(group)] for group in groups.values()]
    return [*columns, "test", "validation", "zeros", "loss", "seeds"], rows


def _cells(group: Sequence[tuple[dict[str, Any], Record]]) -> list[str]:
    """The outcomes of runs; those that have diverged are only counted."""
    sound = [record for _, record in group if not record["diverged"]]
    lost = len(group) - len(sound)
    if not sound:
        return ["diverged", "–", "–", "–", str(lost)]
    held_out = percent(sound, "validation_accuracy")
    return [
        mean_and_spread(percent(sound)),
        mean_and_spread(held_out) if held_out else "–",
        f"{statistics.mean(record['sparsity'] for record in sound):.2%}",
        f"{statistics.mean(record['train_loss'] for record in sound):.3f}",
        f"{len(sound)} + {lost} diverged" if lost else str(len(sound)),
    ]


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Settings in one level, those of masks and networks by their names in full."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:g}" if isinstance(value, float) else " ".join(value) if isinstance(value, list) else str(value)
