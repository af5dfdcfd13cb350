"""Lottery tickets and learning-rate rewinding: train, cut once, train again as if from an earlier moment.

Rule: the network is trained dense until its learning rate has come down, the smallest |w| of the whole network go for
good, and the rest trains again with the learning rate of the beginning. `rewind="rate"` goes on from the trained values
(learning-rate rewinding); `rewind="weights"` goes back to those at the end of the warm-up (the lottery ticket with late
resetting).
References: Frankle et al. 2019/2020, lottery tickets with rewinding; Renda, Frankle & Carbin 2020, Comparing Rewinding
and Fine-tuning.
Ours: at equal epochs there is room for one cut only, not for rounds of 20 %: it is made in the middle of the mask
phases (half-way through the run by default), the learning rate falls to zero before it and starts again after it. Only
connections go back in time: biases and norms keep their values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer import method
from gossamer.methods.budgets import GlobalBudget, magnitude
from gossamer.methods.rule import Layout, Options, RemovedIsZero, Request, Timeline
from gossamer.schedule import Plan

REWINDS = ("rate", "weights")


@dataclass(frozen=True)
class LotteryOptions(Options):
    rewind: str = "rate"

    def __post_init__(self) -> None:
        if self.rewind not in REWINDS:
            raise ValueError(f"rewind: expected one of {', '.join(REWINDS)}, got {self.rewind!r}")


def cut_at(plan: Plan) -> int:
    """The step of the cut, counted from where masks begin."""
    return max(1, (plan.sparsify + plan.stabilise) // 2)


def rewound(plan: Plan, step: int, *, shared: Callable[[int], float], peak: float) -> float:
    """The learning rate of a run that is rewound: `shared` in the warm-up, down to zero, and again from the peak."""
    start, cut = plan.warmup, plan.warmup + cut_at(plan)
    if step < start:
        return shared(step)
    if step < cut:
        return shared(start) * method.cosine((step - start) / (cut - start))
    return peak * method.cosine((step - cut) / max(1, plan.total - cut))


class Lottery(RemovedIsZero[LotteryOptions]):
    name, title, options = "lottery", "one cut, learning rate rewound (Renda)", LotteryOptions
    reference = "Renda et al. 2020, Comparing Rewinding and Fine-tuning in Neural Network Pruning"
    apart = ("rewind",)
    rewinds = True

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[LotteryOptions]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        self._cut_at = cut_at(timeline.plan)
        self._budget = GlobalBudget(layout, requests, timeline, magnitude(weights), floor=floor, ramp="none")
        self._early = weights.clone() if requests[0].settings.rewind == "weights" else None

    @property
    def mask(self) -> Tensor:
        return self._budget.mask

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(~self._budget.mask, 0.0)

    def due(self, step: int) -> bool:
        return step == self._cut_at

    def refresh_(self, weights: Tensor, step: int) -> Tensor:
        self._cut(weights)
        if self._early is not None:
            weights.copy_(self._early)
        weights.masked_fill_(~self._budget.mask, 0.0)
        return torch.ones_like(self._budget.mask)  # a second training begins: all momentum is forgotten

    def freeze_(self, weights: Tensor) -> Tensor:
        if bool(self._budget.mask.all()):
            self._cut(weights)  # the run ended before the cut
        return self._budget.mask

    def state(self) -> dict[str, Tensor]:
        state = self._budget.state()
        return state if self._early is None else {**state, "early": self._early}

    def _cut(self, weights: Tensor) -> None:
        self._budget.score.copy_(weights.abs())
        self._budget.choose_floor_()
        self._budget.cut_()
