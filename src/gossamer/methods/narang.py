"""Narang's thresholds for recurrent networks: every tensor has a threshold that rises along two straight lines.

Rule: every `freq` steps what is below ε goes to zero and does not return. With q the typical largest weight that shall
go, start, ramp and end the steps where the lines begin, change slope and end,

    θ = 2·q·freq / (2·(ramp - start) + 3·(end - ramp)),   φ = 1.5·θ
    ε = θ·(t - start + 1)/freq before the ramp,   (θ·(ramp - start + 1) + φ·(t - ramp + 1))/freq after it

so that ε ends at about q. Published: q is the 90th percentile of |w| of a layer of a trained dense network.
Reference: Narang et al. 2017, Exploring Sparsity in Recurrent Neural Networks.
Ours: q of a tensor is the quantile of its |w| in the warmed-up network at the sparsity that is asked for. The published
rule has no budget and its result is off-round; here a common factor of all q is solved for (an order statistic of
|w|/q) where the lines end, and no earlier threshold takes more than that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.budget import meet_budgets_
from gossamer.methods.rule import Layout, Options, RemovedIsZero, Request, Timeline, expect


@dataclass(frozen=True)
class NarangOptions(Options):
    every: int = 100  # steps between two looks at the thresholds: freq
    ramp: float = 0.25  # where the slope changes, as a share of the way; published: a quarter
    slope: float = 1.5  # φ/θ

    def __post_init__(self) -> None:
        expect(
            self,
            every=(self.every >= 1, "at least 1 step"),
            ramp=(0 <= self.ramp <= 1, "a share from 0 to 1"),
            slope=(0 < self.slope < math.inf, "a number above 0"),
        )


def threshold(step: int, end: int, *, ramp: int, slope: float) -> float:
    """ε/q after so many steps of the lines that start at 0: Eq. of the paper with freq cancelled."""
    theta = 2.0 / (2.0 * ramp + 2.0 * slope * (end - ramp))
    if step < ramp:
        return theta * (step + 1)
    return theta * (ramp + 1) + slope * theta * (step - ramp + 1)


class Narang(RemovedIsZero[NarangOptions]):
    name, title, options = "narang", "rising thresholds (Narang)", NarangOptions
    reference = "Narang et al. 2017, Exploring Sparsity in Recurrent Neural Networks"
    apart = ("every", "ramp", "slope")

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[NarangOptions]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        settings = requests[0].settings
        self._end = timeline.plan.sparsify
        self._ramp, self._slope = round(settings.ramp * self._end), settings.slope
        self._every = timeline.often(settings.every)
        self._final = torch.tensor([layout.keep(request.sparsity) for request in requests], device=weights.device)
        typical = [
            torch.stack(
                [
                    row.abs().kthvalue(_rank(row.numel(), each.sparsity)).values
                    for row, each in zip(part, requests, strict=True)
                ]
            )
            for part in layout.split(weights)
        ]
        self._typical = layout.by_tensor(torch.stack(typical, dim=1)).clamp_min_(torch.finfo(weights.dtype).tiny)
        self._mask = torch.ones_like(weights, dtype=torch.bool)

    @property
    def mask(self) -> Tensor:
        return self._mask

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(~self._mask, 0.0)

    def due(self, step: int) -> bool:
        return step <= self._end and (step % self._every == 0 or step == self._end)

    def refresh_(self, weights: Tensor, step: int) -> None:
        if step >= self._end:
            self._cut(weights, self._final)
            return
        score = self._score(weights)
        above = (score > threshold(step, self._end, ramp=self._ramp, slope=self._slope)).sum(1)
        self._cut(weights, torch.maximum(above, self._final))

    def freeze_(self, weights: Tensor) -> Tensor:
        self._cut(weights, self._final)
        return self._mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self._mask, "typical": self._typical}

    def _score(self, weights: Tensor) -> Tensor:
        return (weights.abs() / self._typical).masked_fill_(~self._mask, -torch.inf)

    def _cut(self, weights: Tensor, budget: Tensor) -> None:
        meet_budgets_(self._score(weights), self._mask, budget)
        weights.masked_fill_(~self._mask, 0.0)


def _rank(size: int, share: float) -> int:
    return min(size, max(1, round(share * size)))
