"""Automatic Sparse Connectivity Learning (Tang et al.): the method of this library, on the rows of a race.

Rule: every weight has a mask variable m̃; m = H(m̃); m̃ follows (∂L/∂w ⊙ w̃)·σ'(m̃), scaled, and λ1 pushes it down; w̃
follows the dense gradient in the paper; here, a part of it while it is removed. Masks start at |w̃| and go back to it by
the share `anchor` a step, so that they remember 1/`anchor` steps; the learning rate of m̃ goes to zero.
Ours: λ1 is solved for, so that the budget is met exactly, and the scale is one number for the network. With `decay` λ1
is fixed as in the paper and the sparsity is what comes out; `feature_power=1, global_power=0` is the paper's scale.
The same numbers as `gossamer.Sparsifier`, which is what `gossamer train` uses (tests/side_by_side/test_race.py).

To be tried out; each has a default that changes nothing. With d the mask gradient, v̄ the running mean of d² with decay
`second_moment`, u the mean of m̃ at the start:
    direction   d, or its running mean (`mask_momentum`), over (√v̄ + ε)^`noise_power`: with both, Adam; then the scales
                of features, layers and network, whose mean squares may be running means (`scale_memory`)
    score       what the budget sees: m̃, or its running mean (`score_memory`), + u·`curvature`·√v̄ / mean √v̄ (√v̄ is |w̃|
                times the root of the diagonal Fisher information: what the loss would rise by, which the mean of d does
                not tell), + u·`hysteresis` for what is kept already
    mask gradient   of what is kept at w̃ − `midpoint`·η·g. Where noise pulls weights to and fro around their best,
                E[g·w̃] = η/2·E[g²]/(1 − momentum), so that masks sink by the noise of their weights, in long runs and
                first layers most of all; `midpoint` = 1/2/(1 − momentum) takes that out. sgn(w̃)·|w̃|^`weight_power` in
                the place of w̃: 0 is the sign rule of AutoPrune, with which small weights come back as easily as others
    anchor      draws m̃ to |w̃|, at most to `anchor_cap` times the level below which weights go by their size, or times
                the root mean square of w̃ at the start where that is more; it stays, or comes down with the learning
                rate of m̃ (`anchor_anneal`)
    gradient    of what is removed, times `removed_gradient` (1 in the paper; none: by the sparsity asked for), in rows
                that are sparser than `removed_gradient_above`
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gossamer import method
from gossamer.budget import triton_is_there
from gossamer.methods.budgets import RAMPS, GlobalBudget, MasksOfBudget, layer_magnitude, magnitude
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
from gossamer.methods.running import RunningMean, Scale
from gossamer.settings import ANNEALS

STARTS = ("magnitude", "layer_magnitude")


@dataclass(frozen=True)
class SCLOptions(Options):
    mask_lr: float | None = None  # learning rate of the mask variables; none: method.mask_rate
    global_power: float = 1.0  # of the scale over the whole network: 0 leaves the mask gradient raw
    feature_power: float = 0.0  # of the scale of each output feature
    estimator: str = "identity"
    alpha: float = 0.1  # slope of leaky_relu, upper bound of clipped_relu
    anneal: str = "cosine"  # of mask_lr
    start_value: float | None = None  # one constant for all mask variables instead of |w̃|
    decay: float | None = None  # a fixed λ1 instead of the budget
    l2: float = 0.0  # λ2 in the mask gradient
    layer_power: float = 0.0  # of the scale of each tensor
    scale_memory: float = 0.0  # decay of the running means of the scales: 0 takes those of the step
    mask_momentum: float = 0.0
    noise_power: float = 0.0
    second_moment: float = 0.999
    curvature: float = 0.0
    score_memory: float = 0.0
    hysteresis: float = 0.0
    removed_gradient: float | None = None  # method.removed_share
    removed_gradient_above: float = 0.0
    midpoint: float = 0.0
    weight_power: float = 1.0
    anchor: float = 0.001
    anchor_anneal: str = "constant"  # with a fixed λ1 always that of mask_lr, as else all masks would return
    anchor_cap: float = 3.0
    start: str = "magnitude"  # layer_magnitude: over the root mean square of its tensor
    ramp: str = "cubic"  # shape of the budget on its way to the target
    ramp_share: float = 1.0  # of the sparsify phase, at the end of which the target is met; above 1 it goes on
    floor: float | None = None  # share of each tensor that is never removed; None: that of the race

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("estimator", self.estimator, tuple(method.ESTIMATORS)),
            ("anneal", self.anneal, ANNEALS),
            ("anchor_anneal", self.anchor_anneal, ANNEALS),
            ("start", self.start, STARTS),
            ("ramp", self.ramp, RAMPS),
        ):
            if value not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
        for name in ("scale_memory", "mask_momentum", "second_moment", "score_memory", "anchor"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: expected a decay from 0 to below 1, got {getattr(self, name)}")
        rates = (
            "global_power",
            "feature_power",
            "layer_power",
            "noise_power",
            "l2",
            "curvature",
            "hysteresis",
            "midpoint",
        )
        expect(
            self,
            **{name: (is_rate(getattr(self, name)), "a number of at least 0") for name in rates},
            alpha=(0 < self.alpha < math.inf, "a number above 0"),
            anchor_cap=(self.anchor_cap == 0 or 1 <= self.anchor_cap < math.inf, "a number of at least 1, or 0"),
            start_value=(self.start_value is None or 0 < self.start_value < math.inf, "a number above 0, or none"),
            decay=(self.decay is None or is_rate(self.decay), "a number of at least 0, or none"),
            mask_lr=(self.mask_lr is None or is_rate(self.mask_lr), "a number of at least 0, or none"),
            removed_gradient=(0 <= (self.removed_gradient or 0.0) <= 1, "a number from 0 to 1, or none"),
            removed_gradient_above=(0 <= self.removed_gradient_above <= 1, "a number from 0 to 1"),
            floor=(self.floor is None or 0 <= self.floor < 1, "a share from 0 to below 1, or none"),
            ramp_share=(0 < self.ramp_share < math.inf, "a number above 0"),
            weight_power=(
                is_rate(self.weight_power) and (self.weight_power == 1 or not self.l2),
                "a number of at least 0, and 1 where l2 is not 0",
            ),
        )

    def settled(self, *, mask_steps: int, left: float) -> "SCLOptions":
        """With what is left open, for a run whose masks learn for so many steps and leave that share of connections."""
        known = left if self.decay is None else None
        found = method.settled(self.mask_lr, self.removed_gradient, steps=mask_steps, left=known)
        return replace(self, mask_lr=found["mask_lr"], removed_gradient=found["removed_gradient"])


class SCL(MasksOfBudget, DenseGradient[SCLOptions]):
    name, title, options = "scl", "gossamer (learned masks)", SCLOptions
    reference = "Tang et al., Automatic Sparse Connectivity Learning for Neural Networks"
    apart = ("estimator", "alpha", "decay", "l2", "floor")

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
        self._timeline = timeline
        self._estimator, self._alpha, self._decay = settings[0].estimator, settings[0].alpha, settings[0].decay
        self._l2 = settings[0].l2

        def every(name: str) -> list[Any]:
            return [getattr(each, name) for each in settings]

        def each_row(name: str) -> Tensor:
            return column(every(name), weights)

        def any_row(*names: str) -> bool:
            """Whether some row has something else than the default."""
            return any(getattr(each, name) != getattr(SCLOptions(), name) for each in settings for name in names)

        self._rate = timeline.annealed(every("mask_lr"), every("anneal"))
        start = self._start(weights, layout, settings)
        own = settings[0].floor
        self._budget = GlobalBudget(
            layout,
            requests,
            timeline,
            start,
            floor=floor if own is None else own,
            ramp=every("ramp"),
            ramp_share=every("ramp_share"),
        )
        memory = each_row("scale_memory") if any_row("scale_memory") else None
        powers = {"feature": "feature_power", "layer": "layer_power", "network": "global_power"}
        self._scales = {
            kind: Scale.over(kind, layout, each_row(power), memory, timeline)
            for kind, power in powers.items()
            if kind == "network" or any_row(power)
        }
        self._mean = RunningMean(start, each_row("mask_momentum"), timeline) if any_row("mask_momentum") else None
        noisy = any_row("noise_power", "curvature")
        self._square = RunningMean(start, each_row("second_moment"), timeline) if noisy else None
        self._noise_power = each_row("noise_power")
        # The budget lowers its score in place; where that is not m̃ itself, m̃ is kept beside it.
        apart = any_row("curvature", "hysteresis", "score_memory")
        self._variable = start.clone() if apart else self._budget.score
        self._apart = apart
        self._memory = RunningMean(start, each_row("score_memory"), timeline) if apart else None
        self._unit = start.mean(1, keepdim=True)
        self._curvature, self._hysteresis = each_row("curvature"), each_row("hysteresis")
        self._midpoint = each_row("midpoint") if any_row("midpoint") else None
        self._weight_power = each_row("weight_power") if any_row("weight_power") else None
        self._cap, self._level = each_row("anchor_cap"), start.new_zeros(len(settings), 1)
        self._usual = weights.square().mean(1, keepdim=True).sqrt()
        anneals = [each.anchor_anneal if each.decay is None else each.anneal for each in settings]
        anchored = any(each.anchor for each in settings)
        self._anchor = timeline.annealed([each.anchor for each in settings], anneals) if anchored else None
        damped = any(each.removed_gradient != 1.0 for each in settings)
        self._removed = each_row("removed_gradient") if damped else None
        self._removed_above = each_row("removed_gradient_above") if any_row("removed_gradient_above") else None
        usual = not any_row("feature_power", "layer_power", "scale_memory", "estimator", "l2", "decay", "weight_power")
        usual = usual and not any_row("midpoint", "mask_momentum", "removed_gradient_above")
        self._has_kernels = usual and not noisy and not apart and _on_gpu(weights)

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        rate = self._timeline.now(self._rate)
        share = None if self._anchor is None else self._timeline.now(self._anchor)
        cap = None if share is None else self._largest_anchor()
        if self._has_kernels:
            self._move_in_two_passes_(gradient, weights, rate, share, cap)
            deviation = None
        else:
            deviation = self._move_(gradient, weights, rate, share, cap)
        if share is not None:
            self._level.mul_(1.0 - share)
        if self._apart:
            self._budget.score.copy_(self._score(deviation))
        if self._decay is None:
            lowered = self._budget.meet_()
            self._level.add_(lowered[:, None])
            if self._apart:
                self._lower_(lowered[:, None])
            return
        self._level.add_(rate * self._decay)
        self._budget.keep_floor_()
        torch.gt(self._budget.score, 0, out=self._budget.mask)  # Eq. (step)

    def _move_(
        self, gradient: Tensor, weights: Tensor, rate: Tensor, share: Tensor | None, cap: Tensor | None
    ) -> Tensor | None:
        """Move the mask variables and damp the gradient. Returns √v̄, where that is kept."""
        direction = method.mask_gradient(
            gradient,
            self._weighed(self._halfway(gradient, weights)),
            self._variable,
            estimator=self._estimator,
            alpha=self._alpha,
            l2=self._l2,
        )  # Eq. (step_redefine)
        deviation = None if self._square is None else self._square.update_(direction.square()).sqrt()
        if self._mean is not None:
            direction = self._mean.update_(direction)
        if deviation is not None:
            direction = direction / (deviation + method.EPSILON) ** self._noise_power
        for scale in self._scales.values():
            direction = scale(direction)
        if self._removed is not None:
            self._damp_(gradient, self._removed)
        push = direction if self._decay is None else direction + self._decay  # Eq. (connectivity)
        self._variable.copy_(self._variable - push * rate)
        if share is not None and cap is not None:
            self._variable.lerp_(torch.minimum(magnitude(weights), cap), share)
        return deviation

    def _move_in_two_passes_(
        self, gradient: Tensor, weights: Tensor, rate: Tensor, share: Tensor | None, cap: Tensor | None
    ) -> None:
        """The same with fused kernels, where nothing is to be tried out."""
        from gossamer.methods.scl_triton import mean_squares_on_gpu, move_on_gpu_  # needs Triton

        divisor = self._scales["network"].sizes(mean_squares_on_gpu(gradient, weights))
        move_on_gpu_(
            gradient,
            weights,
            self._variable,
            self.mask,
            divisor=divisor,
            rate=rate,
            anchor=share,
            cap=cap,
            removed=self._removed,
        )

    def _largest_anchor(self) -> Tensor:
        """Up to which |w̃| draws m̃."""
        return torch.where(self._cap > 0, self._cap * torch.maximum(self._level, self._usual), torch.inf)

    def freeze_(self, weights: Tensor) -> Tensor:
        if self._decay is None:
            self._budget.cut_()
        return self._budget.mask

    def state(self) -> dict[str, Tensor]:
        means = {f"{kind}_squares": scale.squares for kind, scale in self._scales.items()}
        means |= {"mean": self._mean, "square": self._square, "memory": self._memory}
        found = self._budget.state() | {name: mean.value for name, mean in means.items() if mean is not None}
        found |= {"level": self._level, "usual": self._usual}
        return {**found, "variable": self._variable, "unit": self._unit} if self._apart else found

    def _halfway(self, gradient: Tensor, weights: Tensor) -> Tensor:
        """The weight variables, and where they are kept, how they are on the way that this gradient takes them."""
        if self._midpoint is None:
            return weights
        way = gradient * (self._midpoint * self._timeline.rate)
        return torch.where(self.mask, weights - way, weights)

    def _weighed(self, weights: Tensor) -> Tensor:
        """sgn(w̃)·|w̃|^power"""
        return weights if self._weight_power is None else weights.sign() * weights.abs() ** self._weight_power

    def _score(self, deviation: Tensor | None) -> Tensor:
        assert self._memory is not None
        score = self._memory.update_(self._variable) + self._unit * self._hysteresis * self.mask
        if deviation is None:
            return score
        share = deviation / (deviation.mean(1, keepdim=True) + method.EPSILON)
        return score + self._unit * self._curvature * share

    def _lower_(self, threshold: Tensor) -> None:
        """λ1 acts on the mask variables also where the budget sees something else."""
        assert self._memory is not None
        self._variable.sub_(threshold)
        self._memory.value.sub_(threshold)

    def _damp_(self, gradient: Tensor, share: Tensor) -> None:
        if self._removed_above is not None:
            removed = (~self.mask).sum(1, keepdim=True)
            share = torch.where(removed >= self._removed_above * gradient.shape[1], share, torch.ones_like(share))
        damp_removed_(gradient, self.mask, share)

    @staticmethod
    def _start(weights: Tensor, layout: Layout, settings: Sequence[SCLOptions]) -> Tensor:
        start = magnitude(weights)
        for row, each in enumerate(settings):
            if each.start_value is not None:
                start[row] = each.start_value
            elif each.start == "layer_magnitude":
                start[row] = layer_magnitude(weights[row : row + 1], layout)[0]
        return start


def _on_gpu(weights: Tensor) -> bool:
    return weights.is_cuda and weights.dtype == torch.float32 and weights.stride(1) == 1 and triton_is_there()
