"""Hyperflux: Adam on a mask variable a weight, and a controller that presses until the planned sparsity is reached.

Rule: m = 1 where t ≥ 0; w follows the gradient of w ⊙ m, so that a removed weight rests; t follows ¼·∂L/∂w ⊙ w plus a
pressure by Adam (learning rate 1e-3, without decay). t starts uniform between 0.2 and 0.5. The pressure is that of the
loss γ·mean(t): γ over the number of connections, the same on all t but those that are 1.5 starts below zero already. A
hundred times in the phase (once in each of a hundred epochs) γ = base^1.5 is changed: base grows by a step plus an
inertia that itself grows by a quarter step while there are more connections than planned, and falls in the same way
while there are less. Then pressure is off and connections that the loss asks for return (regrowth).
Reference: Barbulescu et al. 2025, Hyperflux: Pruning Reveals the Importance of Weights (arXiv 2504.05349).
Ours: the plan is our cubic, and pressure is off in the stabilise phase. From there on the largest t stay, exactly as
many as the budget, so that what regrows takes the place of the weakest. The learning rate of the masks is meant for
12,500 steps of pressure and scaled to the length of that phase, so that masks come as far in long and short runs, and
goes to zero on a cosine. Weights are those of our warmed-up network instead of a fully trained one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.budgets import GlobalBudget
from gossamer.methods.noise import uniform
from gossamer.methods.rule import (
    DenseGradient,
    Layout,
    Options,
    Request,
    Timeline,
    column,
    damp_removed_,
    expect,
    is_rate,
)

_FIRST, _SECOND, _EPSILON = 0.9, 0.999, 1e-8  # Adam's
_LOOKS = 100  # of the controller, in the phase in which connections go
_LENGTH = 12_500  # steps of that phase for which the learning rate is meant
_SPREAD, _DEPTH = 2.5, 1.5  # the largest t at the start, and where pressure ends below zero, in starts


@dataclass(frozen=True)
class HyperfluxOptions(Options):
    mask_lr: float = 1e-3  # in a phase of 12,500 steps, in others in proportion
    start: float = 0.2  # the smallest t
    step: float = 0.3  # of the controller
    removed_gradient: float = 0.0  # share of it that removed weights follow

    def __post_init__(self) -> None:
        expect(
            self,
            mask_lr=(is_rate(self.mask_lr), "a number of at least 0"),
            start=(0 < self.start < math.inf, "a number above 0"),
            step=(0 < self.step < math.inf, "a number above 0"),
            removed_gradient=(0 <= self.removed_gradient <= 1, "a share from 0 to 1"),
        )


class Hyperflux(DenseGradient[HyperfluxOptions]):
    name, title, options = "hyperflux", "Adam masks under controlled pressure (Hyperflux)", HyperfluxOptions
    reference = "Barbulescu et al. 2025, Hyperflux: Pruning Reveals the Importance of Weights"

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[HyperfluxOptions]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        self._timeline, self._pressing = timeline, timeline.plan.sparsify
        self._every = max(1, self._pressing // _LOOKS)
        settings = [request.settings for request in requests]
        self._rate = timeline.annealed([each.mask_lr * _LENGTH / max(1, self._pressing) for each in settings])
        keep = [layout.keep(request.sparsity) for request in requests]
        self._planned = timeline.budgets(layout.count, keep)
        self._step = column([each.step for each in settings], weights)
        self._removed = column([each.removed_gradient for each in settings], weights)
        start = column([each.start for each in settings], weights)
        seeds = torch.tensor([request.seed for request in requests], device=weights.device)
        drawn = uniform(seeds, torch.zeros_like(timeline.clock), layout.count, weights.dtype)
        self._t = start * (1.0 + (_SPREAD - 1.0) * drawn)
        self._deepest = -_DEPTH * start
        self._mean, self._square = torch.zeros_like(weights), torch.zeros_like(weights)
        self._base, self._rising, self._falling = (torch.zeros_like(self._step) for _ in range(3))
        self._budget = GlobalBudget(layout, requests, timeline, self._t.clone(), floor=floor, ramp="none")
        self._settled = torch.arange(timeline.length, device=weights.device) >= self._pressing
        self._final, self._fewest = torch.tensor(keep, device=weights.device), max(1, sum(layout.floors(floor)))

    @property
    def mask(self) -> Tensor:
        return self._budget.mask

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        pressure = self._base**1.5 / weights.shape[1]
        flux = gradient * weights * 0.25 + pressure * (self._t > self._deepest)
        number = (self._timeline.clock + 1).to(weights.dtype)
        self._mean.lerp_(flux, 1.0 - _FIRST)
        self._square.mul_(_SECOND).addcmul_(flux, flux, value=1.0 - _SECOND)
        mean = self._mean / (1.0 - _FIRST**number)
        square = self._square / (1.0 - _SECOND**number)
        self._t.sub_(mean / (square.sqrt() + _EPSILON) * self._timeline.now(self._rate))
        damp_removed_(gradient, self._budget.mask, self._removed)
        self._budget.score.copy_(self._t)
        # While there is pressure as many as are not below zero, then exactly the budget, whatever the sign of t.
        open_ = (self._t >= 0.0).sum(1).clamp_min(self._fewest)
        self._budget.allow_(torch.where(self._timeline.now(self._settled)[:, 0], self._final, open_))

    def due(self, step: int) -> bool:
        return (step < self._pressing and step % self._every == 0) or step == self._pressing

    def refresh_(self, weights: Tensor, step: int) -> None:
        self._budget.score.copy_(self._t)
        self._budget.choose_floor_()
        if step == self._pressing:
            self._base.zero_()
            return
        planned = self._planned[step - 1][:, None]
        too_many = self._budget.mask.sum(1, keepdim=True) > planned
        up, down = self._step + self._rising, self._step + self._falling
        self._base.copy_(torch.where(too_many, self._base + up, (self._base - down).clamp_min(0.0)))
        self._rising.copy_(torch.where(too_many, self._rising + self._step / 4, 0.0))
        self._falling.copy_(torch.where(too_many, 0.0, self._falling + self._step / 4))

    def freeze_(self, weights: Tensor) -> Tensor:
        self._budget.score.copy_(self._t)
        self._budget.choose_floor_()
        self._budget.cut_()
        return self._budget.mask

    def state(self) -> dict[str, Tensor]:
        own = {"t": self._t, "mean": self._mean, "square": self._square, "base": self._base}
        return {**self._budget.state(), **own, "rising": self._rising, "falling": self._falling}
