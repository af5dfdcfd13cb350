"""AutoPrune: a mask variable a weight whose gradient forgets how large the weight is.

Rule: w̄ = w ⊙ H(m); m follows ∂L/∂w̄ ⊙ sgn(w)·h'(m), h' the derivative of leaky ReLU or softplus, and a regulariser on
h(m) that pushes it down; w follows ∂L/∂w̄ ⊙ H(m), so that a removed weight rests. Published, w learns from the training
set and m from another set, in two passes.
Reference: Xiao, Wang & Rajasekaran 2019, AutoPrune: Automatic Network Pruning by Regularizing Auxiliary Parameters.
Ours: in place of the regulariser, whose pull on m carries h'(m), a constant lowers all m alike; it is solved for, so
that the budget is met. m starts at |w| of the warmed-up network and its gradient is divided by its root mean square
over the network, as for SCL. One pass by default, which leaves all batches to the weights; `two_pass` gives every other
batch to the masks instead: weights then move by their momentum alone, and biases and norms learn from all batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer import method
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

ESTIMATORS = ("leaky_relu", "softplus")


@dataclass(frozen=True)
class AutoPruneOptions(Options):
    mask_lr: float = 0.01
    estimator: str = "softplus"
    alpha: float = 0.1  # slope of leaky_relu
    two_pass: bool = False
    removed_gradient: float = 0.0  # share of it that removed weights follow

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator: expected one of {', '.join(ESTIMATORS)}, got {self.estimator!r}")
        expect(
            self,
            mask_lr=(is_rate(self.mask_lr), "a number of at least 0"),
            alpha=(0 < self.alpha < math.inf, "a number above 0"),
            removed_gradient=(0 <= self.removed_gradient <= 1, "a share from 0 to 1"),
        )


class AutoPrune(MasksOfBudget, DenseGradient[AutoPruneOptions]):
    name, title, options = "autoprune", "sign rule for masks (AutoPrune)", AutoPruneOptions
    reference = "Xiao et al. 2019, AutoPrune: Automatic Network Pruning by Regularizing Auxiliary Parameters"
    apart = ("estimator", "alpha", "two_pass")

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[AutoPruneOptions]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        self._settings, self._timeline = requests[0].settings, timeline
        self._rate = timeline.annealed([request.settings.mask_lr for request in requests])
        self._removed = column([request.settings.removed_gradient for request in requests], weights)
        self._budget = GlobalBudget(layout, requests, timeline, magnitude(weights), floor=floor)

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        direction = method.mask_gradient(
            gradient,
            weights.sign(),
            self._budget.score,
            estimator=self._settings.estimator,
            alpha=self._settings.alpha,
        )
        size = direction.square().mean(1, keepdim=True).sqrt() + method.EPSILON
        rate = self._timeline.now(self._rate)
        if self._settings.two_pass:
            turn = self._timeline.clock % 2
            rate = 2.0 * rate * turn  # half as many steps
            gradient.mul_(1 - turn)
        damp_removed_(gradient, self._budget.mask, self._removed)
        self._budget.score.sub_(direction / size * rate)
        self._budget.meet_()
