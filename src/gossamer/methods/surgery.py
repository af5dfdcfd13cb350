"""Dynamic network surgery: two thresholds a layer, so that a connection between them stays what it is.

Rule: T = 0 where |w| < a, 1 where |w| ≥ b, unchanged between; a = 0.9·t, b = 1.1·t with t = μ + c·σ of the |w| of its
layer, c chosen by hand for each layer. w follows the gradient of w ⊙ T, also where T = 0 (splicing). Masks are looked
at with probability (1 + γ·iteration)^-power, less and less often.
Reference: Guo, Yao & Chen 2016, Dynamic Network Surgery for Efficient DNNs.
Ours: c is solved for in every look, so that every tensor keeps the same share of its connections, along our cubic: with
one c for the network layers without long tails lose all of theirs. So t is an order statistic of |w|/0.9 of those that
are there and |w|/1.1 of those that are not, and μ and σ do not matter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.budgets import EqualShares
from gossamer.methods.noise import uniform
from gossamer.methods.rule import DenseGradient, Layout, Options, Request, Timeline, column, expect, is_rate


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


class Surgery(DenseGradient[SurgeryOptions]):
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
        self._shares = EqualShares(layout, requests, timeline, weights)

    @property
    def mask(self) -> Tensor:
        return self._shares.mask

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        before = self.mask.clone()
        self._shares.meet_(self._reach(weights))
        clock = self._timeline.clock
        probability = (1.0 + self._gamma * clock) ** -self._power
        looks = uniform(self._seeds, clock, 1, weights.dtype) < probability
        self.mask.copy_(torch.where(looks, self.mask, before))

    def freeze_(self, weights: Tensor) -> Tensor:
        self._shares.cut_(self._reach(weights))
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self.mask}

    def _reach(self, weights: Tensor) -> Tensor:
        """The threshold t up to which a connection is there."""
        return weights.abs() / torch.where(self.mask, self._lower, self._upper)
