"""The rows of a report: one per prunable tensor, and their total."""

from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.deprecation import renamed


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
    pattern: str = ""
    """The pattern of the zeros, such as 2:4 or block:1x4; empty if they have none."""

    connections = renamed("connections", "nonzeros")

    @property
    def density(self) -> float:
        return self.nonzeros / self.weights if self.weights else 0.0


def total_of(rows: Sequence[Row], name: str = "total") -> Row:
    """The sums of all columns."""
    dense = [row.flops_dense for row in rows if row.flops_dense is not None]
    sparse = [row.flops_sparse for row in rows if row.flops_sparse is not None]
    return Row(
        name=name,
        type="",
        shape=(),
        weights=sum(row.weights for row in rows),
        nonzeros=sum(row.nonzeros for row in rows),
        flops_dense=sum(dense) if dense else None,
        flops_sparse=sum(sparse) if sparse else None,
        features=sum(row.features for row in rows),
        dead_features=sum(row.dead_features for row in rows),
        pattern=rows[0].pattern if len({row.pattern for row in rows}) == 1 else "",
    )


def short(number: float | None) -> str:
    """A number with three digits and a unit; nothing for None."""
    if number is None:
        return ""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 999.5 * size else f"{number / size:.0f} {unit}"
    return f"{number:.3g}"
