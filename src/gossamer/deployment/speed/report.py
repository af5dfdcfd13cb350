"""The measured speed as plain values, with a table, JSON and a plot."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from gossamer.deployment.runtime.records import Line
from gossamer.deprecation import renamed
from gossamer.report.style import ACCENT, DENSE, MATPLOTLIB

#: The minimum speed-up that counts as a gain; less is noise on a shared machine.
GAIN = 1.03
#: Above this ratio of the third to the first quartile, the machine counts as busy.
NOISY = 1.5


@dataclass(frozen=True)
class Row:
    """One engine in one case. Times are in milliseconds; None if the engine did not run."""

    engine: str
    kind: str
    median: float | None
    lower: float | None
    """First quartile."""
    upper: float | None
    """Third quartile."""
    memory: int | None
    """Bytes of weights (with indices) and buffers, if the engine reports them; without activations."""
    difference: float | None
    """Largest difference from torch, relative to the largest output."""
    note: str = ""
    layers: tuple[Line, ...] = ()
    """What the engine runs for each operation, if it says so."""


@dataclass(frozen=True)
class Case:
    """All engines at one batch size and number of threads."""

    batch: int
    threads: int
    rows: tuple[Row, ...]
    half: float | None
    """Milliseconds of our runtime with a density of one half in each layer, for the break-even."""
    density: float
    """Fraction of the dense FLOPs that the network needs."""

    @property
    def best_dense(self) -> Row | None:
        ran = [row for row in self.rows if row.kind == "dense" and row.median is not None]
        return min(ran, key=lambda row: row.median or 0.0, default=None)

    @property
    def ours(self) -> Row | None:
        return next((row for row in self.rows if row.kind == "sparse" and row.median is not None), None)

    @property
    def speedup(self) -> float | None:
        """The speed-up over the fastest dense float32 engine of this case."""
        best, ours = self.best_dense, self.ours
        return best.median / ours.median if best and ours and best.median and ours.median else None

    def ratio(self, row: Row) -> float | None:
        best = self.best_dense
        return best.median / row.median if best and best.median and row.median else None

    @property
    def break_even(self) -> float | None:
        """The FLOPs sparsity above which our runtime is faster than the best dense engine.

        It is on the line through two measured points, this network and the one with a density of one half. It is 0 if
        the line is always faster, and None without two points.
        """
        best, ours = self.best_dense, self.ours
        if not (best and ours and best.median and ours.median and self.half) or not self.density < 0.5:
            return None
        slope = (self.half - ours.median) / (0.5 - self.density)
        if slope <= 0:
            return None
        return min(1.0, max(0.0, 1 - (self.density + (best.median - ours.median) / slope)))

    @property
    def faster_int8(self) -> list[Row]:
        """Dense int8 engines that are faster than our runtime, in float32 or int8."""
        ours = min((row.median for row in self.rows if row.kind.startswith("sparse") and row.median), default=0.0)
        return [row for row in self.rows if row.kind == "int8" and row.median and row.median < ours]

    @property
    def busy(self) -> bool:
        """Whether the quartiles are so far apart that other programs must have been running."""
        spreads = [row.upper / row.lower for row in self.rows if row.lower and row.upper]
        return max(spreads, default=1.0) > NOISY

    @property
    def fastest(self) -> Row | None:
        """The fastest engine of all, with numbers of any kind."""
        return min(
            (row for row in self.rows if row.median is not None), key=lambda row: row.median or 0.0, default=None
        )

    @property
    def _fastest(self) -> str:
        """The part of the verdict on engines with int8, if there are any: they compete with each other and with
        float32, with other outputs."""
        fastest = self.fastest
        if fastest is None or not any("int8" in row.kind and row.median for row in self.rows):
            return ""
        ours = fastest.kind.startswith("sparse")
        others = [row for row in self.rows if row.kind.startswith("sparse") != ours and row.median]
        rival = min(others, key=lambda row: row.median or 0.0)
        ratio = (rival.median or 0.0) / (fastest.median or 1.0)
        return f"; the fastest of all is {fastest.engine}, {ratio:.2f} times as fast as {rival.engine}"

    @property
    def verdict(self) -> str:
        best, ours, gain = self.best_dense, self.ours, self.speedup
        if best is None or ours is None or gain is None:
            return "nothing to compare with"
        verdict = f"{gain:.2f} times as fast as {best.engine}" if gain >= GAIN else f"no gain over {best.engine}"
        verdict += self._fastest
        if self.break_even is not None:
            verdict += f"; break-even at {self.break_even:.0%} of FLOPs saved"
        return verdict + ("; the machine was busy, measure again" if self.busy else "")


@dataclass(frozen=True)
class SpeedReport:
    """A network's speed on one machine; ``print`` shows the tables."""

    network: str
    weights: int
    nonzeros: int
    flops_dense: int
    flops_sparse: int
    dense_file: int
    """Bytes of the network as plain safetensors."""
    sparse_file: int
    """Bytes of the sparse file of ``gossamer.save``."""
    cases: tuple[Case, ...]
    about: dict[str, Any]
    """Versions, hardware, commit, settings."""

    connections = renamed("connections", "nonzeros")

    @property
    def sparsity(self) -> float:
        return 1 - self.nonzeros / max(1, self.weights)

    @property
    def flops_sparsity(self) -> float:
        return 1 - self.flops_sparse / max(1, self.flops_dense)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        compared = [(self._where(case), case.speedup) for case in self.cases]
        faster = [f"{gain:.2f} times as fast at {where}" for where, gain in compared if gain and gain >= GAIN]
        slower = [f"at {where}" for where, gain in compared if gain and gain < GAIN]
        head = f"{self.network} with {self.sparsity:.1%} zeros"
        if not faster and not slower:
            return f"{head} was compared with no dense engine."
        engines = dict.fromkeys(case.best_dense.engine for case in self.cases if case.best_dense)
        rival = f"the best dense float32 engine ({' or '.join(engines)})"
        text = f"{head} runs {_listed(faster)} as {rival}" if faster else f"{head} runs no faster than {rival}"
        if slower:
            text += f", and no faster {_listed(slower)}" if faster else f" {_listed(slower)}"
        text += f", on {self.about.get('hardware', 'this machine')}"
        if len(self._threads) == 1:
            text += f", with {_counted(self._threads[0])}"
        by_int8 = [self._where(case) for case in self.cases if case.faster_int8]
        if by_int8:
            text += f"; dense int8 is faster still at {_listed(by_int8)}, with other outputs"
        return text + ("; the machine was busy, measure again." if any(case.busy for case in self.cases) else ".")

    @property
    def _threads(self) -> list[int]:
        return sorted({case.threads for case in self.cases})

    def _where(self, case: Case) -> str:
        return f"batch {case.batch}" + (f" with {_counted(case.threads)}" if len(self._threads) > 1 else "")

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values |= {"sparsity": self.sparsity, "flops_sparsity": self.flops_sparsity, "sentence": self.sentence}
        for case, written in zip(self.cases, values["cases"], strict=True):
            best = case.best_dense
            written["best_dense"] = None if best is None else best.engine
            written |= {"speedup": case.speedup, "break_even": case.break_even, "verdict": case.verdict}
        return values

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    def __rich__(self) -> Group:
        head = (
            f"{self.network}: {self.nonzeros:,} of {self.weights:,} weights ({self.sparsity:.1%} zeros), "
            f"{self.flops_sparsity:.1%} of FLOPs saved; on disk {_bytes(self.dense_file)} dense, "
            f"{_bytes(self.sparse_file)} sparse"
        )
        parts: list[Table | Text] = [Text(head)]
        for case in self.cases:
            parts += [_table(case), *map(Text, _remarks(case))]
        return Group(*parts, Text(self.sentence))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=120)
        console.print(self)
        shown = console.file
        assert isinstance(shown, io.StringIO)
        return shown.getvalue()


def _counted(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _table(case: Case) -> Table:
    title = f"batch {case.batch}, {_counted(case.threads)}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for index, name in enumerate(("engine", "ms", "quartiles", "speed-up", "memory", "error")):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in case.rows:
        ratio = case.ratio(row)
        table.add_row(
            row.engine,
            "–" if row.median is None else f"{row.median:.3g}",
            "–" if row.lower is None or row.upper is None else f"{row.lower:.3g} – {row.upper:.3g}",
            "–" if ratio is None else f"{ratio:.2f}",
            "–" if row.memory is None else _bytes(row.memory),
            "–" if row.difference is None else f"{row.difference:.0e}",
        )
    return table


def _remarks(case: Case) -> list[str]:
    """Notes that do not fit a column, then the verdict."""
    return [*(f"{row.engine}: {row.note}" for row in case.rows if row.note), f"{case.verdict}\n"]


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def plot(report: SpeedReport, path: Path) -> None:
    """Bars with quartiles, one panel per case. Needs matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("expected matplotlib for the plot, got none: pip install matplotlib") from error
    with rc_context(dict(MATPLOTLIB)):
        _draw(report, Figure(figsize=(4.5 * len(report.cases), 3.2), layout="constrained"), path)


def _draw(report: SpeedReport, figure: Any, path: Path) -> None:
    cases: Sequence[Case] = report.cases
    colours = {"dense": DENSE, "int8": "#d9c27e", "sparse": ACCENT, "sparse int8": "#8fb8a8"}
    for index, case in enumerate(cases):
        axes = figure.add_subplot(1, len(cases), index + 1)
        rows = [row for row in case.rows if row.median is not None]
        middles = [row.median or 0.0 for row in rows]
        below = [(row.median or 0.0) - (row.lower or 0.0) for row in rows]
        above = [(row.upper or 0.0) - (row.median or 0.0) for row in rows]
        axes.barh([row.engine for row in rows], middles, xerr=[below, above], color=[colours[r.kind] for r in rows])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        gain = case.speedup
        verdict = "" if gain is None else f", {gain:.1f} ×" if gain >= GAIN else ", no gain"
        axes.set_title(f"batch {case.batch}, threads {case.threads}{verdict}", fontsize=9)
    figure.suptitle(f"{report.network}, {report.sparsity:.1%} zeros", fontsize=10)
    figure.savefig(path)
