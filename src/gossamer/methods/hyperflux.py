"""Hyperflux: Adam on a mask variable a weight, and a controller that presses until the planned sparsity is reached.

Rule: m = 1 where t ≥ 0; t follows ¼·∂L/∂w ⊙ w plus a constant pressure by Adam (learning rate 1e-3, started at 0.2,
without decay). Once an epoch the pressure is changed: base grows by a step plus an inertia that itself grows by a
quarter step while there are more connections than planned, and falls in the same way while there are less; pressure =
base^1.5. Then pressure is off and connections that the loss asks for return (regrowth).
Reference: Barbulescu et al. 2025, Hyperflux: Pruning Reveals the Importance of Weights (arXiv 2504.05349).
Ours: the plan is our cubic, pressure is off in the stabilise phase, its unit is the root mean square of the mask
gradient over the network, and in the end the largest t stay, exactly as many as the budget. Weights are those of our
warmed-up network instead of a fully trained one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.budgets import GlobalBudget
from gossamer.methods.rule import DenseGradient, Layout, Options, Request, Timeline, column

_FIRST, _SECOND, _EPSILON = 0.9, 0.999, 1e-8  # Adam's


@dataclass(frozen=True)
class HyperfluxOptions(Options):
    mask_lr: float = 1e-3
    start: float = 0.2  # of t
    step: float = 0.3  # of the controller


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
        self._timeline, self._every, self._pressing = timeline, timeline.often(timeline.epoch), timeline.plan.sparsify
        self._rate = timeline.annealed([request.settings.mask_lr for request in requests])
        self._planned = timeline.budgets(layout.count, [layout.keep(request.sparsity) for request in requests])
        self._step = column([request.settings.step for request in requests], weights)
        self._t = column([request.settings.start for request in requests], weights).expand_as(weights).clone()
        self._mean, self._square = torch.zeros_like(weights), torch.zeros_like(weights)
        self._base, self._rising, self._falling = (torch.zeros_like(self._step) for _ in range(3))
        self._budget = GlobalBudget(layout, requests, timeline, torch.ones_like(weights), floor=floor, ramp="none")

    @property
    def mask(self) -> Tensor:
        return self._budget.mask

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        flux = gradient * weights * 0.25
        size = flux.square().mean(1, keepdim=True).sqrt()
        flux = flux + size * self._base**1.5
        number = (self._timeline.clock + 1).to(weights.dtype)
        self._mean.lerp_(flux, 1.0 - _FIRST)
        self._square.mul_(_SECOND).addcmul_(flux, flux, value=1.0 - _SECOND)
        mean = self._mean / (1.0 - _FIRST**number)
        square = self._square / (1.0 - _SECOND**number)
        self._t.sub_(mean / (square.sqrt() + _EPSILON) * self._timeline.now(self._rate))
        torch.ge(self._t, 0.0, out=self._budget.mask)

    def due(self, step: int) -> bool:
        return (step < self._pressing and step % self._every == 0) or step == self._pressing

    def refresh_(self, weights: Tensor, step: int) -> None:
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
