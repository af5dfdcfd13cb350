"""Soft threshold reparametrisation (STR): the threshold of each tensor is trained with the weights.

Rule: the layer uses S(w, s) = sign(w)·relu(|w| - σ(s)), one number s a tensor; both follow their true gradients:
∂L/∂w = ∂L/∂S where |w| > σ(s), else 0, and ∂L/∂s = -σ'(s)·Σ ∂L/∂S·sign(w) over the same weights. Published, s starts
far below zero and an L2 term, tuned by hand for each target, pulls it up.
Reference: Kusupati et al. 2020, Soft Threshold Weight Reparameterization for Learnable Sparsity.
Ours: instead of by the L2 term all s are pushed up together by as much as the budget of the step asks for, which can be
solved for: |w| > σ(s) is logit|w| - s > 0, so the push is an order statistic. s has a hundredth of the learning rate
of the weights: from a warmed-up network, where thresholds are not tiny, the published equal rate lets layers die out.
After the last mask step the thresholded weights are what is fine-tuned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.budgets import GlobalBudget
from gossamer.methods.rule import Layout, Options, Request, Rule, Timeline, column


@dataclass(frozen=True)
class STROptions(Options):
    start: float = -10.0  # of s: a threshold of 5e-5
    momentum: float = 0.9  # of s
    rate: float = 0.01  # of s, times the learning rate of the weights


def soft_threshold(weights: Tensor, threshold: Tensor) -> Tensor:
    return weights.sign() * (weights.abs() - threshold).relu_()


class STR(Rule[STROptions]):
    name, title, options = "str", "soft thresholds, one a layer (STR)", STROptions
    reference = "Kusupati et al. 2020, Soft Threshold Weight Reparameterization for Learnable Sparsity"

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[STROptions]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        self._layout, self._timeline = layout, timeline
        self._momentum = column([request.settings.momentum for request in requests], weights)
        self._rate = column([request.settings.rate for request in requests], weights)
        self._tensor = layout.tensor_of_each(weights.device)
        start = column([request.settings.start for request in requests], weights)
        self._s = start.repeat(1, len(layout.sizes))
        self._velocity = torch.zeros_like(self._s)
        # No floor: what a threshold lets through is decided by the threshold alone.
        self._budget = GlobalBudget(layout, requests, timeline, self._above(weights), floor=0.0)

    @property
    def mask(self) -> Tensor:
        return self._budget.mask

    def show_(self, weights: Tensor, out: Tensor) -> None:
        out.copy_(soft_threshold(weights, self._threshold()))

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(weights.abs() <= self._threshold(), 0.0)
        along = [part.sum(1) for part in self._layout.split(gradient * weights.sign())]
        sigma = self._s.sigmoid()
        self._velocity.mul_(self._momentum).sub_(torch.stack(along, dim=1) * sigma * (1.0 - sigma))
        self._s.sub_(self._velocity * self._timeline.rate * self._rate)
        self._budget.score.copy_(self._above(weights))
        self._s.add_(self._budget.meet_()[:, None])

    def freeze_(self, weights: Tensor) -> Tensor:
        self._budget.score.copy_(self._above(weights))
        push = self._budget.cut_()
        self._s.add_(push[:, None])
        weights.copy_(soft_threshold(weights, self._threshold()))
        return self._budget.mask

    def state(self) -> dict[str, Tensor]:
        return {**self._budget.state(), "s": self._s, "velocity": self._velocity}

    def _threshold(self) -> Tensor:
        return self._s.sigmoid().index_select(1, self._tensor)

    def _above(self, weights: Tensor) -> Tensor:
        """By how much s would have to rise for each connection to go."""
        limits = torch.finfo(weights.dtype)
        return torch.logit(weights.abs().clamp(limits.tiny, 1.0 - limits.eps)) - self._s.index_select(1, self._tensor)
