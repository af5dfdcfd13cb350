"""Gradual magnitude pruning over the whole network.

Rule: the smallest |w| go, along a cubic from everything to the target; what has gone is zero and never returns.
Reference: Zhu & Gupta 2017, To Prune, or Not to Prune.
Ours: one threshold for the whole network (per layer in gradual_per_layer.py), in every step, with the floor a tensor.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.methods.budgets import GlobalBudget, MasksOfBudget, magnitude
from gossamer.methods.rule import Layout, Options, RemovedIsZero, Request, Timeline


class SmallestGo(MasksOfBudget, RemovedIsZero[Options]):
    """Removes for good, by magnitude over the whole network, what the budget does not allow."""

    options = Options
    ramp: ClassVar[str]

    def __init__(
        self, layout: Layout, requests: Sequence[Request[Options]], timeline: Timeline, weights: Tensor, *, floor: float
    ) -> None:
        score = magnitude(weights)
        self._budget = GlobalBudget(layout, requests, timeline, score, floor=floor, ramp=self.ramp)

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        gone = ~self._budget.mask
        gradient.masked_fill_(gone, 0.0)
        self._budget.score.copy_(weights.abs().masked_fill_(gone, -torch.inf))
        self._budget.meet_()


class Gradual(SmallestGo):
    name, title, ramp = "gradual", "gradual magnitude, global (Zhu & Gupta)", "cubic"
    reference = "Zhu & Gupta 2017, To Prune, or Not to Prune"
