"""Plots of records: accuracy against sparsity, a line per method; learning curves of map fitting. Need matplotlib.

A method has the same color in every plot and on every page.
"""

import importlib.util
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.lab.results.comparisons import Block, Group, blocks_of
from gossamer.lab.results.exhibits import best_of, rates_of
from gossamer.lab.results.records import Record, percent
from gossamer.report.style import COLORS, MATPLOTLIB, SOFT, style_of

_COLLAPSED = 20.0  # points below the best at the same sparsity
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^"}
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_OF_VARIANTS = "osD^v<>PXp"  # several settings of a method have its color, and markers of their own


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
    """Raise an error with a remedy if matplotlib is not installed, or does not know this kind of file."""
    if not can_draw():
        raise ImportError("a plot needs matplotlib, which is not installed: pip install 'gossamer[plot]'")
    if path is not None:
        from matplotlib.figure import Figure  # optional

        kinds = Figure().canvas.get_supported_filetypes()
        if path.suffix.removeprefix(".").lower() not in kinds:
            raise ValueError(f"expected a plot whose name ends in one of {', '.join(kinds)}, got {path.name!r}")


@dataclass(frozen=True)
class Panel:
    """Methods that are compared with each other."""

    title: str
    dense: tuple[Line, ...]  # in every panel
    sparse: tuple[Line, ...]  # the best first, as in the table
    sparsity: tuple[float, ...]  # in percent, rising


def panels(records: Sequence[Record]) -> list[Panel]:
    """What is drawn."""
    blocks = blocks_of(records)
    dense = [group for block in blocks for group in block.groups if group.method == "dense"]
    found = [_panel(block, dense) for block in blocks]
    return [panel for panel in found if panel.sparse] or found


def _panel(block: Block, dense: Sequence[Group]) -> Panel:
    sparse = tuple(_line(group, block) for group in block.groups if group.method != "dense")
    at = sorted({each for line in sparse for each in line.sparsity})
    zeros = f"{at[0]:g} % zeros" if len(at) == 1 else ""
    title = ", ".join(filter(None, (block.kind, zeros, block.about_all)))
    return Panel(title, tuple(_line(group, block) for group in dense), sparse, tuple(at))


def _line(group: Group, block: Block) -> Line:
    points = {100 * at: percent(runs) for at, runs in sorted(group.runs.items())}
    mean = [statistics.mean(each) for each in points.values()]
    spread = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in points.values()]
    return Line(group.method, group.label(block.shared), tuple(points), tuple(mean), tuple(spread))


def accuracy_against_sparsity(records: Sequence[Record], tier: str, path: Path) -> None:
    """Draw the records into a file of the kind that its suffix names. Whole filters have a panel of their own."""
    drawn = panels(records)
    rows = max(len(panel.sparse) for panel in drawn)
    lines = any(len(panel.sparsity) != 1 for panel in drawn)
    with save_figure(path, width=8 * len(drawn), height=7 if lines else min(7, 2 + 0.5 * rows)) as figure:
        for axes, panel in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
            draw = _draw_rows if len(panel.sparsity) == 1 else _draw
            draw(axes, panel)
        config = records[0]["config"]
        run = f"{tier}: {config['model']} on {config['data']}, {config['epochs']} epochs"
        figure.suptitle(f"{run}, mean ± standard deviation over seeds")


def map_fitting_curves(records: Sequence[Record], path: Path) -> None:
    """The figure of the paper: errors by estimator, normalised (solid) and raw (dashed), mean over seeds.

    At the rate of the table, 0.1 and constant, and at the best rate of each on a cosine.
    """
    with save_figure(path, width=12, height=5) as figure:
        panels = zip(figure.subplots(1, 2, sharey=True), ("constant", "cosine"), strict=True)
        for axes, anneal in panels:
            for number, record in enumerate(records):
                for scale, style in (("batch", "-"), ("none", "--")):
                    groups = rates_of(record, scale, anneal)
                    chosen = groups[0.1] if anneal == "constant" else best_of(groups)
                    curve = [
                        statistics.mean(errors) for errors in zip(*(each["curve"] for each in chosen), strict=True)
                    ]
                    steps = [record["steps"] * point / len(curve) for point in range(len(curve))]
                    label = f"{chosen[0]['fit']['estimator']}, {'normalised' if scale == 'batch' else 'raw'}"
                    axes.plot(steps, curve, style, color=COLORS[number], linewidth=1.5, label=label)
            axes.set_title(
                "mask rate 0.1, constant" if anneal == "constant" else "best mask rate of each, cosine to zero"
            )
            axes.set_yscale("log")
            axes.set_xlabel("steps")
            axes.set_ylabel("mean squared error" if anneal == "constant" else "")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


@contextmanager
def save_figure(path: Path, *, width: float, height: float) -> Iterator[Any]:
    """A figure in the house style, which is written when the block ends."""
    check(path)
    from matplotlib import rc_context  # optional
    from matplotlib.figure import Figure

    with rc_context(dict(MATPLOTLIB)):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        _write(figure, path)


def _wrapped(text: str, width: int = 60) -> str:
    """Long names would leave no room for the plot."""
    return textwrap.fill(text, width, break_on_hyphens=False)


def _write(figure: Any, path: Path) -> None:
    """The same records give the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_rows(axes: Any, panel: Panel) -> None:
    """At a single sparsity there are no lines to draw: a row per method, the best on top."""
    for line in panel.dense:
        axes.axvline(line.accuracy[0], color=SOFT, linewidth=1, linestyle=":", label=_wrapped(line.label))
    ranked = panel.sparse[::-1]
    for place, line in enumerate(ranked):
        style = style_of(line.method)
        axes.errorbar(
            line.accuracy,
            [place],
            xerr=line.spread,
            marker=_MARKERS[style.symbol],
            markersize=5,
            capsize=3,
            color=COLORS[style.color],
            linewidth=2.5 if line.method == "scl" else 1,
        )
    axes.set_yticks(range(len(ranked)), [_wrapped(line.label, 50) for line in ranked])
    axes.set_ylim(-0.5, len(ranked) - 0.5)
    axes.set_title(_wrapped(panel.title, 40))  # half of the width is for the names of the rows
    axes.set_xlabel("test accuracy, %")
    axes.set_xlim(right=min(100.0, axes.get_xlim()[1]))
    if panel.dense:
        axes.legend(loc="upper left")


def lowest(panel: Panel) -> float:
    """The lower end of the axis. A line may leave it: one collapsed run would squeeze all others."""
    points = [each for line in panel.sparse for each in zip(line.sparsity, line.accuracy, line.spread, strict=True)]
    best = {sparsity: max(mean for at, mean, _ in points if at == sparsity) for sparsity, _, _ in points}
    return min(mean - spread for at, mean, spread in points if mean > best[at] - _COLLAPSED) - 0.5


def _draw(axes: Any, panel: Panel) -> None:
    """The axis shows the logarithm of the density, as 90 and 95 % are farther apart than 50 and 55 %."""
    for line in panel.dense:
        axes.axhline(line.accuracy[0], color=SOFT, linewidth=1, linestyle=":", label=_wrapped(line.label))
    for number, line in enumerate(panel.sparse):
        style = style_of(line.method)
        variant = sum(before.method == line.method for before in panel.sparse[:number])
        axes.errorbar(
            [100 - each for each in line.sparsity],
            line.accuracy,
            yerr=line.spread,
            linestyle=_DASHES[style.dash],
            marker=_OF_VARIANTS[(_OF_VARIANTS.index(_MARKERS[style.symbol]) + variant) % len(_OF_VARIANTS)],
            color=COLORS[style.color],
            markersize=4,
            capsize=2,
            linewidth=2.5 if line.method == "scl" else 1,
            label=_wrapped(line.label),
        )
    if panel.sparse:
        axes.set_ylim(bottom=lowest(panel), top=min(100.0, axes.get_ylim()[1]))
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_xticks([100 - each for each in panel.sparsity], [f"{each:g}" for each in panel.sparsity])
    axes.minorticks_off()
    axes.set_title(_wrapped(panel.title))
    axes.set_xlabel("zeros, %")
    axes.set_ylabel("test accuracy, %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
