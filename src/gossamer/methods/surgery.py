"""Dynamic network surgery: two thresholds a layer, so that a connection between them stays what it is.

Rule: T = 0 where |w| < a, 1 where |w| ≥ b, unchanged between; a = 0.9·t, b = 1.1·t with t = μ + c·σ of the |w| of its
layer, c set by hand for each. w follows the gradient of w ⊙ T, also where T = 0 (splicing). Masks are looked at with
probability (1 + γ·iteration)^-power, less and less often.
Reference: Guo, Yao & Chen 2016, Dynamic Network Surgery for Efficient DNNs.
Ours: c is one number for the whole network, solved for in every look so that the budget is met: a connection stays
where (u - μ)/σ is above c, u being |w|/0.9 for those that are there and |w|/1.1 for those that are not. μ and σ are
those of the warmed-up network instead of a trained one, and removal follows our cubic instead of beginning at the full
thresholds. As a layer without a long tail would lose everything to the others, each tensor keeps at least half of what
an equal share would leave it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.budgets import GlobalBudget, MasksOfBudget
from gossamer.methods.noise import uniform
from gossamer.methods.rule import DenseGradient, Layout, Options, Request, Timeline, column, expect, is_rate

_SPARED = 0.5  # of an equal share


@dataclass(frozen=True)
class SurgeryOptions(Options):
    lower: float = 0.9  # a/t
    upper: float = 1.1  # b/t
    gamma: float = 1e-4  # of the probability of a look
    power: float = 1.0

    def __post_init__(self) -> None:
        expect(
            self,
            lower=(0 < self.lower <= self.upper, "a number above 0 and up to upper"),
            upper=(0 < self.upper < math.inf, "a number above 0"),
            gamma=(is_rate(self.gamma), "a number of at least 0"),
            power=(is_rate(self.power), "a number of at least 0"),
        )


class Surgery(MasksOfBudget, DenseGradient[SurgeryOptions]):
    name, title, options = "surgery", "dynamic network surgery (Guo)", SurgeryOptions
    reference = "Guo et al. 2016, Dynamic Network Surgery for Efficient DNNs"

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[SurgeryOptions]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        settings = [request.settings for request in requests]
        self._timeline = timeline
        self._lower = column([each.lower for each in settings], weights)
        self._upper = column([each.upper for each in settings], weights)
        self._gamma = column([each.gamma for each in settings], weights)
        self._power = column([each.power for each in settings], weights)
        self._seeds = torch.tensor([request.seed for request in requests], device=weights.device)
        parts = [part.abs() for part in layout.split(weights)]
        self._mean = layout.by_tensor(torch.stack([part.mean(1) for part in parts], dim=1))
        spread = torch.stack([part.std(1, correction=0) for part in parts], dim=1)
        self._spread = layout.by_tensor(spread).clamp_min_(torch.finfo(weights.dtype).tiny)
        floors = [max(floor, _SPARED * (1.0 - request.sparsity)) for request in requests]
        score = (weights.abs() - self._mean) / self._spread
        self._budget = GlobalBudget(layout, requests, timeline, score, floor=floors)

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        before = self._budget.mask.clone()
        reach = weights.abs() / torch.where(before, self._lower, self._upper)
        self._budget.score.copy_((reach - self._mean) / self._spread)
        self._budget.meet_()
        clock = self._timeline.clock
        probability = (1.0 + self._gamma * clock) ** -self._power
        looks = uniform(self._seeds, clock, 1, weights.dtype) < probability
        self._budget.mask.copy_(torch.where(looks, self._budget.mask, before))

    def state(self) -> dict[str, Tensor]:
        return {**self._budget.state(), "mean": self._mean, "spread": self._spread}
