"""What an exporter wrote, with a small table of what the zeros are worth in its format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Comparison:
    """One quantity, of the dense network and of the sparse one."""

    quantity: str
    dense: int
    sparse: int

    @property
    def ratio(self) -> float:
        return self.dense / max(1, self.sparse)


@dataclass(frozen=True)
class Exported:
    """The written file, and how it was checked."""

    path: Path
    file_bytes: int
    zeros: int
    """Number of zeros among the weights (tensors of two or more dimensions), in the file and in the model."""
    difference: float | None
    """Largest difference of the outputs relative to the largest output; None if nothing could run the file."""
    checked: str
    comparisons: tuple[Comparison, ...] = ()
    """What the zeros are worth in this format."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.path}: {self.file_bytes:,} bytes, {self.zeros:,} zeros kept; {self.checked}"
        return "\n".join([head, *_table(self.comparisons), *self.notes])


def _table(comparisons: Sequence[Comparison]) -> list[str]:
    if not comparisons:
        return []
    rows = [("", "dense", "sparse", "ratio")]
    rows += [(each.quantity, f"{each.dense:,}", f"{each.sparse:,}", f"{each.ratio:.2f}") for each in comparisons]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
