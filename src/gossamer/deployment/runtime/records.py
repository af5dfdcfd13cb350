"""Plans: records for the kernels, and a line of the explanation for each operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gossamer.deprecation import renamed

# Codes of the operations, in the order of the enum in kernels.c.
(LOAD, STORE, PRODUCT, PRODUCT_ONE, AFFINE, POOL, PHASES, COPY, EMBED, LSTM, GRU, PRODUCT_DENSE) = range(12)
(POINTWISE, SOFTMAX, RNN_TANH, RNN_RELU, SPREAD, SHIFTS, PRODUCT_FOUR, NORMALISE) = range(12, 20)
(ATTENTION, CONSTANT, MOVE, TOKENS, COLUMN, RECALL) = range(20, 26)
PRODUCT_INT8, PRODUCT_INT8_ONE = range(26, 28)
RECORD = 28  # int64 fields of one record: code, x, y, add, then 24 of the operation's own


@dataclass(frozen=True)
class Line:
    """One line of ``explain``."""

    name: str
    kind: str
    shape: str
    kernel: str
    weights: int
    nonzeros: int
    multiplications: int
    operation: int
    reason: str = ""

    connections = renamed("connections", "nonzeros")


@dataclass(frozen=True, eq=False)
class Plan:
    """The records, the arrays that they point to, and the size of their arena."""

    lanes: int
    records: npt.NDArray[np.int64]
    batch_fields: tuple[tuple[int, int, int], ...]
    arena: int
    lines: tuple[Line, ...]
    kept: tuple[npt.NDArray[Any], ...]
    owners: tuple[int, ...]  # number of the operation behind each record, -1 for input and output

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("expected to copy a model, got its plan, which holds addresses; copy the NativeModel instead")

    @property
    def nbytes(self) -> int:
        """Bytes of weights with their indices, and of records. Activations (``4 * arena``) are not included."""
        return sum(array.nbytes for array in self.kept) + self.records.nbytes

    def for_batch(self, batch: int) -> npt.NDArray[np.int64]:
        """The records for a batch size, which determines strides over time if time comes first."""
        if not self.batch_fields:
            return self.records
        records = self.records.copy()
        for record, field, factor in self.batch_fields:
            records[record, field] = factor * batch
        return records
