"""FPGM: filters that are close to all others of their layer are redundant.

Rule: after every epoch the filters with the smallest sum of distances to all filters of their layer, which are near its
geometric median, are set to zero, the same fraction of every layer, but continue to train; at the end they are pruned.
Reference: He et al. 2019, Filter Pruning via Geometric Median for Deep Convolutional Neural Networks Acceleration.
Ours: as soft_filter.py, which differs only in its choice of filters.
"""

import torch
from torch import Tensor

from gossamer.methods.filters import by_filter, in_equal_shares
from gossamer.methods.soft_filter import ZeroedFilters


class FPGM(ZeroedFilters):
    name, title = "fpgm", "filters near the geometric median (FPGM)"
    reference = "He et al. 2019, Filter Pruning via Geometric Median"

    def _choose(self, weights: Tensor) -> Tensor:
        # Tensors without filters keep all rows, whatever their scores.
        scores = [
            _distances(filters) if len(shape) > 2 else filters[:, :, 0]
            for filters, shape in zip(by_filter(self._layout, weights), self._layout.shapes, strict=True)
        ]
        return in_equal_shares(self._layout, self._requests, scores)


def _distances(filters: Tensor) -> Tensor:
    """The sum of distances of each filter to all others: (runs, filters, weights) → (runs, filters)."""
    return torch.cdist(filters, filters, compute_mode="donot_use_mm_for_euclid_dist").sum(2)
