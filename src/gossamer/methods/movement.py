"""Movement pruning: weights that move away from zero are kept.

Rule: every weight has a score S that starts at zero and follows ∂L/∂w ⊙ w̃ by Adam, the gradient of a straight-through
estimator. The largest S of each tensor are kept, with equal sparsity in every tensor, along a cubic. Pruned weights get
no gradient and keep their value, so that they can return. (soft_movement.py has one threshold for the network.)
Reference: Sanh, Wolf & Rush 2020, Movement Pruning: Adaptive Sparsity by Fine-Tuning.
Ours: the masks are chosen every 16 steps instead of in every step. The learning rate of the scores goes to zero on a
cosine.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.adam import Adam
from gossamer.methods.base import Context, Method, Options, Step, expect, is_rate
from gossamer.methods.budgets import keep_largest_, shares
from gossamer.schedule import cubic_budget

_EVERY = 16  # steps between two choices of the masks


@dataclass(frozen=True)
class MovementOptions(Options):
    mask_lr: float = 0.01  # learning rate of the scores

    def __post_init__(self) -> None:
        expect(self, mask_lr=(is_rate(self.mask_lr), "a number of at least 0"))


class Scores:
    """The scores of all weights."""

    def __init__(self, context: Context[MovementOptions]) -> None:
        self._timeline = context.timeline
        self._rate = context.timeline.annealed(context.values("mask_lr"))
        self._adam = Adam(context.weights)

    def update_(self, scores: Tensor, step: Step) -> None:
        direction = self._adam.direction(step.gradient * step.weights, self._timeline.clock)
        scores.sub_(direction * self._timeline.now(self._rate))

    def state(self) -> dict[str, Tensor]:
        return self._adam.state()


class Movement(Method[MovementOptions]):
    name, title, options = "movement", "movement, per layer (Sanh)", MovementOptions
    reference = "Sanh et al. 2020, Movement Pruning: Adaptive Sparsity by Fine-Tuning"

    def __init__(self, context: Context[MovementOptions]) -> None:
        self._layout, self._keep, self._scores = context.layout, context.keep, Scores(context)
        self._every, self._ramp = context.timeline.often(_EVERY), context.timeline.plan.sparsify
        self._score = torch.zeros_like(context.weights)
        self.mask = torch.ones_like(context.weights, dtype=torch.bool)

    def update_masks(self, step: Step) -> None:
        self._scores.update_(self._score, step)
        self.weight_gradient(step.gradient, step.weights)

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(~self.mask, 0.0)

    def topology_due(self, step: int) -> bool:
        return step % self._every == 0

    def update_topology(self, weights: Tensor, step: int) -> None:
        self._choose(min(1.0, step / max(1, self._ramp)))

    def finalize(self, weights: Tensor) -> Tensor:
        self._choose(1.0)
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self.mask, "score": self._score, **self._scores.state()}

    def _choose(self, ramp: float) -> None:
        """Keep the largest scores of each tensor, its share of the budget at this point of the ramp."""
        total, sizes = self._layout.count, self._layout.sizes
        budgets = [cubic_budget(ramp, total, keep) for keep in self._keep]
        counts = [shares(sizes, each, [each / total] * len(sizes)) for each in budgets]
        keep_largest_(self.mask, self._layout, self._score, counts)
