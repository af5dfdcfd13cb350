"""Accuracy against sparsity, a line a method, from the records of a comparison. Needs matplotlib."""

import importlib.util
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gossamer.methods import find
from gossamer.results import Record


@dataclass(frozen=True)
class Line:
    """One method: mean and spread of the test accuracy at each sparsity."""

    method: str
    sparsity: tuple[float, ...]  # in percent, rising
    accuracy: tuple[float, ...]
    spread: tuple[float, ...]


def check() -> None:
    """Raise an error that says what to do where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("a plot needs matplotlib, which is not installed: pip install 'gossamer[plot]'")


def lines(records: Sequence[Record]) -> list[Line]:
    """What is drawn, in the order in which methods first appear."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        found[record["method"]][100 * record["asked_sparsity"]].append(record["accuracy"])
    drawn = []
    for method, points in found.items():
        at = sorted(points)
        spread = [statistics.stdev(points[each]) if len(points[each]) > 1 else 0.0 for each in at]
        mean = [statistics.mean(points[each]) for each in at]
        drawn.append(Line(method, tuple(at), tuple(mean), tuple(spread)))
    return drawn


def accuracy_against_sparsity(records: Sequence[Record], path: Path) -> None:
    """Draw the records into a file; what kind of file its name says."""
    check()
    from matplotlib.figure import Figure  # optional

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for line in lines(records):
        if line.method == "dense":
            axes.axhline(line.accuracy[0], color="black", linewidth=1, linestyle=":", label=find("dense").title)
            continue
        style = "--" if find(line.method).structured else "-"
        axes.errorbar(
            line.sparsity, line.accuracy, yerr=line.spread, linestyle=style, marker="o", markersize=3, capsize=2,
            linewidth=2 if line.method == "scl" else 1, label=find(line.method).title,
        )  # fmt: skip
    first = records[0]
    axes.set_xlabel("zeros, %")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"{first['net']} on {first['data']}, {first['epochs']} epochs, mean ± standard deviation over seeds")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
