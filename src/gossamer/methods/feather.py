"""Feather: magnitude pruning whose forward pass fades weights in and out.

Rule: T is the magnitude below which the budget of the step prunes, for the whole network. The layer uses
sign(w̃)·(|w̃|³ - T³)^⅓ where |w̃| > T, else 0: close to w̃ for large weights, continuous at T. w̃ follows the gradient
straight through; that of pruned weights is multiplied by θ, one half above 95 % sparsity, else 1. The sparsity rises
along a cubic in the first half of training; masks move to the end. With `power=1` and `rescale=True` this is ST-3: a
soft threshold, after which each tensor is divided by the share of Σ|w̃| that its kept weights have. References: Glentis
Georgoulakis et al. 2023, Feather: An Elegant Solution to Effective DNN Sparsification; Vanderschueren & De Vleeschouwer
2022, Are Straight-Through Gradients and Soft-Thresholding All You Need for Sparse Training? Ours: min_density protects
a fraction of each tensor; these weights are used as they are. θ keeps its final value throughout. ST-3's limit on the
norm of the gradient is left to the training loop (`clip`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, Step, column, expect, scale_pruned_
from gossamer.methods.budgets import GlobalBudget, GlobalThreshold, magnitude


@dataclass(frozen=True)
class FeatherOptions(Options):
    power: float = 3.0  # 1 is a soft threshold, infinity would be a hard one
    rescale: bool = False  # keep the mean magnitude of each tensor, as ST-3 does
    pruned_grad_scale: float | None = None  # θ; None: one half above 95 % sparsity, else 1

    def __post_init__(self) -> None:
        expect(
            self,
            power=(1 <= self.power < math.inf, "a number of at least 1"),
            pruned_grad_scale=(0 <= (self.pruned_grad_scale or 0) <= 1, "a number from 0 to 1, or none"),
        )


def fade(weights: Tensor, threshold: Tensor, power: float) -> Tensor:
    """sign(w)·(|w|^p - T^p)^(1/p) where |w| > T, else 0. Relative to T, so that powers do not underflow."""
    size = weights.abs()
    ratio = (threshold / size.clamp_min(torch.finfo(size.dtype).tiny)).clamp_max(1.0)
    return weights * (1.0 - ratio**power) ** (1.0 / power)


class Feather(GlobalThreshold[FeatherOptions]):
    name, title, options = "feather", "magnitude, faded in and out (Feather)", FeatherOptions
    reference = "Glentis Georgoulakis et al. 2023, Feather: An Elegant Solution to Effective DNN Sparsification"
    shared = ("power", "rescale")
    masked_forward = False
    usual_phases: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"warmup": "0it", "sparsify": "0.5run", "stabilise": "0.5run"}
    )

    def __init__(self, context: Context[FeatherOptions]) -> None:
        self._context, self._options = context, context.options[0]
        scales = [
            (0.5 if request.sparsity > 0.95 else 1.0) if scale is None else scale
            for request, scale in zip(context.requests, context.values("pruned_grad_scale"), strict=True)
        ]
        self._pruned_scale = column(scales, context.weights)
        self._threshold = torch.zeros_like(context.weights[:, :1])
        self._begin(GlobalBudget(context, magnitude(context.weights)))

    def apply_masks(self, weights: Tensor, out: Tensor) -> None:
        torch.mul(fade(weights, self._threshold, self._options.power), self.mask, out=out)
        if self._options.rescale:
            for part, raw, mask in zip(*map(self._context.layout.split, (out, weights, self.mask)), strict=True):
                kept, whole = (raw.abs() * mask).sum(1, keepdim=True), raw.abs().sum(1, keepdim=True)
                kept, whole = self._context.total(kept), self._context.total(whole)
                part.mul_(torch.where(kept > 0, whole / kept, 1.0))
        if self._budget.protected is not None:
            out.scatter_(1, self._budget.protected, weights.gather(1, self._budget.protected))

    def update_masks(self, step: Step) -> None:
        self.weight_gradient(step.gradient, step.weights)
        self._budget.score.copy_(step.weights.abs())
        self._threshold.copy_(self._budget.meet_().threshold[:, None])

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        scale_pruned_(gradient, self.mask, self._pruned_scale)

    def finalize(self, weights: Tensor) -> Tensor:
        """The weights become those that the forward pass used."""
        self._budget.score.copy_(weights.abs())
        self._threshold.copy_(self._budget.cut_().threshold[:, None])
        used = torch.empty_like(weights)
        self.apply_masks(weights, used)
        smallest = torch.finfo(weights.dtype).tiny * 2.0  # a kept weight at the threshold itself stays nonzero
        weights.copy_(torch.where(self.mask & (used == 0), weights.sign() * smallest, used))
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "threshold": self._threshold}
