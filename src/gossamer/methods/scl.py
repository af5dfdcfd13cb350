"""Automatic Sparse Connectivity Learning (Tang et al.): the method of this library, for batched training.

Rule: every weight has a mask variable m̃; m = H(m̃); m̃ follows (∂L/∂w ⊙ w̃)·σ'(m̃), scaled, and λ1 pushes it down. In the
paper w̃ follows the dense gradient; here pruned weights follow the share `removed_gradient` of it. Masks start at |w̃|
and return to it by the share `anchor` per step, so that they remember 1/`anchor` steps. The learning rate of m̃ decays
to zero.
Ours: λ1 is solved for, so that the budget is met exactly, and the scale is one number for the network. With `decay` λ1
is fixed as in the paper and the sparsity is what comes out; `scale="batch"` is the paper's scale.
The numbers are those of `gossamer.Sparsifier` (tests/lab/batched/test_race.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gossamer import method
from gossamer.budget import triton_is_there
from gossamer.methods.budgets import GlobalBudget, MasksOfBudget, magnitude
from gossamer.methods.rule import (
    DenseGradient,
    Layout,
    Options,
    Request,
    Timeline,
    column,
    damp_removed_,
    expect,
    is_rate,
)
from gossamer.settings import ANNEALS

SCALES = ("none", "global", "batch")


@dataclass(frozen=True)
class SCLOptions(Options):
    mask_lr: float | None = None  # learning rate of the mask variables; None: method.mask_rate
    scale: str = "global"  # what the mask gradient is divided by: none, global, batch (per output feature)
    estimator: str = "identity"
    alpha: float = 0.1  # slope of leaky_relu, upper bound of clipped_relu
    anneal: str = "cosine"  # of mask_lr
    start_value: float | None = None  # one constant for all mask variables instead of |w̃|
    decay: float | None = None  # a fixed λ1 instead of the budget
    l2: float = 0.0  # λ2 in the mask gradient
    mask_momentum: float = 0.0
    removed_gradient: float | None = None  # None: method.removed_share
    anchor: float = 0.001
    anchor_cap: float = 3.0
    floor: float | None = None  # share of each tensor that is never removed; None: that of the comparison

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("estimator", self.estimator, tuple(method.ESTIMATORS)),
            ("scale", self.scale, SCALES),
            ("anneal", self.anneal, ANNEALS),
        ):
            if value not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
        expect(
            self,
            l2=(is_rate(self.l2), "a number of at least 0"),
            alpha=(0 < self.alpha < math.inf, "a number above 0"),
            mask_momentum=(0 <= self.mask_momentum < 1, "a number from 0 to below 1"),
            anchor=(0 <= self.anchor < 1, "a share from 0 to below 1"),
            anchor_cap=(self.anchor_cap == 0 or 1 <= self.anchor_cap < math.inf, "a number of at least 1, or 0"),
            start_value=(self.start_value is None or 0 < self.start_value < math.inf, "a number above 0, or none"),
            decay=(self.decay is None or is_rate(self.decay), "a number of at least 0, or none"),
            mask_lr=(self.mask_lr is None or is_rate(self.mask_lr), "a number of at least 0, or none"),
            removed_gradient=(0 <= (self.removed_gradient or 0.0) <= 1, "a number from 0 to 1, or none"),
            floor=(self.floor is None or 0 <= self.floor < 1, "a share from 0 to below 1, or none"),
        )

    def settled(self, *, mask_steps: int, left: float) -> "SCLOptions":
        """With every open setting chosen, for masks that learn for `mask_steps` and keep the share `left`."""
        known = left if self.decay is None else None
        found = method.settled(self.mask_lr, self.removed_gradient, steps=mask_steps, left=known)
        return replace(self, mask_lr=found["mask_lr"], removed_gradient=found["removed_gradient"])


class SCL(MasksOfBudget, DenseGradient[SCLOptions]):
    name, title, options = "scl", "gossamer (learned masks)", SCLOptions
    reference = "Tang et al., Automatic Sparse Connectivity Learning for Neural Networks"
    apart = ("scale", "estimator", "alpha", "decay", "l2", "floor")

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[SCLOptions]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        settings = [
            each.settings.settled(mask_steps=timeline.length, left=layout.keep(each.sparsity) / layout.count)
            for each in requests
        ]
        self._layout, self._timeline, self._shared = layout, timeline, settings[0]

        def every(name: str) -> list[Any]:
            return [getattr(each, name) for each in settings]

        self._rate = timeline.annealed(every("mask_lr"), every("anneal"))
        self._anchor = None
        if any(every("anchor")):
            anneals = ["constant" if each.decay is None else each.anneal for each in settings]
            self._anchor = timeline.annealed(every("anchor"), anneals)
        start = magnitude(weights)
        for row, value in enumerate(every("start_value")):
            if value is not None:
                start[row] = value
        own = self._shared.floor
        self._budget = GlobalBudget(layout, requests, timeline, start, floor=floor if own is None else own)
        momentum = any(every("mask_momentum"))
        self._momentum = column(every("mask_momentum"), weights) if momentum else None
        self._velocity = torch.zeros_like(start) if momentum else None
        self._removed = column(every("removed_gradient"), weights) if set(every("removed_gradient")) != {1.0} else None
        self._cap, self._level = column(every("anchor_cap"), weights), start.new_zeros(len(settings), 1)
        self._usual = weights.square().mean(1, keepdim=True).sqrt()
        usual = all(getattr(self._shared, name) == getattr(SCLOptions(), name) for name in self.apart[:-1])
        self._has_kernels = usual and not momentum and _on_gpu(weights)

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        rate = self._timeline.now(self._rate)
        share = None if self._anchor is None else self._timeline.now(self._anchor)
        cap = None if share is None else self._largest_anchor()
        if self._has_kernels:
            self._move_in_two_passes_(gradient, weights, rate, share, cap)
        else:
            self._move_(gradient, weights, rate, share, cap)
        if share is not None:
            self._level.mul_(1.0 - share)
        if self._shared.decay is None:
            self._level.add_(self._budget.meet_()[:, None])
            return
        self._level.add_(rate * self._shared.decay)
        self._budget.keep_floor_()
        torch.gt(self._budget.score, 0, out=self._budget.mask)  # Eq. (step)

    def _move_(self, gradient: Tensor, weights: Tensor, rate: Tensor, share: Tensor | None, cap: Tensor | None) -> None:
        """Move the mask variables, and scale the gradient of pruned weights."""
        shared, variable = self._shared, self._budget.score
        direction = method.mask_gradient(
            gradient, weights, variable, estimator=shared.estimator, alpha=shared.alpha, l2=shared.l2
        )  # Eq. (step_redefine)
        direction = self._scaled(direction)
        if self._removed is not None:
            damp_removed_(gradient, self.mask, self._removed)
        push = direction if shared.decay is None else direction + shared.decay  # Eq. (connectivity)
        if self._velocity is not None and self._momentum is not None:
            push = self._velocity.mul_(self._momentum).add_(push)
        variable.copy_(variable - push * rate)
        if share is not None and cap is not None:
            variable.lerp_(torch.minimum(magnitude(weights), cap), share)

    def _scaled(self, direction: Tensor) -> Tensor:
        """Eq. (grad_norm), from the mini-batch: over the root mean square of the network or of each output feature."""
        if self._shared.scale == "none":
            return direction
        if self._shared.scale == "global":
            return direction / self._divisor(direction.square().mean(1, keepdim=True))
        parts = zip(self._layout.split(direction), self._layout.shapes, strict=True)
        rows = [part.reshape(len(part), shape[0], -1) for part, shape in parts]
        return torch.cat([(row / self._divisor(row.square().mean(2, keepdim=True))).flatten(1) for row in rows], dim=1)

    @staticmethod
    def _divisor(mean_squares: Tensor) -> Tensor:
        return mean_squares.sqrt() + method.EPSILON

    def _move_in_two_passes_(
        self, gradient: Tensor, weights: Tensor, rate: Tensor, share: Tensor | None, cap: Tensor | None
    ) -> None:
        """The same with fused kernels, for the default settings."""
        from gossamer.methods.scl_triton import mean_squares_on_gpu, move_on_gpu_  # needs Triton

        move_on_gpu_(
            gradient,
            weights,
            self._budget.score,
            self.mask,
            divisor=self._divisor(mean_squares_on_gpu(gradient, weights)),
            rate=rate,
            anchor=share,
            cap=cap,
            removed=self._removed,
        )

    def _largest_anchor(self) -> Tensor:
        """The largest |w̃| that counts in the pull of m̃ towards it."""
        return torch.where(self._cap > 0, self._cap * torch.maximum(self._level, self._usual), torch.inf)

    def freeze_(self, weights: Tensor) -> Tensor:
        if self._shared.decay is None:
            self._budget.cut_()
        return self._budget.mask

    def state(self) -> dict[str, Tensor]:
        found = self._budget.state() | {"level": self._level, "usual": self._usual}
        return found if self._velocity is None else {**found, "velocity": self._velocity}


def _on_gpu(weights: Tensor) -> bool:
    return weights.is_cuda and weights.dtype == torch.float32 and weights.stride(1) == 1 and triton_is_there()
