"""Dynamic network surgery: two thresholds per layer; the mask of a weight between them does not change.

Rule: T = 0 where |w| < a, 1 where |w| ≥ b, unchanged in between; a = 0.9·t, b = 1.1·t with t = μ + c·σ of the |w| of
its layer, and c set by hand for each. w follows the gradient of w ⊙ T, also where T = 0 (splicing). Masks are updated
with the decreasing probability (1 + γ·iteration)^-power.
Reference: Guo, Yao & Chen 2016, Dynamic Network Surgery for Efficient DNNs.
Ours: c is one number for the whole network, solved for in every update so that the budget is met: a weight is kept
if (u - μ)/σ is above c, where u is |w|/0.9 for kept weights and |w|/1.1 for pruned ones. μ and σ are those of the
warmed-up network instead of a trained one, and the budget follows our cubic instead of starting at the full
thresholds. A layer without a long tail would lose all its weights to the others, so each tensor keeps at least half of
the target density.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, Step, expect, is_rate
from gossamer.methods.budgets import GlobalBudget, GlobalThreshold
from gossamer.methods.noise import uniform

_SPARED = 0.5  # of the target density


@dataclass(frozen=True)
class SurgeryOptions(Options):
    lower: float = 0.9  # a/t
    upper: float = 1.1  # b/t
    gamma: float = 1e-4  # of the probability of an update
    power: float = 1.0

    def __post_init__(self) -> None:
        expect(
            self,
            lower=(0 < self.lower <= self.upper, "a number above 0 and up to upper"),
            upper=(0 < self.upper < math.inf, "a number above 0"),
            gamma=(is_rate(self.gamma), "a number of at least 0"),
            power=(is_rate(self.power), "a number of at least 0"),
        )


class Surgery(GlobalThreshold[SurgeryOptions]):
    name, title, options = "surgery", "dynamic network surgery (Guo)", SurgeryOptions
    reference = "Guo et al. 2016, Dynamic Network Surgery for Efficient DNNs"
    shardable = any_order = False  # μ and σ need whole tensors

    def __init__(self, context: Context[SurgeryOptions]) -> None:
        layout, weights = context.layout, context.weights
        self._timeline, self._seeds = context.timeline, context.seeds
        self._lower, self._upper = context.column("lower"), context.column("upper")
        self._gamma, self._power = context.column("gamma"), context.column("power")
        parts = [part.abs() for part in layout.split(weights)]
        self._mean = layout.by_tensor(torch.stack([part.mean(1) for part in parts], dim=1))
        spread = torch.stack([part.std(1, correction=0) for part in parts], dim=1)
        self._spread = layout.by_tensor(spread).clamp_min_(torch.finfo(weights.dtype).tiny)
        spared = [max(context.min_density, _SPARED * (1.0 - request.sparsity)) for request in context.requests]
        score = (weights.abs() - self._mean) / self._spread
        self._begin(GlobalBudget(context, score, min_density=spared))

    def update_masks(self, step: Step) -> None:
        before = self.mask.clone()
        reach = step.weights.abs() / torch.where(before, self._lower, self._upper)
        self._budget.score.copy_((reach - self._mean) / self._spread)
        self._budget.meet_()
        clock = self._timeline.clock
        probability = (1.0 + self._gamma * clock) ** -self._power
        updates = uniform(self._seeds, clock, 1, step.weights.dtype) < probability
        self.mask.copy_(torch.where(updates, self.mask, before))

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"mean": self._mean, "spread": self._spread}
