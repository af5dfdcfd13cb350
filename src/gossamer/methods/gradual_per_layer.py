"""Gradual magnitude pruning, every tensor to the same sparsity.

Rule: every n-th step the smallest |w| of each tensor go, s(t) = s_f · (1 - (1 - t/T)³) of them; what has gone is zero
and never returns.
Reference: Zhu & Gupta 2017, To Prune, or Not to Prune.
Ours: the counts of the tensors are rounded so that their sum is the budget exactly. The published schedules leave some
layers dense by hand (the first, the last); here all are treated alike, as the name says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.budgets import largest, shares
from gossamer.methods.rule import Layout, Options, RemovedIsZero, Request, Timeline, expect
from gossamer.schedule import connections_left


@dataclass(frozen=True)
class PerLayerOptions(Options):
    every: int = 100  # steps between two cuts

    def __post_init__(self) -> None:
        expect(self, every=(self.every >= 1, "at least 1 step"))


class GradualPerLayer(RemovedIsZero[PerLayerOptions]):
    name, title, options = "gradual_per_layer", "gradual magnitude, per layer (Zhu & Gupta)", PerLayerOptions
    reference = "Zhu & Gupta 2017, To Prune, or Not to Prune"
    apart = ("every",)

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[PerLayerOptions]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        self._layout, self._timeline = layout, timeline
        self._keep = [layout.keep(request.sparsity) for request in requests]
        self._every, self._ramp = timeline.often(requests[0].settings.every), timeline.plan.sparsify
        self._mask = torch.ones_like(weights, dtype=torch.bool)

    @property
    def mask(self) -> Tensor:
        return self._mask

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(~self._mask, 0.0)

    def due(self, step: int) -> bool:
        return step <= self._ramp and (step % self._every == 0 or step == self._ramp)

    def refresh_(self, weights: Tensor, step: int) -> None:
        self._cut(weights, step / self._ramp)

    def freeze_(self, weights: Tensor) -> Tensor:
        self._cut(weights, 1.0)
        return self._mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self._mask}

    def _cut(self, weights: Tensor, ramp: float) -> None:
        """Leave in each tensor its share of the budget."""
        total, sizes = self._layout.count, self._layout.sizes
        left = [connections_left(ramp, total, keep) for keep in self._keep]
        counts = [shares(sizes, each, [each / total] * len(sizes)) for each in left]
        score = weights.abs().masked_fill_(~self._mask, -torch.inf)
        for index, (part, mask) in enumerate(
            zip(self._layout.split(score), self._layout.split(self._mask), strict=True)
        ):
            mask.copy_(largest(part, [row[index] for row in counts]))
        weights.masked_fill_(~self._mask, 0.0)
