"""Narang's thresholds for recurrent networks: every tensor has a threshold that rises along two straight lines.

Rule: every `freq` steps, weights below ε become zero and do not return. With q the typical largest weight that is to
be pruned, and start, ramp and end the steps where the lines begin, change slope and end,

    θ = 2·q·freq / (2·(ramp - start) + 3·(end - ramp)),   φ = 1.5·θ
    ε = θ·(t - start + 1)/freq before the ramp,   (θ·(ramp - start + 1) + φ·(t - ramp + 1))/freq after it

so that ε ends at about q. As published, q is the 90th percentile of |w| of a layer of a trained dense network.
Reference: Narang et al. 2017, Exploring Sparsity in Recurrent Neural Networks.
Ours: q of a tensor is the quantile of its |w| in the warmed-up network at the requested sparsity. The published rule
has no budget. Here a common factor of all q is solved for (an order statistic of |w|/q) at the end of the lines, and no
earlier threshold prunes more than the last one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.budget import meet_budgets_
from gossamer.methods.base import Context, Options, expect
from gossamer.methods.timing import PrunedInStages


@dataclass(frozen=True)
class NarangOptions(Options):
    every: int = 100  # freq
    ramp: float = 0.25  # where the slope changes, as a fraction of the ramp; published: a quarter
    slope: float = 1.5  # φ/θ

    def __post_init__(self) -> None:
        expect(
            self,
            every=(self.every >= 1, "at least 1 step"),
            ramp=(0 <= self.ramp <= 1, "a number from 0 to 1"),
            slope=(0 < self.slope < math.inf, "a number above 0"),
        )


def threshold(step: int, end: int, *, ramp: int, slope: float) -> float:
    """ε/q after this many steps of lines that start at 0: the paper's equation with freq cancelled."""
    theta = 2.0 / (2.0 * ramp + 2.0 * slope * (end - ramp))
    if step < ramp:
        return theta * (step + 1)
    return theta * (ramp + 1) + slope * theta * (step - ramp + 1)


class Narang(PrunedInStages[NarangOptions]):
    name, title, options = "narang", "rising thresholds (Narang)", NarangOptions
    reference = "Narang et al. 2017, Exploring Sparsity in Recurrent Neural Networks"
    shared = ("every", "ramp", "slope")

    def __init__(self, context: Context[NarangOptions]) -> None:
        options, layout, weights = context.options[0], context.layout, context.weights
        self._schedule(context.timeline, options.every)
        self._ramp, self._slope = round(options.ramp * self._last), options.slope
        self._final = torch.tensor(context.keep, device=weights.device)
        sparsities = [request.sparsity for request in context.requests]
        typical = torch.stack([_quantiles(part.abs(), sparsities) for part in layout.split(weights)], dim=1)
        self._typical = layout.by_tensor(typical).clamp_min_(torch.finfo(weights.dtype).tiny)
        self.mask = torch.ones_like(weights, dtype=torch.bool)

    def _prune(self, weights: Tensor, step: int) -> None:
        score = (weights.abs() / self._typical).masked_fill_(~self.mask, -torch.inf)
        budget = self._final
        if step < self._last:
            above = score > threshold(step, self._last, ramp=self._ramp, slope=self._slope)
            budget = torch.maximum(above.sum(1), self._final)
        meet_budgets_(score, self.mask, budget)

    def state(self) -> dict[str, Tensor]:
        return {"mask": self.mask, "typical": self._typical}


def _quantiles(sizes: Tensor, sparsities: list[float]) -> Tensor:
    """For each row, the quantile at its sparsity."""
    count = sizes.shape[1]
    ranks = [min(count, max(1, round(sparsity * count))) for sparsity in sparsities]
    return torch.stack([row.kthvalue(rank).values for row, rank in zip(sizes, ranks, strict=True)])
