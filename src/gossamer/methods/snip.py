"""SNIP: the connections that the loss is most sensitive to, chosen at the very beginning and for good.

Rule: sensitivity |∂L/∂w ⊙ w| of the initial network, from the first batch; the largest of the whole network stay.
Reference: Lee, Ajanthan & Torr 2019, SNIP: Single-shot Network Pruning based on Connection Sensitivity.
Ours: the gradients of the first `batches` steps are summed, each with its weights, while these steps already train the
dense network; then the cut is made. With the floor a tensor, without which whole layers may go.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.budgets import GlobalBudget, magnitude
from gossamer.methods.rule import Layout, Options, RemovedIsZero, Request, Timeline, expect


@dataclass(frozen=True)
class SNIPOptions(Options):
    batches: int = 2  # published: one batch of about 128 images

    def __post_init__(self) -> None:
        expect(self, batches=(self.batches >= 1, "at least 1"))


class SNIP(RemovedIsZero[SNIPOptions]):
    name, title, options = "snip", "sensitivity at the start (SNIP)", SNIPOptions
    reference = "Lee et al. 2019, SNIP: Single-shot Network Pruning based on Connection Sensitivity"
    apart = ("batches",)
    from_start = True

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[SNIPOptions]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        self._batches = min(requests[0].settings.batches, timeline.length)
        self._budget = GlobalBudget(layout, requests, timeline, magnitude(weights), floor=floor, ramp="none")
        self._sum = torch.zeros_like(weights)

    @property
    def mask(self) -> Tensor:
        return self._budget.mask

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        self._sum.addcmul_(gradient, weights)
        gradient.masked_fill_(~self._budget.mask, 0.0)

    def due(self, step: int) -> bool:
        return step == self._batches

    def refresh_(self, weights: Tensor, step: int) -> None:
        self._cut()
        weights.masked_fill_(~self._budget.mask, 0.0)

    def freeze_(self, weights: Tensor) -> Tensor:
        if bool(self._budget.mask.all()):
            self._cut()  # the run ended before the cut
        return self._budget.mask

    def state(self) -> dict[str, Tensor]:
        return {**self._budget.state(), "sum": self._sum}

    def _cut(self) -> None:
        self._budget.score.copy_(self._sum.abs())
        self._budget.choose_floor_()
        self._budget.cut_()
