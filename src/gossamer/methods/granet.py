"""GraNet: gradual pruning with regrowth.

Rule: every ΔT steps the smallest |w| of the network are pruned to the budget of a cubic. Then a fraction
½·α·(1 + cos πt/T) of the nonzeros, the smallest again, is exchanged for the pruned weights with the largest gradients,
which start at zero.
Reference: Liu et al. 2021, Sparse Training via Boosting Pruning Plasticity with Neuroregeneration.
Ours: as for RigL, the exchange follows a step instead of replacing it. It starts dense.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, PrunedAtZero, Step, expect
from gossamer.methods.budgets import largest
from gossamer.methods.rigl import regrowth
from gossamer.schedule import cubic_budget


@dataclass(frozen=True)
class GraNetOptions(Options):
    fraction: float = 0.5  # α
    every: int = 100  # ΔT

    def __post_init__(self) -> None:
        expect(
            self,
            fraction=(0 <= self.fraction <= 1, "a number from 0 to 1"),
            every=(self.every >= 1, "at least 1 step"),
        )


class GraNet(PrunedAtZero[GraNetOptions]):
    name, title, options = "granet", "gradual magnitude with regrowth (GraNet)", GraNetOptions
    reference = "Liu et al. 2021, Sparse Training via Boosting Pruning Plasticity with Neuroregeneration"
    shared = ("every",)
    from_start = True

    def __init__(self, context: Context[GraNetOptions]) -> None:
        timeline = context.timeline
        self._count, self._keep, self._fractions = context.layout.count, context.keep, context.values("fraction")
        self._every, self._length = timeline.often(context.options[0].every), timeline.length
        self._ramp = timeline.plan.sparsify
        self.mask = torch.ones_like(context.weights, dtype=torch.bool)
        self._gradient = torch.zeros_like(context.weights)

    def update_masks(self, step: Step) -> None:
        self._gradient.copy_(step.gradient)
        self.weight_gradient(step.gradient, step.weights)

    def topology_due(self, step: int) -> bool:
        return step % self._every == 0

    def update_topology(self, weights: Tensor, step: int) -> Tensor:
        ramp = min(1.0, step / max(1, self._ramp))
        budgets = [cubic_budget(ramp, self._count, keep) for keep in self._keep]
        share = regrowth(step, self._length)
        grown = [
            min(int(fraction * share * budget), self._count - budget)
            for fraction, budget in zip(self._fractions, budgets, strict=True)
        ]
        stays = self._largest(weights, [budget - each for budget, each in zip(budgets, grown, strict=True)])
        grows = largest(self._gradient.abs().masked_fill_(stays, -torch.inf), grown)
        torch.logical_or(stays, grows, out=self.mask)
        weights.masked_fill_(~stays, 0.0)
        return ~stays

    def finalize(self, weights: Tensor) -> Tensor:
        self.mask.copy_(self._largest(weights, self._keep))
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self.mask, "gradient": self._gradient}

    def _largest(self, weights: Tensor, counts: list[int]) -> Tensor:
        """The largest kept weights of each run."""
        return largest(weights.abs().masked_fill_(~self.mask, -torch.inf), counts)
