"""L1 filters: the filters with the smallest L1 norm are pruned once, and the rest of the run is fine-tuning.

Rule: the sum of |w| of each filter; at the first mask step the smallest are pruned, the same fraction in every layer.
Reference: Li et al. 2017, Pruning Filters for Efficient ConvNets.
Ours: no layer is exempt, and the warmed-up network is pruned. filters.py defines the sparsity.
"""

from torch import Tensor

from gossamer.methods.base import Context, Layout, Options, PrunedAtZero, Request
from gossamer.methods.filters import by_norm, check_reach


class L1Filter(PrunedAtZero[Options]):
    name, title = "l1_filter", "filters by L1 norm, at once (Li)"
    reference = "Li et al. 2017, Pruning Filters for Efficient ConvNets"
    structured = True
    exact = False

    def __init__(self, context: Context[Options]) -> None:
        self.mask = by_norm(context.layout, context.requests, context.weights, order=1)

    @classmethod
    def check(cls, layout: Layout, request: Request[Options]) -> None:
        check_reach(layout, request.sparsity)

    def finalize(self, weights: Tensor) -> Tensor:
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self.mask}
