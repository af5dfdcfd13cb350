"""Hyperflux: Adam on one mask variable per weight, and a controller that increases the pressure to the planned
sparsity.

Rule: m = 1 where t ≥ 0. w follows the gradient of w ⊙ m, so pruned weights do not train; t follows ¼·∂L/∂w ⊙ w plus a
pressure by Adam (learning rate 1e-3, without decay). t starts uniform between 0.2 and 0.5. The pressure is that of the
loss γ·mean(t): γ over the number of weights, the same on all t except those that are already 1.5 starts below zero. A
hundred times in the phase (once in each of a hundred epochs) γ = base^1.5 changes: base grows by a step plus an inertia
that itself grows by a quarter step while more weights are kept than planned, and falls in the same way while fewer are.
Then the pressure is off, and weights that reduce the loss return (regrowth).
Reference: Barbulescu et al. 2025, Hyperflux: Pruning Reveals the Importance of Weights (arXiv 2504.05349).
Ours: the plan is our cubic, and the pressure is off in the stabilise phase. From then on exactly as many of the largest
t are kept as the budget allows, so that weights that regrow replace the weakest. The learning rate of the masks is for
12,500 steps of pressure and is scaled to the length of that phase, so that masks move as far in short runs as in long
ones; it falls to zero on a cosine. The weights are those of our warmed-up network instead of a fully trained one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.adam import Adam
from gossamer.methods.base import Context, Options, Step, expect, is_rate, min_nonzeros, scale_pruned_
from gossamer.methods.budgets import BudgetedMethod, GlobalBudget
from gossamer.methods.noise import uniform

_UPDATES = 100  # of the controller, in the sparsify phase
_LENGTH = 12_500  # steps of that phase at the nominal learning rate
_SPREAD, _DEPTH = 2.5, 1.5  # the largest t at the start, and the lower limit of the pressure, in multiples of the start


@dataclass(frozen=True)
class HyperfluxOptions(Options):
    mask_lr: float = 1e-3  # in a phase of 12,500 steps, in others in proportion
    start: float = 0.2  # the smallest t
    step: float = 0.3  # of the controller
    pruned_grad_scale: float = 0.0  # factor on the gradient of pruned weights

    def __post_init__(self) -> None:
        expect(
            self,
            mask_lr=(is_rate(self.mask_lr), "a number of at least 0"),
            start=(0 < self.start < math.inf, "a number above 0"),
            step=(0 < self.step < math.inf, "a number above 0"),
            pruned_grad_scale=(0 <= self.pruned_grad_scale <= 1, "a number from 0 to 1"),
        )


class Hyperflux(BudgetedMethod[HyperfluxOptions]):
    name, title, options = "hyperflux", "Adam masks under controlled pressure (Hyperflux)", HyperfluxOptions
    reference = "Barbulescu et al. 2025, Hyperflux: Pruning Reveals the Importance of Weights"
    _budget: GlobalBudget

    def __init__(self, context: Context[HyperfluxOptions]) -> None:
        self._timeline, weights, layout = context.timeline, context.weights, context.layout
        self._pressing = context.timeline.plan.sparsify
        self._every = max(1, self._pressing // _UPDATES)
        self._rate = context.timeline.annealed(
            [rate * _LENGTH / max(1, self._pressing) for rate in context.values("mask_lr")]
        )
        self._planned = context.timeline.budgets(context.targets)
        self._step, self._removed = context.column("step"), context.column("pruned_grad_scale")
        start = context.column("start")
        drawn = uniform(context.seeds, torch.zeros_like(context.timeline.clock), layout.count, weights.dtype)
        self._t = start * (1.0 + (_SPREAD - 1.0) * drawn)
        self._deepest = -_DEPTH * start
        self._adam = Adam(weights)
        self._base, self._rising, self._falling = (torch.zeros_like(self._step) for _ in range(3))
        self._final = torch.tensor(context.keep, device=weights.device)
        self._fewest = max(1, sum(min_nonzeros(layout.sizes, context.min_density)))
        self._begin(GlobalBudget(context, self._t.clone(), ramp="none"))

    def update_masks(self, step: Step) -> None:
        gradient, weights, clock = step.gradient, step.weights, self._timeline.clock
        pressure = self._base**1.5 / weights.shape[1]
        flux = gradient * weights * 0.25 + pressure * (self._t > self._deepest)
        self._t.sub_(self._adam.direction(flux, clock) * self._timeline.now(self._rate))
        self.weight_gradient(gradient, weights)
        self._budget.score.copy_(self._t)
        # Under pressure, all weights with t ≥ 0; afterwards exactly the budget, whatever the sign of t.
        open_ = (self._t >= 0.0).sum(1).clamp_min(self._fewest)
        self._budget.allow_(torch.where(clock >= self._pressing, self._final, open_))

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        scale_pruned_(gradient, self.mask, self._removed)

    def topology_due(self, step: int) -> bool:
        return (step < self._pressing and step % self._every == 0) or step == self._pressing

    def update_topology(self, weights: Tensor, step: int) -> None:
        """The controller."""
        self._budget.score.copy_(self._t)
        self._budget.protect_()
        if step == self._pressing:
            self._base.zero_()
            return
        too_many = self.mask.sum(1, keepdim=True) > self._planned.at(step - 1)
        up, down = self._step + self._rising, self._step + self._falling
        self._base.copy_(torch.where(too_many, self._base + up, (self._base - down).clamp_min(0.0)))
        self._rising.copy_(torch.where(too_many, self._rising + self._step / 4, 0.0))
        self._falling.copy_(torch.where(too_many, 0.0, self._falling + self._step / 4))

    def finalize(self, weights: Tensor) -> Tensor:
        self._budget.score.copy_(self._t)
        self._budget.protect_()
        self._budget.cut_()
        return self.mask

    def state(self) -> dict[str, Tensor]:
        own = {"t": self._t, "base": self._base, "rising": self._rising, "falling": self._falling}
        return {**super().state(), **self._adam.state(), **own}
