"""Automatic Sparse Connectivity Learning (Tang et al.): the method of this library, on the rows of a race.

Rule: every weight has a mask variable m̃; m = H(m̃); m̃ follows (∂L/∂w ⊙ w̃)·σ'(m̃), scaled, and λ1 pushes it down; w̃
follows the dense gradient. Masks start at |w̃|, the learning rate of m̃ goes to zero.
Ours: λ1 is solved for, so that the budget is met exactly, and the scale is one number for the network. With `decay` λ1
is fixed as in the paper and the sparsity is what comes out; `feature_power=1, global_power=0` is the paper's scale.
The same numbers as `gossamer.Sparsifier`, which is what `gossamer train` uses (tests/side_by_side/test_race.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer import method
from gossamer.methods.budgets import GlobalBudget, magnitude
from gossamer.methods.rule import DenseGradient, Layout, Options, Request, Timeline, column
from gossamer.settings import ANNEALS


@dataclass(frozen=True)
class SCLOptions(Options):
    mask_lr: float = 0.01  # learning rate of the mask variables
    global_power: float = 1.0  # of the scale over the whole network: 0 leaves the mask gradient raw
    feature_power: float = 0.0  # of the scale of each output feature
    estimator: str = "identity"
    alpha: float = 0.1  # slope of leaky_relu, upper bound of clipped_relu
    anneal: str = "cosine"  # of mask_lr
    start_value: float | None = None  # one constant for all mask variables instead of |w̃|
    decay: float | None = None  # a fixed λ1 instead of the budget
    l2: float = 0.0  # λ2 in the mask gradient

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("estimator", self.estimator, tuple(method.ESTIMATORS)),
            ("anneal", self.anneal, ANNEALS),
        ):
            if value not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


class SCL(DenseGradient[SCLOptions]):
    name, title, options = "scl", "gossamer (learned masks)", SCLOptions
    reference = "Tang et al., Automatic Sparse Connectivity Learning for Neural Networks"
    apart = ("estimator", "alpha", "decay", "l2")

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[SCLOptions]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        settings = [request.settings for request in requests]
        self._layout, self._timeline = layout, timeline
        self._global_power = column([each.global_power for each in settings], weights)
        self._feature_power = column([each.feature_power for each in settings], weights)
        self._uses_features = any(each.feature_power for each in settings)
        self._estimator, self._alpha, self._decay = settings[0].estimator, settings[0].alpha, settings[0].decay
        self._l2 = settings[0].l2
        self._rate = timeline.annealed([each.mask_lr for each in settings], [each.anneal for each in settings])
        start = magnitude(weights)
        for row, each in enumerate(settings):
            if each.start_value is not None:
                start[row] = each.start_value
        self._budget = GlobalBudget(layout, requests, timeline, start, floor=floor)

    @property
    def mask(self) -> Tensor:
        return self._budget.mask

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        mask_variable = self._budget.score
        direction = method.mask_gradient(
            gradient, weights, mask_variable, estimator=self._estimator, alpha=self._alpha, l2=self._l2
        )  # Eq. (step_redefine)
        if self._uses_features:
            direction = self._over_features(direction)
        size = direction.square().mean(1, keepdim=True).sqrt() + method.EPSILON
        direction = direction / size**self._global_power
        rate = self._timeline.now(self._rate)
        if self._decay is None:
            mask_variable.copy_(mask_variable - direction * rate)
            self._budget.meet_()
            return
        mask_variable.copy_(mask_variable - (direction + self._decay) * rate)  # Eq. (connectivity)
        self._budget.keep_floor_()
        torch.gt(mask_variable, 0, out=self._budget.mask)  # Eq. (step)

    def due(self, step: int) -> bool:
        return self._budget.floor_is_due(step)

    def refresh_(self, weights: Tensor, step: int) -> None:
        self._budget.choose_floor_()

    def freeze_(self, weights: Tensor) -> Tensor:
        if self._decay is None:
            self._budget.cut_()
        return self._budget.mask

    def state(self) -> dict[str, Tensor]:
        return self._budget.state()

    def _over_features(self, direction: Tensor) -> Tensor:
        """Eq. (grad_norm), from the mini-batch, to a power."""
        parts = []
        for shape, part in zip(self._layout.shapes, self._layout.split(direction), strict=True):
            rows = part.reshape(len(part), shape[0], -1)
            size = rows.square().mean(2, keepdim=True).sqrt() + method.EPSILON
            parts.append((rows / size ** self._feature_power[:, :, None]).flatten(1))
        return torch.cat(parts, dim=1)
