"""L0 regularization with hard-concrete gates.

Rule: the layer uses w ⊙ z with random gates; with u uniform,

    s = σ((log u - log(1 - u) + log α)/β),   z = min(1, max(0, s·(ζ - γ) + γ))

and the loss gets λ·Σ σ(log α - β·log(-γ/ζ)), λ times the expected number of nonzero gates. β = 2/3, γ = -0.1, ζ = 1.1.
Both w and log α follow their true gradients. After training z = min(1, max(0, σ(log α)·(ζ - γ) + γ)). Reference:
Louizos, Welling & Kingma 2018, Learning Sparse Neural Networks through L0 Regularization. Ours: one gate per weight,
open at first, starting from the warmed-up network. λ is set in every step such that, to first order, its gradient
brings the expected count to the budget of the step (it never opens gates). The gradient of the loss with respect to log
α is divided by its root mean square over the network, so that one `gate_lr` fits all networks: at the learning rate of
the weights, gates hardly move. At the end the largest log α are kept, exactly as many as the budget. If many gates that
are rarely open make up the expected count, fewer gates than that are open after training. Then all log α are raised
together until enough gates are open, so that no kept weight starts fine-tuning at zero.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, Step, column, expect, is_rate
from gossamer.methods.budgets import BudgetedMethod, GlobalBudget
from gossamer.methods.noise import uniform
from gossamer.methods.scl import EPSILON

BETA, GAMMA, ZETA = 2.0 / 3.0, -0.1, 1.1
_CLOSED = math.log(-GAMMA / ZETA)  # the largest log α whose gate is zero after training


@dataclass(frozen=True)
class L0Options(Options):
    gate_lr: float = 0.1
    open: float = 0.9  # σ(log α) at the start

    def __post_init__(self) -> None:
        expect(
            self,
            gate_lr=(is_rate(self.gate_lr), "a number of at least 0"),
            open=(0 < self.open < 1, "a probability above 0 and below 1"),
        )


def sample_gate(log_alpha: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A gate and its derivative with respect to log α."""
    s = torch.sigmoid((u.log() - (-u).log1p() + log_alpha) / BETA)
    stretched = s * (ZETA - GAMMA) + GAMMA
    inside = (stretched > 0) & (stretched < 1)
    return stretched.clamp(0.0, 1.0), torch.where(inside, s * (1.0 - s) * ((ZETA - GAMMA) / BETA), 0.0)


def final_gate(log_alpha: Tensor) -> Tensor:
    return (log_alpha.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0.0, 1.0)


def probability_of_open(log_alpha: Tensor) -> Tensor:
    """The probability that a gate is nonzero."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


class L0(BudgetedMethod[L0Options]):
    name, title, options = "l0", "hard-concrete gates (L0)", L0Options
    reference = "Louizos et al. 2018, Learning Sparse Neural Networks through L0 Regularization"
    masked_forward = False

    def __init__(self, context: Context[L0Options]) -> None:
        self._timeline, self._seeds, weights = context.timeline, context.seeds, context.weights
        self._rate = context.timeline.annealed(context.values("gate_lr"))
        self._wanted = context.timeline.budgets(context.targets)
        start = column([math.log(chance / (1.0 - chance)) for chance in context.values("open")], weights)
        self._log_alpha = start.expand_as(weights).clone()
        self._gate, self._slope = torch.ones_like(weights), torch.zeros_like(weights)
        self._begin(GlobalBudget(context, torch.ones_like(weights), ramp="none"))

    def apply_masks(self, weights: Tensor, out: Tensor) -> None:
        u = uniform(self._seeds, self._timeline.clock, weights.shape[1], weights.dtype)
        gate, slope = sample_gate(self._log_alpha, u)
        self._gate.copy_(gate)
        self._slope.copy_(slope)
        torch.mul(weights, self._gate, out=out)

    def update_masks(self, step: Step) -> None:
        direction = step.gradient * step.weights * self._slope
        size = direction.square().mean(1, keepdim=True).sqrt() + EPSILON
        self._log_alpha.sub_(direction / size * self._timeline.now(self._rate))
        chance = probability_of_open(self._log_alpha)
        pull = chance * (1.0 - chance)  # gradient of the expected count
        excess = chance.sum(1, keepdim=True) - self._timeline.now(self._wanted)
        strength = (excess / pull.square().sum(1, keepdim=True).clamp_min(EPSILON)).clamp_min(0.0)
        self._log_alpha.sub_((strength * pull).clamp_max(1.0))
        torch.gt(final_gate(self._log_alpha), 0.0, out=self.mask)
        self.weight_gradient(step.gradient, step.weights)

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.mul_(self._gate)

    def finalize(self, weights: Tensor) -> Tensor:
        self._budget.score.copy_(self._log_alpha)
        self._budget.protect_()
        largest_pruned = self._budget.cut_().threshold[:, None]
        weights.mul_(final_gate(self._log_alpha + (_CLOSED - largest_pruned).clamp_min(0.0)))
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"log_alpha": self._log_alpha, "gate": self._gate, "slope": self._slope}
