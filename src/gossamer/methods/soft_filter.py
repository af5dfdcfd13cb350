"""Soft filter pruning: filters are set to zero after every epoch, but continue to train and may return.

Rule: after every epoch the filters with the smallest L2 norm, the same fraction of every layer, are set to zero, but
continue to train; at the end they are pruned.
Reference: He et al. 2018, Soft Filter Pruning for Accelerating Deep Convolutional Neural Networks.
Ours: in the sparsify phase, from the warmed-up network, with the final fraction in every epoch; after it the choice is
fixed. Zeroed filters start without momentum, and their gradient is limited to the mean norm of the gradients of kept
filters: a batch norm after a filter of zeros divides by √ε, which would make the filter larger than all others, and
others would be zeroed instead. filters.py defines the sparsity.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from gossamer.methods.base import Context, Layout, Method, Options, Request, Step
from gossamer.methods.filters import by_norm, check_reach
from gossamer.methods.scl import EPSILON


class ZeroedFilters(Method[Options]):
    """Base of methods that zero filters after every epoch."""

    structured = True
    exact = False
    masked_forward = False

    def __init__(self, context: Context[Options]) -> None:
        self._layout, self._requests, timeline = context.layout, context.requests, context.timeline
        self._every, self._last = timeline.often(timeline.epoch), timeline.plan.sparsify
        self.mask = self._choose(context.weights)
        self._soft = torch.ones(
            1, dtype=torch.bool, device=self.mask.device
        )  # whether zeroed filters continue to train

    @classmethod
    def check(cls, layout: Layout, request: Request[Options]) -> None:
        check_reach(layout, request.sparsity)

    def apply_masks(self, weights: Tensor, out: Tensor) -> None:
        out.copy_(weights)

    def update_masks(self, step: Step) -> None:
        self.weight_gradient(step.gradient, step.weights)

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(~(self.mask | self._soft), 0.0)
        parts = zip(self._layout.shapes, self._layout.split(gradient), self._layout.split(self.mask), strict=True)
        for shape, part, kept in parts:
            filters, stays = (each.view(len(each), shape[0], -1) for each in (part, kept))
            _limit_(filters, stays[:, :, 0])

    def project(self, weights: Tensor) -> None:
        weights.masked_fill_(~(self.mask | self._soft), 0.0)

    def topology_due(self, step: int) -> bool:
        return (step < self._last and step % self._every == 0) or step == self._last

    def update_topology(self, weights: Tensor, step: int) -> Tensor:
        self.mask.copy_(self._choose(weights))
        weights.masked_fill_(~self.mask, 0.0)
        self._soft.fill_(step < self._last)
        return ~self.mask

    def finalize(self, weights: Tensor) -> Tensor:
        if bool(self._soft):
            self.mask.copy_(self._choose(weights))  # the run ended before the last choice
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self.mask, "soft": self._soft}

    @abstractmethod
    def _choose(self, weights: Tensor) -> Tensor:
        """A mask of weights without the filters to set to zero."""


class SoftFilter(ZeroedFilters):
    name, title = "soft_filter", "soft filter pruning (He)"
    reference = "He et al. 2018, Soft Filter Pruning for Accelerating Deep Convolutional Neural Networks"

    def _choose(self, weights: Tensor) -> Tensor:
        return by_norm(self._layout, self._requests, weights, order=2)


def _limit_(filters: Tensor, stays: Tensor) -> None:
    """Scale gradients of zeroed filters down to the mean norm of the others."""
    sizes = filters.norm(dim=2)
    usual = (sizes * stays).sum(1, keepdim=True) / stays.sum(1, keepdim=True)
    factors = (usual / sizes.clamp_min(EPSILON)).clamp_max(1.0)
    filters.mul_(torch.where(stays, 1.0, factors)[:, :, None])
