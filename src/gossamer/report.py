"""How sparse a model is: nonzeros, density and FLOPs of every tensor, as rows, table, JSON or LaTeX.

A report is a frozen dataclass. It counts the nonzeros of the parameters as they are now, so it needs no masks and works
on any model. It never prints by itself: ``print`` it, pass it to rich, or write ``to_json()`` to a file.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from gossamer.deprecation import renamed
from gossamer.flops import FLOPS_PER_MULTIPLY_ADD, positions
from gossamer.prunable import Weight, select
from gossamer.selectors import Selectors
from gossamer.sharding import whole


@dataclass(frozen=True)
class Row:
    """One prunable tensor, or the total of all tensors."""

    name: str
    type: str
    shape: tuple[int, ...]
    weights: int
    nonzeros: int
    flops_dense: int | None
    """FLOPs of one sample in the dense network, two per multiply-add; None without an example input."""
    flops_sparse: int | None
    """FLOPs of one sample if zeros are skipped."""
    features: int
    """Output features: rows of a matrix, filters, tokens, gate units."""
    dead_features: int
    """Output features whose weights are all zero."""

    connections = renamed("connections", "nonzeros")

    @property
    def density(self) -> float:
        return self.nonzeros / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class Report:
    """The result of ``gossamer.report``; ``print`` shows its table."""

    rows: tuple[Row, ...]

    @property
    def total(self) -> Row:
        dense = [row.flops_dense for row in self.rows if row.flops_dense is not None]
        sparse = [row.flops_sparse for row in self.rows if row.flops_sparse is not None]
        return Row(
            name="total",
            type="",
            shape=(),
            weights=sum(row.weights for row in self.rows),
            nonzeros=sum(row.nonzeros for row in self.rows),
            flops_dense=sum(dense) if dense else None,
            flops_sparse=sum(sparse) if sparse else None,
            features=sum(row.features for row in self.rows),
            dead_features=sum(row.dead_features for row in self.rows),
        )

    @property
    def weights(self) -> int:
        return self.total.weights

    @property
    def nonzeros(self) -> int:
        return self.total.nonzeros

    connections = renamed("connections", "nonzeros")

    @property
    def sparsity(self) -> float:
        """Fraction of the weights that are zero."""
        return 1.0 - self.total.density

    @property
    def flops_reduction(self) -> float | None:
        """Fraction of the FLOPs that zeros save; None without an example input or without dense FLOPs."""
        total = self.total
        if not total.flops_dense or total.flops_sparse is None:
            return None
        return 1.0 - total.flops_sparse / total.flops_dense

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "weights": self.weights,
            "nonzeros": self.nonzeros,
            "sparsity": self.sparsity,
            "flops_reduction": self.flops_reduction,
            "total": _as_dict(self.total),
            "rows": [_as_dict(row) for row in self.rows],
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def to_latex(self) -> str:
        """A ``tabular`` for the booktabs package."""
        header, *body, total = self._cells()
        lines = [
            rf"\begin{{tabular}}{{{'ll' + 'r' * (len(header) - 2)}}}",
            r"\toprule",
            _latex_line(header),
            r"\midrule",
            *(_latex_line(cells) for cells in body),
            r"\midrule",
            _latex_line(total),
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return "\n".join(lines) + "\n"

    def table(self) -> Table:
        """A table for rich."""
        header, *body, total = self._cells()
        table = Table(box=box.SIMPLE_HEAD, show_footer=True)
        for index, (title, foot) in enumerate(zip(header, total, strict=True)):
            table.add_column(title, footer=Text(foot), justify="left" if index < 2 else "right", no_wrap=index != 0)
        for cells in body:
            table.add_row(*map(Text, cells))  # no markup: names of modules may have brackets
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        text = io.StringIO()
        console = Console(file=text, color_system=None, width=10_000, markup=False, legacy_windows=False)
        table = self.table()
        console.print(table, width=console.measure(table).maximum)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip("\n")

    def _cells(self) -> list[tuple[str, ...]]:
        """The cells of the table as text: header, one row per tensor, total."""
        has_flops = any(row.flops_dense is not None for row in self.rows)
        header = ["tensor", "type", "shape", "weights", "nonzeros", "density", "dead features"]
        if has_flops:
            header += ["FLOPs", "sparse FLOPs"]
        lines = [tuple(header)]
        for row in (*self.rows, self.total):
            shape = " x ".join(map(str, row.shape))
            dead = f"{row.dead_features:,} / {row.features:,}"
            cells = [row.name, row.type, shape, f"{row.weights:,}", f"{row.nonzeros:,}"]
            cells += [f"{row.density:.2%}", dead]
            if has_flops:
                cells += [_short(row.flops_dense), _short(row.flops_sparse)]
            lines.append(tuple(cells))
        return lines


def report(
    model: nn.Module,
    example_input: object = None,
    *,
    include: Selectors = None,
    exclude: Selectors = None,
    batch_size: int | None = None,
) -> Report:
    """Count the nonzeros of ``model`` and, given ``example_input``, the FLOPs of one sample.

    ``example_input`` and ``batch_size`` are as in ``gossamer.flops.positions``: a tensor, a tuple of inputs or a
    mapping of keyword inputs, batch first. ``include`` and ``exclude`` are as in ``select``. Frozen tensors are counted
    too. A tensor that several layers share has one row. On the meta device, where weights have no values, all of them
    count as nonzeros: the report is that of the dense network.
    """
    weights = select(model, include=include, exclude=exclude, for_training=False)
    uses = None if example_input is None else positions(model, weights, example_input, batch_size=batch_size)
    return Report(
        tuple(
            _row(weight, counted, None if uses is None else uses[weight.name])
            for weight, counted in zip(weights, _counts(weights), strict=True)
        )
    )


def _row(weight: Weight, counted: tuple[int, int, int], uses: int | None) -> Row:
    nonzeros, features, dead_features = counted
    size = weight.parameter.numel()
    return Row(
        name=weight.name,
        type=_type_name(weight.uses[0].module),
        shape=tuple(weight.parameter.shape),
        weights=size,
        nonzeros=nonzeros,
        flops_dense=None if uses is None else FLOPS_PER_MULTIPLY_ADD * uses * size,
        flops_sparse=None if uses is None else FLOPS_PER_MULTIPLY_ADD * uses * nonzeros,
        features=features,
        dead_features=dead_features,
    )


def _counts(weights: Sequence[Weight]) -> list[tuple[int, int, int]]:
    """(nonzeros, features, dead features) of each weight, with one transfer from each device."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    features = []
    with torch.no_grad():
        for index, weight in enumerate(weights):
            per_feature = _nonzeros_per_feature(weight)
            if per_feature.is_meta:
                each = weight.parameter.numel() // max(1, per_feature.numel())
                per_feature = torch.full(per_feature.shape, each)
            features.append(per_feature.numel())
            both = torch.stack([per_feature.sum(), (per_feature == 0).sum()])
            by_device.setdefault(both.device, []).append((index, both))
    counts = [(0, 0, 0)] * len(weights)
    for several in by_device.values():
        on_host = torch.stack([both for _, both in several]).tolist()
        for (index, _), (nonzeros, dead) in zip(several, on_host, strict=True):
            counts[index] = (nonzeros, features[index], dead)
    return counts


def _nonzeros_per_feature(weight: Weight) -> Tensor:
    """Nonzeros of each output feature, summed over all shards of a sharded tensor."""
    parameter: Tensor = weight.parameter.detach()
    if weight.feature_axis == 1 and weight.groups > 1:
        # A grouped transposed convolution stores (in, out / groups, ...): each group has its own features.
        in_groups = whole(parameter).reshape(weight.groups, -1, *parameter.shape[1:])
        return (in_groups != 0).flatten(3).sum(dim=(1, 3)).flatten()
    others = [axis for axis in range(parameter.ndim) if axis != weight.feature_axis]
    return whole((parameter != 0).sum(dim=others))


def _type_name(module: nn.Module) -> str:
    """The name of the torch.nn layer that ``module`` is or derives from, otherwise of its own class."""
    for base in type(module).__mro__:
        if base is not nn.Module and vars(nn).get(base.__name__) is base:
            return str(base.__name__)
    return type(module).__name__


def _as_dict(row: Row) -> dict[str, Any]:
    return {**asdict(row), "shape": list(row.shape), "density": row.density}


def _short(flops: int | None) -> str:
    """A number of FLOPs with three digits and a unit."""
    if flops is None:
        return ""
    for unit, size in ((" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if flops >= size:
            return f"{flops / size:.2f}{unit}"
    return str(flops)


_LATEX_ESCAPES = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def _latex_line(cells: Sequence[str]) -> str:
    escaped = ("".join(_LATEX_ESCAPES.get(character, character) for character in cell) for cell in cells)
    return " & ".join(escaped) + r" \\"
