"""Sparse variational dropout: every weight has Gaussian noise of its own, and weights that are mostly noise are pruned.

Rule: the layer uses w = θ + σ·ε with ε ~ N(0, 1); θ and log σ² follow the gradient of the loss plus β times the
divergence from a log-uniform prior. With log α = log σ² - log θ² it is approximately, for each weight,

    KL = k1 - k1·sigmoid(k2 + k3·log α) + ½·log(1 + 1/α),   k1 = 0.63576, k2 = 1.87320, k3 = 1.48695

Weights with log α > 3 are pruned, and θ is used after training.
Reference: Molchanov, Ashukha & Vetrov 2017, Variational Dropout Sparsifies Deep Neural Networks.
Ours: instead of 3, the threshold is what the budget requires in each step, along the cubic, and pruned weights never
return. β rises linearly in the sparsify phase. log σ² follows Adam, whose learning rate goes to zero on a cosine. One
draw of the weights serves the whole batch, instead of noise in the outputs of each layer (local reparametrization).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.adam import Adam
from gossamer.methods.base import Context, Options, Step, expect, is_rate
from gossamer.methods.budgets import GlobalBudget, GlobalThreshold
from gossamer.methods.noise import uniform

K1, K2, K3 = 0.63576, 1.87320, 1.48695
_SMALLEST = 1e-8  # |θ|, where the slope of log θ² is limited


@dataclass(frozen=True)
class SparseVDOptions(Options):
    divergence: float = 2e-5  # β at the end of the sparsify phase: one over the size of the training set
    noise_lr: float = 0.01  # learning rate of log σ²
    start: float = -10.0  # of log σ²

    def __post_init__(self) -> None:
        expect(
            self,
            divergence=(is_rate(self.divergence), "a number of at least 0"),
            noise_lr=(is_rate(self.noise_lr), "a number of at least 0"),
            start=(-30 < self.start < 10, "a number above -30 and below 10"),
        )


def divergence_slope(log_alpha: Tensor) -> Tensor:
    """The derivative of KL with respect to log α."""
    gate = torch.sigmoid(K2 + K3 * log_alpha)
    return -K1 * K3 * gate * (1.0 - gate) - 0.5 * torch.sigmoid(-log_alpha)


class SparseVD(GlobalThreshold[SparseVDOptions]):
    name, title, options = "sparse_vd", "sparse variational dropout (Molchanov)", SparseVDOptions
    reference = "Molchanov et al. 2017, Variational Dropout Sparsifies Deep Neural Networks"
    masked_forward = False
    shardable = any_order = False  # the noise depends on the positions of weights

    def __init__(self, context: Context[SparseVDOptions]) -> None:
        self._timeline, self._seeds, weights = context.timeline, context.seeds, context.weights
        self._rate = context.timeline.annealed(context.values("noise_lr"))
        strengths, ramp = context.values("divergence"), max(1, context.timeline.plan.sparsify)
        self._strength = context.timeline.series(
            lambda step: [each * min(1.0, (step + 1) / ramp) for each in strengths]
        )
        self._log_variance = context.column("start").expand_as(weights).clone()
        self._adam, self._noise = Adam(weights), torch.zeros_like(weights)  # σ·ε
        self._begin(GlobalBudget(context, -self._log_alpha(weights)))

    def apply_masks(self, weights: Tensor, out: Tensor) -> None:
        drawn = torch.special.ndtri(uniform(self._seeds, self._timeline.clock, weights.shape[1], weights.dtype))
        torch.mul(drawn, torch.exp(0.5 * self._log_variance), out=self._noise)
        torch.where(self.mask, weights + self._noise, weights.new_zeros(()), out=out)

    def update_masks(self, step: Step) -> None:
        slope = self._timeline.now(self._strength) * divergence_slope(self._log_alpha(step.weights))
        direction = self._adam.direction(0.5 * step.gradient * self._noise + slope, self._timeline.clock)
        self.weight_gradient(step.gradient, step.weights)
        self._log_variance.sub_(self._timeline.now(self._rate) * direction)
        self._budget.score.copy_((-self._log_alpha(step.weights)).masked_fill_(~self.mask, -torch.inf))
        self._budget.meet_()

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        size = weights.abs().clamp_min(_SMALLEST)
        slope = self._timeline.now(self._strength) * divergence_slope(self._log_alpha(weights))
        gradient.sub_(2.0 * slope * weights.sign() / size).masked_fill_(~self.mask, 0.0)

    def project(self, weights: Tensor) -> None:
        weights.masked_fill_(~self.mask, 0.0)

    def state(self) -> dict[str, Tensor]:
        state = {"log_variance": self._log_variance, "noise": self._noise}
        return {**super().state(), **state, **self._adam.state()}

    def _log_alpha(self, weights: Tensor) -> Tensor:
        return self._log_variance - 2.0 * weights.abs().clamp_min(_SMALLEST).log()
