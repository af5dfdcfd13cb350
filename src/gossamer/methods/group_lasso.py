"""Structured sparsity learning (SSL): a group lasso on filters.

Rule: the loss gets λ·Σ_f ‖w_f‖, the sum of the L2 norms of all filters, which drives whole filters to zero; these are
removed, and the rest is fine-tuned.
Reference: Wen et al. 2016, Learning Structured Sparsity in Deep Neural Networks.
Ours: groups are filters; those of input channels, of shapes and of layers are left out. The penalty acts in the
sparsify phase; then the filters with the smallest norms of the network are pruned, as the sparsity requires.
filters.py defines the sparsity.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, expect, is_rate
from gossamer.methods.filters import PrunedChannels, by_filter


@dataclass(frozen=True)
class SSLOptions(Options):
    penalty: float = 5e-4  # λ

    def __post_init__(self) -> None:
        expect(self, penalty=(is_rate(self.penalty), "a number of at least 0"))


class SSL(PrunedChannels[SSLOptions]):
    name, title, options = "ssl", "group lasso on filters (SSL)", SSLOptions
    reference = "Wen et al. 2016, Learning Structured Sparsity in Deep Neural Networks"

    def __init__(self, context: Context[SSLOptions]) -> None:
        self._begin(context)
        self._penalty = context.column("penalty")

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        super().weight_gradient(gradient, weights)
        strength = (self._penalty * self._sparsifying(weights.dtype))[:, :, None]
        pairs = list(zip(by_filter(self._layout, gradient), by_filter(self._layout, weights), strict=True))
        for into, filters in (pairs[index] for index in self._filters):
            sizes = filters.norm(dim=2, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
            into.add_(filters / sizes * strength)

    def _scores(self, weights: Tensor) -> Tensor:
        filters = by_filter(self._layout, weights)
        return torch.cat([filters[index].norm(dim=2) for index in self._filters], dim=1)
