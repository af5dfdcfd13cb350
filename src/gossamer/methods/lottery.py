"""Lottery tickets and learning-rate rewinding: train, prune once, and train again from an earlier step.

Rule: the network is trained densely until its learning rate has fallen, the smallest |w| of the whole network are
permanently pruned, and the rest is trained again with the initial learning rate. `rewind="rate"` continues from the
trained weights (learning-rate rewinding); `rewind="weights"` returns to those at the end of the warm-up (the lottery
ticket with late resetting).
References: Frankle et al. 2019/2020, lottery tickets with rewinding; Renda, Frankle & Carbin 2020, Comparing Rewinding
and Fine-tuning.
Ours: with equal epochs there is time to prune only once, not in rounds of 20 %. It happens in the middle of the mask
phases (half-way through the run by default); the learning rate falls to zero before it and restarts after it. Only
prunable weights are rewound: biases and norms keep their values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, expect
from gossamer.methods.budgets import BudgetedMethod, GlobalBudget, magnitude
from gossamer.methods.timing import PrunedOnce
from gossamer.schedule import Plan, cosine

REWINDS = ("rate", "weights")


@dataclass(frozen=True)
class LotteryOptions(Options):
    rewind: str = "rate"

    def __post_init__(self) -> None:
        expect(self, rewind=(self.rewind in REWINDS, f"one of {', '.join(REWINDS)}"))


def cut_at(plan: Plan) -> int:
    """The step of the mask phases at which weights are pruned."""
    return max(1, (plan.sparsify + plan.stabilise) // 2)


def rewound(plan: Plan, step: int, *, shared: Callable[[int], float], peak: float) -> float:
    """The rewound learning rate: `shared` in the warm-up, then down to zero, then again from the peak."""
    start, cut = plan.warmup, plan.warmup + cut_at(plan)
    if step < start:
        return shared(step)
    if step < cut:
        return shared(start) * cosine((step - start) / (cut - start))
    return peak * cosine((step - cut) / max(1, plan.total - cut))


class Lottery(BudgetedMethod[LotteryOptions], PrunedOnce[LotteryOptions]):
    name, title, options = "lottery", "one cut, learning rate rewound (Renda)", LotteryOptions
    reference = "Renda et al. 2020, Comparing Rewinding and Fine-tuning in Neural Network Pruning"
    shared = ("rewind",)
    rewinds = True

    def __init__(self, context: Context[LotteryOptions]) -> None:
        self._prune_after = cut_at(context.timeline.plan)
        self._begin(GlobalBudget(context, magnitude(context.weights), ramp="none"))
        self._early = context.weights.clone() if context.options[0].rewind == "weights" else None

    def update_topology(self, weights: Tensor, step: int) -> Tensor:
        super().update_topology(weights, step)
        if self._early is not None:
            weights.copy_(self._early.masked_fill(~self.mask, 0.0))
        return torch.ones_like(self.mask)  # a second training begins: the state of the optimizer is reset

    def _prune(self, weights: Tensor) -> None:
        self._budget.score.copy_(weights.abs())
        self._budget.protect_()
        self._budget.cut_()

    def state(self) -> dict[str, Tensor]:
        return super().state() if self._early is None else {**super().state(), "early": self._early}
