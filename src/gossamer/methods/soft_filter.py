"""Soft filter pruning: filters are set to zero after every epoch, but train on and may return.

Rule: after every epoch the filters with the smallest L2 norm, the same share of every layer, are set to zero, but train
on as all others do; at the end they go.
Reference: He et al. 2018, Soft Filter Pruning for Accelerating Deep Convolutional Neural Networks.
Ours: in the sparsify phase, from the warmed-up network, with the final share in every epoch; after it the choice
stands. Zeroed filters begin without momentum, and their gradient is limited to the mean norm of the gradients of the
filters that stay: a batch norm behind a filter of zeros divides by √ε, which would throw it back larger than all
others, and others would go in its place. What counts is in filters.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer import method
from gossamer.methods.filters import by_norm
from gossamer.methods.rule import Layout, Options, Request, Rule, Timeline


class SoftFilter(Rule[Options]):
    name, title, options = "soft_filter", "soft filter pruning (He)", Options
    reference = "He et al. 2018, Soft Filter Pruning for Accelerating Deep Convolutional Neural Networks"
    structured = True

    def __init__(
        self, layout: Layout, requests: Sequence[Request[Options]], timeline: Timeline, weights: Tensor, *, floor: float
    ) -> None:
        self._layout, self._requests, self._every = layout, requests, timeline.often(timeline.epoch)
        self._last = timeline.plan.sparsify
        self._mask = by_norm(layout, requests, weights, order=2)
        self._soft = torch.ones(1, dtype=torch.bool, device=weights.device)  # whether removed filters train on

    @property
    def mask(self) -> Tensor:
        return self._mask

    def show_(self, weights: Tensor, out: Tensor) -> None:
        out.copy_(weights)

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(~(self._mask | self._soft), 0.0)
        parts = zip(self._layout.shapes, self._layout.split(gradient), self._layout.split(self._mask), strict=True)
        for shape, part, kept in parts:
            filters, stays = (each.view(len(each), shape[0], -1) for each in (part, kept))
            _limit_(filters, stays[:, :, 0])

    def settle_(self, weights: Tensor) -> None:
        weights.masked_fill_(~(self._mask | self._soft), 0.0)

    def due(self, step: int) -> bool:
        return (step < self._last and step % self._every == 0) or step == self._last

    def refresh_(self, weights: Tensor, step: int) -> Tensor:
        self._mask.copy_(by_norm(self._layout, self._requests, weights, order=2))
        weights.masked_fill_(~self._mask, 0.0)
        self._soft.fill_(step < self._last)
        return ~self._mask

    def freeze_(self, weights: Tensor) -> Tensor:
        if bool(self._soft):
            self._mask.copy_(by_norm(self._layout, self._requests, weights, order=2))  # the run ended before
        return self._mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self._mask, "soft": self._soft}


def _limit_(filters: Tensor, stays: Tensor) -> None:
    """Scale gradients of removed filters down to the mean norm of those that stay."""
    sizes = filters.norm(dim=2)
    usual = (sizes * stays).sum(1, keepdim=True) / stays.sum(1, keepdim=True)
    factors = (usual / sizes.clamp_min(method.EPSILON)).clamp_max(1.0)
    filters.mul_(torch.where(stays, 1.0, factors)[:, :, None])
