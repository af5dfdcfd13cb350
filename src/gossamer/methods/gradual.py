"""Gradual magnitude pruning over the whole network.

Rule: the weights with the smallest |w| are pruned, along a cubic from dense to the target. Pruned weights are zero and
never return.
Reference: Zhu & Gupta 2017, To Prune, or Not to Prune.
Ours: one threshold for the whole network (gradual_per_layer.py has one per layer), in every step, and min_density
protects a fraction of each tensor.
"""

from typing import ClassVar

import torch

from gossamer.methods.base import Context, Options, PrunedAtZero, Step
from gossamer.methods.budgets import GlobalThreshold, magnitude
from gossamer.methods.patterned import make_budget


class SmallestPruned(GlobalThreshold[Options], PrunedAtZero[Options]):
    """Permanently prunes the smallest weights of the network, as the budget requires."""

    ramp: ClassVar[str]
    patterned = True

    def __init__(self, context: Context[Options]) -> None:
        self._begin(make_budget(context, magnitude(context.weights), ramp=self.ramp))

    def update_masks(self, step: Step) -> None:
        self.weight_gradient(step.gradient, step.weights)
        self._budget.score.copy_(step.weights.abs().masked_fill_(~self.mask, -torch.inf))
        self._budget.meet_()


class Gradual(SmallestPruned):
    name, title, ramp = "gradual", "gradual magnitude, global (Zhu & Gupta)", "cubic"
    reference = "Zhu & Gupta 2017, To Prune, or Not to Prune"
