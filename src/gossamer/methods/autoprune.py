"""AutoPrune: one mask variable per weight, with a gradient that ignores the size of the weight.

Rule: w̄ = w ⊙ H(m). m follows ∂L/∂w̄ ⊙ sgn(w)·h'(m), with h' the derivative of leaky ReLU or softplus, and a
regularizer on h(m) that pushes it down. w follows ∂L/∂w̄ ⊙ H(m), so pruned weights do not train. As published, w learns
from the training set and m from another set, in two passes. Reference: Xiao, Wang & Rajasekaran 2019, AutoPrune:
Automatic Network Pruning by Regularizing Auxiliary Parameters. Ours: the pull of the regularizer on m contains h'(m).
It is replaced by a constant, the same for all m, which is solved for so that the budget is met. m starts at |w| of the
warmed-up network, and its gradient is divided by its root mean square over the network, as for SCL. One pass by
default, so that the weights see all batches. `two_pass` uses every other batch for the masks: weights then move by
their momentum alone, while biases and norms learn from all batches.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from gossamer.methods.base import Context, Options, Step, expect, is_rate, scale_pruned_
from gossamer.methods.budgets import GlobalBudget, GlobalThreshold, magnitude
from gossamer.methods.scl import EPSILON, mask_gradient

ESTIMATORS = ("leaky_relu", "softplus")


@dataclass(frozen=True)
class AutoPruneOptions(Options):
    mask_lr: float = 0.01
    estimator: str = "softplus"
    alpha: float = 0.1  # slope of leaky_relu
    two_pass: bool = False
    pruned_grad_scale: float = 0.0  # factor on the gradient of pruned weights

    def __post_init__(self) -> None:
        expect(
            self,
            mask_lr=(is_rate(self.mask_lr), "a number of at least 0"),
            estimator=(self.estimator in ESTIMATORS, f"one of {', '.join(ESTIMATORS)}"),
            alpha=(0 < self.alpha < math.inf, "a number above 0"),
            pruned_grad_scale=(0 <= self.pruned_grad_scale <= 1, "a number from 0 to 1"),
        )


class AutoPrune(GlobalThreshold[AutoPruneOptions]):
    name, title, options = "autoprune", "sign rule for masks (AutoPrune)", AutoPruneOptions
    reference = "Xiao et al. 2019, AutoPrune: Automatic Network Pruning by Regularizing Auxiliary Parameters"
    shared = ("estimator", "alpha", "two_pass")

    def __init__(self, context: Context[AutoPruneOptions]) -> None:
        self._context, self._timeline, self._options = context, context.timeline, context.options[0]
        self._rate = context.timeline.annealed(context.values("mask_lr"))
        self._removed = context.column("pruned_grad_scale")
        self._begin(GlobalBudget(context, magnitude(context.weights)))

    def update_masks(self, step: Step) -> None:
        direction = mask_gradient(
            step.gradient,
            step.weights.sign(),
            self._budget.score,
            estimator=self._options.estimator,
            alpha=self._options.alpha,
        )
        size = self._context.mean_squares(direction).sqrt() + EPSILON
        rate = self._timeline.now(self._rate)
        if self._options.two_pass:
            rate = 2.0 * rate * (self._timeline.clock % 2)  # half as many steps
        self.weight_gradient(step.gradient, step.weights)
        self._budget.score.sub_(direction / size * rate)
        self._budget.meet_()

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        if self._options.two_pass:
            gradient.mul_(1 - self._timeline.clock % 2)
        scale_pruned_(gradient, self.mask, self._removed)
