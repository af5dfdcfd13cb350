"""Plots of records: accuracy against sparsity, a line a method; learning curves of map fitting. Need matplotlib."""

import importlib.util
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.methods import find
from gossamer.results.exhibits import best_of, rates_of
from gossamer.results.races import labels
from gossamer.results.records import Record

_MARKERS = "osD^v<>PXp"  # with the ten colours twice, so that each of twenty lines has its own pair


@dataclass(frozen=True)
class Line:
    """One method, or one of its settings: mean and spread of the test accuracy at each sparsity."""

    method: str
    label: str
    sparsity: tuple[float, ...]  # in percent, rising
    accuracy: tuple[float, ...]
    spread: tuple[float, ...]


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check(path: Path | None = None) -> None:
    """Raise an error that says what to do where matplotlib is not installed, or knows no such kind of file."""
    if not can_draw():
        raise ImportError("a plot needs matplotlib, which is not installed: pip install 'gossamer[plot]'")
    if path is not None:
        from matplotlib.figure import Figure  # optional

        kinds = Figure().canvas.get_supported_filetypes()
        if path.suffix.removeprefix(".").lower() not in kinds:
            raise ValueError(f"expected a plot whose name ends in one of {', '.join(kinds)}, got {path.name!r}")


def lines(records: Sequence[Record]) -> list[Line]:
    """What is drawn, in the order in which methods first appear."""
    found: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for label, record in zip(labels(records), records, strict=True):
        found[record["method"], label][100 * record["asked_sparsity"]].append(record["accuracy"])
    drawn = []
    for (method, label), points in found.items():
        at = sorted(points)
        spread = [statistics.stdev(points[each]) if len(points[each]) > 1 else 0.0 for each in at]
        mean = [statistics.mean(points[each]) for each in at]
        drawn.append(Line(method, label, tuple(at), tuple(mean), tuple(spread)))
    return drawn


def accuracy_against_sparsity(records: Sequence[Record], path: Path) -> None:
    """Draw the records into a file; what kind of file its name says. Whole filters have a panel of their own."""
    check()
    from matplotlib.figure import Figure  # optional

    drawn = lines(records)
    dense = [line for line in drawn if line.method == "dense"]
    panels = [
        (title, own)
        for title, structured in (("single connections", False), ("whole filters", True))
        if (own := [line for line in drawn if find(line.method).structured is structured and line not in dense])
    ] or [("", [])]
    figure = Figure(figsize=(8 * len(panels), 7), layout="constrained")
    for axes, (title, own) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        at = sorted({each for line in own for each in line.sparsity})
        if len(at) == 1:
            _draw_rows(axes, dense, own)
            title = f"{title}, {at[0]:g} % zeros"
        else:
            _draw(axes, dense, own)
        axes.set_title(title)
    first = records[0]
    run = f"{first['tier']}: {first['net']} on {first['data']}, {first['epochs']} epochs"
    figure.suptitle(f"{run}, mean ± standard deviation over seeds")
    _write(figure, path)


def map_fitting_curves(records: Sequence[Record], path: Path) -> None:
    """The figure of the paper: errors by estimator, normalised (solid) and raw (dashed), mean over seeds.

    At the rate of the table, 0.1 and constant, and at the best rate of each on a cosine.
    """
    check()
    from matplotlib.figure import Figure  # optional

    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = zip(figure.subplots(1, 2, sharey=True), ("constant", "cosine"), strict=True)
    for axes, anneal in panels:
        for number, record in enumerate(records):
            for scale, style in (("batch", "-"), ("none", "--")):
                groups = rates_of(record, scale, anneal)
                chosen = groups[0.1] if anneal == "constant" else best_of(groups)
                curve = [statistics.mean(errors) for errors in zip(*(each["curve"] for each in chosen), strict=True)]
                steps = [record["steps"] * point / len(curve) for point in range(len(curve))]
                label = f"{chosen[0]['fit']['estimator']}, {'normalised' if scale == 'batch' else 'raw'}"
                axes.plot(steps, curve, style, color=f"C{number}", linewidth=1.5, label=label)
        axes.set_title("mask rate 0.1, constant" if anneal == "constant" else "best mask rate of each, cosine to zero")
        axes.set_yscale("log")
        axes.set_xlabel("steps")
        axes.grid(alpha=0.3)
        axes.set_ylabel("mean squared error" if anneal == "constant" else "")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _write(figure, path)


def _wrapped(line: Line) -> str:
    """Long names would leave no room for the plot."""
    return textwrap.fill(line.label, 60, break_on_hyphens=False)


def _write(figure: Any, path: Path) -> None:
    """The same records give the same file."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "gossamer", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_rows(axes: Any, dense: Sequence[Line], own: Sequence[Line]) -> None:
    """At a single sparsity there are no lines to draw: a row a method, the best on top."""
    for line in dense:
        axes.axvline(line.accuracy[0], color="black", linewidth=1, linestyle=":", label=_wrapped(line))
    ranked = sorted(own, key=lambda line: line.accuracy[0])
    for place, line in enumerate(ranked):
        ours = line.method == "scl"
        style = {"color": "C0" if ours else "C7", "linewidth": 2.5 if ours else 1}
        axes.errorbar(line.accuracy, [place], xerr=line.spread, marker="o", markersize=5, capsize=3, **style)
    axes.set_yticks(range(len(ranked)), [_wrapped(line) for line in ranked])
    axes.set_xlabel("test accuracy, %")
    axes.grid(alpha=0.3)
    if dense:
        axes.legend(fontsize="small", loc="upper left", frameon=False)


def _draw(axes: Any, dense: Sequence[Line], own: Sequence[Line]) -> None:
    """The axis of sparsity shows the logarithm of what is left, as 90 and 95 % are farther apart than 50 and 55 %."""
    for line in dense:
        axes.axhline(line.accuracy[0], color="black", linewidth=1, linestyle=":", label=_wrapped(line))
    for number, line in enumerate(own):
        axes.errorbar(
            [100 - each for each in line.sparsity],
            line.accuracy,
            yerr=line.spread,
            linestyle="-" if number < 10 else "--",
            marker=_MARKERS[number % len(_MARKERS)],
            color=f"C{number % 10}",
            markersize=4,
            capsize=2,
            linewidth=2.5 if line.method == "scl" else 1,
            label=_wrapped(line),
        )
    at = sorted({each for line in own for each in line.sparsity})
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_xticks([100 - each for each in at], [f"{each:g}" for each in at])
    axes.minorticks_off()
    axes.set_xlabel("zeros, %")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False)
