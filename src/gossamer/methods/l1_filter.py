"""L1 filters: the filters with the smallest L1 norm go, once, and the rest of the run is fine-tuning.

Rule: the sum of |w| of each filter; where masks begin the smallest go, the same share of every layer.
Reference: Li et al. 2017, Pruning Filters for Efficient ConvNets.
Ours: no layer is spared by hand, and the cut is made in the warmed-up network. What counts is in filters.py.
"""

from collections.abc import Sequence

from torch import Tensor

from gossamer.methods.filters import by_norm
from gossamer.methods.rule import Layout, Options, RemovedIsZero, Request, Timeline


class L1Filter(RemovedIsZero[Options]):
    name, title, options = "l1_filter", "filters by L1 norm, at once (Li)", Options
    reference = "Li et al. 2017, Pruning Filters for Efficient ConvNets"
    structured = True

    def __init__(
        self, layout: Layout, requests: Sequence[Request[Options]], timeline: Timeline, weights: Tensor, *, floor: float
    ) -> None:
        self._mask = by_norm(layout, requests, weights, order=1)

    @property
    def mask(self) -> Tensor:
        return self._mask

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(~self._mask, 0.0)

    def freeze_(self, weights: Tensor) -> Tensor:
        return self._mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self._mask}
