"""Soft movement pruning: weights that move away from zero are kept, by one threshold for the network.

Rule: as movement.py, but the weights are kept whose σ(S) is above a threshold, the same for the whole network, while a
penalty on Σ σ(S) pushes the scores down.
Reference: Sanh, Wolf & Rush 2020, Movement Pruning: Adaptive Sparsity by Fine-Tuning.
Ours: instead of the penalty, whose coefficient is tuned for each target, all scores are lowered alike, by as much as
the budget requires. min_density protects a fraction of each tensor (published: 0.5 % of each matrix).
"""

import torch
from torch import Tensor

from gossamer.methods.base import Context, Step
from gossamer.methods.budgets import GlobalBudget, GlobalThreshold
from gossamer.methods.movement import MovementOptions, Scores


class SoftMovement(GlobalThreshold[MovementOptions]):
    name, title, options = "soft_movement", "movement, one threshold (Sanh)", MovementOptions
    reference = "Sanh et al. 2020, Movement Pruning: Adaptive Sparsity by Fine-Tuning"
    shardable = False  # many scores are equal (zero), and the first of these are kept: shards have another order

    def __init__(self, context: Context[MovementOptions]) -> None:
        self._scores = Scores(context)
        self._begin(GlobalBudget(context, torch.zeros_like(context.weights)))

    def update_masks(self, step: Step) -> None:
        self._scores.update_(self._budget.score, step)
        self.weight_gradient(step.gradient, step.weights)
        self._budget.meet_()

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(~self.mask, 0.0)

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), **self._scores.state()}
