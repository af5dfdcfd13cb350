"""How sparse a model is: nonzeros, density and FLOPs of every tensor, as rows, table, JSON or LaTeX.

A report is a frozen dataclass. It counts the nonzeros of the parameters as they are now, so it needs no masks and works
on any model. It never prints by itself: ``print`` it, pass it to rich, or write ``to_json()`` to a file.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor, nn

from gossamer.deprecation import renamed
from gossamer.flops import FLOPS_PER_MULTIPLY_ADD, positions
from gossamer.io.checkpoints import effective
from gossamer.patterns import Shape, canonical, detect
from gossamer.prunable import Weight, select
from gossamer.report.page import notebook_table, page_of, write_page
from gossamer.report.rows import Row, short, total_of
from gossamer.report.terminal import as_text, table_of
from gossamer.selectors import Selectors, as_tuple
from gossamer.sharding import is_sharded, whole

# Names of tensors with two or more dimensions that are not weights: attention masks of GPT-2 are called bias.
_NOT_WEIGHTS = ("bias", "masked_bias", "running_mean", "running_var", "inv_freq")


@dataclass(frozen=True)
class Report:
    """The result of ``gossamer.report``; ``print`` shows its table."""

    rows: tuple[Row, ...]
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    """The weights by name, for the pictures of `save_html`, without sharded ones and those on the meta device.
    Copies and pickles of a report have none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Report, (self.rows,)

    @property
    def total(self) -> Row:
        return total_of(self.rows)

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

    def table(self, title: str | None = None) -> Table:
        """A table for rich that fits 80 columns; repeated blocks have one line."""
        return table_of(self.rows, title)

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        return as_text(self.rows)

    def save_html(self, path: str | os.PathLike[str], *, title: str = "Sparsity report") -> Path:
        """Write an HTML page: one file that needs no network. Needs plotly (`pip install 'gossamer[report]'`).

        Its pictures show the current weights.
        """
        return write_page(page_of(self.rows, self.tensors, title=title), Path(path))

    def _repr_html_(self) -> str:
        return notebook_table(self.rows)

    def _cells(self) -> list[tuple[str, ...]]:
        """The cells of the LaTeX table: header, one row per tensor, total."""
        has_flops = any(row.flops_dense is not None for row in self.rows)
        has_patterns = any(row.pattern for row in self.rows)
        header = ["tensor", "type", "shape", "weights", "nonzeros", "density", "dead features"]
        if has_flops:
            header += ["FLOPs", "sparse FLOPs"]
        if has_patterns:
            header += ["pattern"]
        lines = [tuple(header)]
        for row in (*self.rows, self.total):
            shape = " x ".join(map(str, row.shape))
            dead = f"{row.dead_features:,} / {row.features:,}"
            cells = [row.name, row.type, shape, f"{row.weights:,}", f"{row.nonzeros:,}"]
            cells += [f"{row.density:.2%}", dead]
            if has_flops:
                cells += [short(row.flops_dense), short(row.flops_sparse)]
            if has_patterns:
                cells += [row.pattern]
            lines.append(tuple(cells))
        return lines


def report(
    model: nn.Module | Mapping[str, Tensor],
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
    count as nonzeros: the report is that of the dense network. A weight that torch.nn.utils.prune computes from
    ``weight_orig`` and ``weight_mask`` is counted as their product.

    ``model`` may also be a state dict. Its floating-point tensors of two or more dimensions are counted, except biases
    and the statistics of norms; it takes no ``example_input``, and ``include`` and ``exclude`` are name patterns.
    """
    if isinstance(model, nn.Module):
        entries = _entries_of_model(model, include, exclude)
        weights = [each.weight for each in entries if each.weight is not None]
        uses = None if example_input is None else positions(model, weights, example_input, batch_size=batch_size)
    elif isinstance(cast(object, model), Mapping):
        if example_input is not None:
            raise TypeError("expected a model with an example_input, got a state dict: FLOPs need the model itself")
        entries, uses = _entries_of_tensors(model, include, exclude), None
    else:
        raise TypeError(f"expected a torch.nn.Module or a state dict, got {type(model).__name__}")
    rows = (
        _row(each, counted, None if uses is None or each.weight is None else uses[each.weight.name])
        for each, counted in zip(entries, _counts(entries), strict=True)
    )
    shown = [each for each in entries if not each.tensor.is_meta and not is_sharded(each.tensor)]
    return Report(tuple(rows), {each.name: each.tensor for each in shown})


@dataclass(frozen=True, eq=False)
class _Entry:
    """A tensor to count."""

    name: str
    type: str
    tensor: Tensor
    feature_axis: int = 0
    groups: int = 1
    weight: Weight | None = None  # None without a model


def _entries_of_model(model: nn.Module, include: Selectors, exclude: Selectors) -> list[_Entry]:
    masks = {
        f"{name.removesuffix('_mask')}_orig": mask
        for name, mask in model.named_buffers(remove_duplicate=False)
        if name.endswith("_mask")
    }
    pruned = [name for name, _ in model.named_parameters() if name in masks]
    if pruned:  # by torch.nn.utils.prune, which replaces the parameters by computed tensors
        include = (*(as_tuple(include, "include") or ("*",)), *pruned)
        exclude = (*as_tuple(exclude, "exclude"), *(name.removesuffix("_orig") for name in pruned))
    weights = select(model, include=include, exclude=exclude, for_training=False)
    entries = []
    for weight in weights:
        mask = masks.get(weight.name)
        tensor, name = weight.parameter.detach(), weight.name
        if mask is not None and mask.shape == tensor.shape:
            tensor, name = tensor * mask, name.removesuffix("_orig")
        kind = _type_name(weight.uses[0].module)
        entries.append(_Entry(name, kind, tensor, weight.feature_axis, weight.groups, weight))
    return entries


def _entries_of_tensors(state: Mapping[str, Tensor], include: Selectors, exclude: Selectors) -> list[_Entry]:
    wanted, unwanted = as_tuple(include, "include"), as_tuple(exclude, "exclude")
    if others := [each for each in (*wanted, *unwanted) if not isinstance(each, str)]:
        raise TypeError(f"expected name patterns for a state dict, got {others[0]!r}: modules need the model itself")

    def matches(name: str, patterns: Sequence[object]) -> bool:
        return any(fnmatchcase(name, str(pattern)) for pattern in patterns)

    found, seen = [], set()
    for name, tensor in effective(state).items():
        memory = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if not _is_weight(name, tensor) or (wanted and not matches(name, wanted)) or matches(name, unwanted):
            continue
        if tensor.numel() == 0 or memory not in seen:  # tied weights are counted once
            found.append(_Entry(name, "matrix" if tensor.ndim == 2 else "filters", tensor.detach()))
            seen.add(memory)
    if not found:
        raise ValueError(
            "expected floating-point tensors of two or more dimensions, got none in this state dict: give its weights"
        )
    return found


def _is_weight(name: str, tensor: Tensor) -> bool:
    last = name.rpartition(".")[2]
    return tensor.ndim > 1 and tensor.is_floating_point() and not tensor.is_meta and last not in _NOT_WEIGHTS


def _row(entry: _Entry, counted: tuple[int, int, int], uses: int | None) -> Row:
    nonzeros, features, dead_features = counted
    size = entry.tensor.numel()
    return Row(
        name=entry.name,
        type=entry.type,
        shape=tuple(entry.tensor.shape),
        weights=size,
        nonzeros=nonzeros,
        flops_dense=None if uses is None else FLOPS_PER_MULTIPLY_ADD * uses * size,
        flops_sparse=None if uses is None else FLOPS_PER_MULTIPLY_ADD * uses * nonzeros,
        features=features,
        dead_features=dead_features,
        pattern=_pattern(entry) if 0 < nonzeros < size else "",
    )


def _pattern(entry: _Entry) -> str:
    """The pattern of the zeros; unknown for shards, for tensors on the meta device and for unknown layers."""
    tensor = entry.tensor
    convolves = tensor.ndim > 2
    unknown = convolves and entry.weight is not None and not Shape.of_weight(entry.weight).convolves
    if is_sharded(tensor) or tensor.is_meta or unknown:
        return ""
    with torch.no_grad():
        return detect(canonical(tensor != 0, entry.feature_axis, entry.groups), convolves=convolves)


def _counts(entries: Sequence[_Entry]) -> list[tuple[int, int, int]]:
    """(nonzeros, features, dead features) of each tensor, with one transfer from each device."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    features = []
    with torch.no_grad():
        for index, entry in enumerate(entries):
            per_feature = _nonzeros_per_feature(entry)
            if per_feature.is_meta:
                per_feature = torch.full(per_feature.shape, entry.tensor.numel() // max(1, per_feature.numel()))
            features.append(per_feature.numel())
            both = torch.stack([per_feature.sum(), (per_feature == 0).sum()])
            by_device.setdefault(both.device, []).append((index, both))
    counts = [(0, 0, 0)] * len(entries)
    for several in by_device.values():
        on_host = torch.stack([both for _, both in several]).tolist()
        for (index, _), (nonzeros, dead) in zip(several, on_host, strict=True):
            counts[index] = (nonzeros, features[index], dead)
    return counts


def _nonzeros_per_feature(entry: _Entry) -> Tensor:
    """Nonzeros of each output feature, summed over all shards of a sharded tensor."""
    tensor = entry.tensor
    if entry.feature_axis == 1 and entry.groups > 1:
        # A grouped transposed convolution stores (in, out / groups, ...): each group has its own features.
        in_groups = whole(tensor).reshape(entry.groups, -1, *tensor.shape[1:])
        return (in_groups != 0).flatten(3).sum(dim=(1, 3)).flatten()
    others = [axis for axis in range(tensor.ndim) if axis != entry.feature_axis]
    return whole((tensor != 0).sum(dim=others))


def _type_name(module: nn.Module) -> str:
    """The name of the torch.nn layer that ``module`` is or derives from, otherwise of its own class."""
    for base in type(module).__mro__:
        if base is not nn.Module and vars(nn).get(base.__name__) is base:
            return str(base.__name__)
    return type(module).__name__


def _as_dict(row: Row) -> dict[str, Any]:
    return {**asdict(row), "shape": list(row.shape), "density": row.density}


_LATEX_ESCAPES = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def _latex_line(cells: Sequence[str]) -> str:
    escaped = ("".join(_LATEX_ESCAPES.get(character, character) for character in cell) for cell in cells)
    return " & ".join(escaped) + r" \\"
