"""AC/DC: sparse and dense phases in turn.

Rule: the network is trained sparse, under the largest |w| of the moment, and dense, from the sparse weights and zeros,
in turn. The momentum is reset at every switch. The last phase is sparse.
Reference: Peste et al. 2021, AC/DC: Alternating Compressed/DeCompressed Training of Deep Neural Networks.
Ours: the mask phases consist of `cycles` sparse and as many dense phases of equal length. The last sparse phase is our
fine-tuning. min_density protects a fraction of each tensor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, PrunedAtZero, expect
from gossamer.methods.budgets import BudgetedMethod, GlobalBudget, magnitude


@dataclass(frozen=True)
class ACDCOptions(Options):
    cycles: int = 4  # a sparse and a dense phase each

    def __post_init__(self) -> None:
        expect(self, cycles=(self.cycles >= 1, "at least 1 cycle"))


class ACDC(BudgetedMethod[ACDCOptions], PrunedAtZero[ACDCOptions]):
    name, title, options = "acdc", "sparse and dense in turn (AC/DC)", ACDCOptions
    reference = "Peste et al. 2021, AC/DC: Alternating Compressed/DeCompressed Training of Deep Neural Networks"
    shared = ("cycles",)

    def __init__(self, context: Context[ACDCOptions]) -> None:
        phases, length = 2 * context.options[0].cycles, context.timeline.length
        self._switches = sorted({length * number // phases for number in range(1, phases)} - {0})
        self._begin(GlobalBudget(context, magnitude(context.weights), ramp="none"))
        self._budget.cut_()

    def topology_due(self, step: int) -> bool:
        return step in self._switches

    def update_topology(self, weights: Tensor, step: int) -> Tensor:
        if self._switches.index(step) % 2:
            self._cut(weights)
            self.project(weights)
        else:
            self.mask.fill_(True)
        return torch.ones_like(self.mask)

    def finalize(self, weights: Tensor) -> Tensor:
        self._cut(weights)
        return self.mask

    def _cut(self, weights: Tensor) -> None:
        self._budget.score.copy_(weights.abs())
        self._budget.protect_()
        self._budget.cut_()
