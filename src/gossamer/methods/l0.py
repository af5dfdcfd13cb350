"""L0 regularisation with hard-concrete gates.

Rule: the layer uses w ⊙ z with random gates; with u uniform,

    s = σ((log u - log(1 - u) + log α)/β),   z = min(1, max(0, s·(ζ - γ) + γ))

and the loss gets λ·Σ σ(log α - β·log(-γ/ζ)), λ times the expected number of gates that are not zero. β = 2/3, γ = -0.1,
ζ = 1.1. Both w and log α follow their true gradients. After training z = min(1, max(0, σ(log α)·(ζ - γ) + γ)).
Reference: Louizos, Welling & Kingma 2018, Learning Sparse Neural Networks through L0 Regularization.
Ours: gates of single weights, begun open at the warmed-up network. λ is set in every step so that, to first order, its
gradient brings the expected count to the budget of the step (it never pushes gates open). The gradient of the loss on
log α is divided by its root mean square over the network, which makes `gate_lr` fit any network: with the weights'
learning rate gates hardly move. At the end the largest log α stay, exactly as many as the budget. Where the expected
count is met by many gates that are hardly ever open, fewer than that are open after training: then all log α are raised
together, until as many are, so that what stays does not begin its fine-tuning at zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer import method
from gossamer.methods.budgets import GlobalBudget
from gossamer.methods.noise import uniform
from gossamer.methods.rule import Layout, Options, Request, Rule, Timeline, column, expect, is_rate

BETA, GAMMA, ZETA = 2.0 / 3.0, -0.1, 1.1
_CLOSED = math.log(-GAMMA / ZETA)  # the largest log α with which the gate is zero after training


@dataclass(frozen=True)
class L0Options(Options):
    gate_lr: float = 0.1
    open: float = 0.9  # σ(log α) at the start

    def __post_init__(self) -> None:
        expect(
            self,
            gate_lr=(is_rate(self.gate_lr), "a number of at least 0"),
            open=(0 < self.open < 1, "a chance above 0 and below 1"),
        )


def sample_gate(log_alpha: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A gate, and its derivative by log α."""
    s = torch.sigmoid((u.log() - (-u).log1p() + log_alpha) / BETA)
    stretched = s * (ZETA - GAMMA) + GAMMA
    inside = (stretched > 0) & (stretched < 1)
    return stretched.clamp(0.0, 1.0), torch.where(inside, s * (1.0 - s) * ((ZETA - GAMMA) / BETA), 0.0)


def final_gate(log_alpha: Tensor) -> Tensor:
    return (log_alpha.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0.0, 1.0)


def chance_of_open(log_alpha: Tensor) -> Tensor:
    """The probability that a gate is not zero."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


class L0(Rule[L0Options]):
    name, title, options = "l0", "hard-concrete gates (L0)", L0Options
    reference = "Louizos et al. 2018, Learning Sparse Neural Networks through L0 Regularization"

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[L0Options]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        self._timeline = timeline
        self._rate = timeline.annealed([request.settings.gate_lr for request in requests])
        self._wanted = timeline.budgets(layout.count, [layout.keep(request.sparsity) for request in requests])
        self._seeds = torch.tensor([request.seed for request in requests], device=weights.device)
        start = column([math.log(each.settings.open / (1.0 - each.settings.open)) for each in requests], weights)
        self._log_alpha = start.expand_as(weights).clone()
        self._gate, self._slope = torch.ones_like(weights), torch.zeros_like(weights)
        self._budget = GlobalBudget(layout, requests, timeline, torch.ones_like(weights), floor=floor, ramp="none")

    @property
    def mask(self) -> Tensor:
        return self._budget.mask

    def show_(self, weights: Tensor, out: Tensor) -> None:
        u = uniform(self._seeds, self._timeline.clock, weights.shape[1], weights.dtype)
        gate, slope = sample_gate(self._log_alpha, u)
        self._gate.copy_(gate)
        self._slope.copy_(slope)
        torch.mul(weights, self._gate, out=out)

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        direction = gradient * weights * self._slope
        size = direction.square().mean(1, keepdim=True).sqrt() + method.EPSILON
        self._log_alpha.sub_(direction / size * self._timeline.now(self._rate))
        chance = chance_of_open(self._log_alpha)
        pull = chance * (1.0 - chance)  # gradient of the expected count
        excess = chance.sum(1, keepdim=True) - self._timeline.now(self._wanted)
        strength = (excess / pull.square().sum(1, keepdim=True).clamp_min(method.EPSILON)).clamp_min(0.0)
        self._log_alpha.sub_((strength * pull).clamp_max(1.0))
        torch.gt(final_gate(self._log_alpha), 0.0, out=self._budget.mask)
        gradient.mul_(self._gate)

    def freeze_(self, weights: Tensor) -> Tensor:
        self._budget.score.copy_(self._log_alpha)
        self._budget.choose_floor_()
        largest_gone = self._budget.cut_()[:, None]
        weights.mul_(final_gate(self._log_alpha + (_CLOSED - largest_gone).clamp_min(0.0)))
        return self._budget.mask

    def state(self) -> dict[str, Tensor]:
        own = {"log_alpha": self._log_alpha, "gate": self._gate, "slope": self._slope}
        return {**self._budget.state(), **own}
