"""Soft threshold reparametrization (STR): the threshold of each tensor is trained with the weights.

Rule: the layer uses S(w, s) = sign(w)·relu(|w| - σ(s)), one number s per tensor; both follow their true gradients:
∂L/∂w = ∂L/∂S where |w| > σ(s), else 0, and ∂L/∂s = -σ'(s)·Σ ∂L/∂S·sign(w) over the same weights. As published, s starts
far below zero, and an L2 term, tuned for each target, pulls it up. Reference: Kusupati et al. 2020, Soft Threshold
Weight Reparameterization for Learnable Sparsity. Ours: instead of the L2 term, all s are raised together by as much as
the budget of the step requires. This can be solved for: |w| > σ(s) is logit|w| - s > 0, so the increase is an order
statistic. It has two consequences. First, tensors compete for the budget, so ∂L/∂s of a tensor is divided by its share
of the kept weights: thresholds are then in balance if single weights are equally valuable in every tensor. (Otherwise
whole tensors would have to be, and small tensors would be pruned entirely.) Second, nothing pulls s back, so its total
movement is limited for the whole run: its learning rate is that of the weights times `rate` over the number of mask
steps. No s rises above the value that keeps min_density of its tensor, which is updated at intervals and at the end;
the others then rise by more. After the last mask step the thresholded weights are fine-tuned.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.budget import Met
from gossamer.methods.base import Context, Options, Step, column, expect, is_rate, min_nonzeros
from gossamer.methods.budgets import BudgetedMethod, GlobalBudget, check_min_nonzeros

_MARGIN = 0.01  # in s: a tensor with only its largest weight keeps about a hundredth of it


@dataclass(frozen=True)
class STROptions(Options):
    start: float = -10.0  # of s: a threshold of 5e-5
    momentum: float = 0.9  # of s
    rate: float = 100.0  # of s, over all mask steps together, times the learning rate of the weights

    def __post_init__(self) -> None:
        expect(
            self,
            start=(abs(self.start) < math.inf, "a number"),
            momentum=(0 <= self.momentum < 1, "a number of at least 0 and below 1"),
            rate=(is_rate(self.rate), "a number of at least 0"),
        )


def soft_threshold(weights: Tensor, threshold: Tensor) -> Tensor:
    return weights.sign() * (weights.abs() - threshold).relu_()


class STR(BudgetedMethod[STROptions]):
    name, title, options = "str", "soft thresholds per layer (STR)", STROptions
    reference = "Kusupati et al. 2020, Soft Threshold Weight Reparameterization for Learnable Sparsity"
    masked_forward = False
    needs_rate = True

    def __init__(self, context: Context[STROptions]) -> None:
        layout, timeline, weights = context.layout, context.timeline, context.weights
        self._layout, self._timeline = layout, timeline
        self._least = min_nonzeros(layout.sizes, context.min_density)
        for target in context.targets:
            check_min_nonzeros(target, self._least)
        self._momentum = context.column("momentum")
        self._rate = column([rate / timeline.length for rate in context.values("rate")], weights)
        self._tensor = layout.tensor_of_each(weights.device)
        self._s = context.column("start").repeat(1, len(layout.sizes))
        self._velocity = torch.zeros_like(self._s)
        self._highest = self._leaving_the_least(weights)
        # The thresholds enforce min_density themselves, so the budget needs no protected weights.
        self._begin(GlobalBudget(context, self._above(weights), min_density=0.0))

    def apply_masks(self, weights: Tensor, out: Tensor) -> None:
        out.copy_(soft_threshold(weights, self._threshold()))

    def update_masks(self, step: Step) -> None:
        gradient, weights = step.gradient, step.weights
        self.weight_gradient(gradient, weights)
        along = self._by_tensor(gradient * weights.sign())
        kept = self._by_tensor(self.mask.to(weights.dtype)).clamp_min(1.0)
        sigma = self._s.sigmoid()
        slope = along * sigma * (1.0 - sigma) * (kept.mean(1, keepdim=True) / kept)
        self._velocity.mul_(self._momentum).sub_(slope)
        self._s.sub_(self._velocity * self._timeline.rate * self._rate)
        self._push_(weights, self._budget.meet_)

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(weights.abs() <= self._threshold(), 0.0)

    def topology_due(self, step: int) -> bool:
        return step % self._timeline.often(100) == 0

    def update_topology(self, weights: Tensor, step: int) -> None:
        self._highest.copy_(self._leaving_the_least(weights))

    def finalize(self, weights: Tensor) -> Tensor:
        self._highest.copy_(self._leaving_the_least(weights))
        self._push_(weights, self._budget.cut_)
        weights.copy_(soft_threshold(weights, self._threshold()))
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "s": self._s, "velocity": self._velocity, "highest": self._highest}

    def _push_(self, weights: Tensor, meet: Callable[[], Met]) -> None:
        """Raise all s by as much as the budget requires, but none above the value that keeps min_density of its
        tensor."""
        logits, highest = _logit(weights), self._highest
        if any(self._least):  # at most the current largest weight, as `highest` is some steps old
            largest = torch.stack([part.amax(1) for part in self._layout.split(logits)], dim=1)
            highest = torch.minimum(highest, largest - _MARGIN)
        torch.minimum(self._s, highest, out=self._s)
        safe = logits > highest.index_select(1, self._tensor)
        self._budget.score.copy_(self._above(weights).masked_fill_(safe, torch.inf))
        self._s.add_(meet().threshold[:, None])
        torch.minimum(self._s, highest, out=self._s)

    def _by_tensor(self, values: Tensor) -> Tensor:
        return torch.stack([part.sum(1) for part in self._layout.split(values)], dim=1)

    def _threshold(self) -> Tensor:
        return self._s.sigmoid().index_select(1, self._tensor)

    def _above(self, weights: Tensor) -> Tensor:
        """The increase of s that would prune each weight."""
        return _logit(weights) - self._s.index_select(1, self._tensor)

    def _leaving_the_least(self, weights: Tensor) -> Tensor:
        """For each tensor, the s that keeps only min_density of it: between the last kept weight and the next one."""
        found = []
        for part, number in zip(self._layout.split(_logit(weights)), self._least, strict=True):
            if number == part.shape[1]:
                found.append(part.amin(1) - 1.0)
            else:
                found.append(part.topk(number + 1, dim=1).values[:, -2:].mean(1))
        return torch.stack(found, dim=1)


def _logit(weights: Tensor) -> Tensor:
    limits = torch.finfo(weights.dtype)
    return torch.logit(weights.abs().clamp(limits.tiny, 1.0 - limits.eps))
