"""RigL: sparse from the first step to the last; weights are moved to large gradients.

Rule: every tensor keeps its number of nonzeros. Every ΔT steps a fraction f(t) = α/2·(1 + cos(π·t/T)) of them, those
with the smallest |w|, is pruned, and as many pruned weights grow, those with the largest |∂L/∂w| (the gradient is dense
in these steps). A grown weight starts at zero, without momentum, and ends at zero if its gradient stays zero: it is in
the mask, but not among the nonzeros of the finished network. In between, only kept weights train. Moves end after three
quarters of the run, where our fine-tuning begins. Tensors share the nonzeros by the Erdős–Rényi-kernel rule (density ∝
Σ dimensions / Π dimensions, at most 1) or all alike. Reference: Evci et al. 2020, Rigging the Lottery: Making All
Tickets Winners. Ours: the exchange follows the ΔT-th step, with the gradient of that step, instead of replacing it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Layout, Options, PrunedAtZero, Step, expect
from gossamer.methods.budgets import keep_largest_, shares
from gossamer.methods.noise import uniform

DISTRIBUTIONS = ("erk", "uniform")


@dataclass(frozen=True)
class RigLOptions(Options):
    distribution: str = "erk"
    fraction: float = 0.3  # α
    every: int = 100  # ΔT

    def __post_init__(self) -> None:
        expect(
            self,
            distribution=(self.distribution in DISTRIBUTIONS, f"one of {', '.join(DISTRIBUTIONS)}"),
            fraction=(0 <= self.fraction <= 1, "a number from 0 to 1"),
            every=(self.every >= 1, "at least 1 step"),
        )


def erdos_renyi(layout: Layout, keep: int) -> list[float]:
    """Density of each tensor: ε·Σd/Πd, but at most 1, with the ε for which `keep` weights remain."""
    dense: set[int] = set()
    raw = [sum(shape) / size for shape, size in zip(layout.shapes, layout.sizes, strict=True)]
    while True:
        remaining = keep - sum(layout.sizes[index] for index in dense)
        free = [index for index in range(len(raw)) if index not in dense]
        scale = remaining / sum(raw[index] * layout.sizes[index] for index in free) if free else 0.0
        over = {index for index in free if raw[index] * scale > 1.0}
        if not over:
            return [1.0 if index in dense else raw[index] * scale for index in range(len(raw))]
        dense |= over


def nonzeros_of_tensors(layout: Layout, keep: int, distribution: str) -> list[int]:
    even = [keep / layout.count] * len(layout.sizes)
    return shares(layout.sizes, keep, erdos_renyi(layout, keep) if distribution == "erk" else even)


def regrowth(step: int, length: int) -> float:
    """The share of α that is exchanged after this many of `length` steps."""
    return 0.5 * (1.0 + math.cos(math.pi * step / length))


class RigL(PrunedAtZero[RigLOptions]):
    name, title, options = "rigl", "drop by magnitude, grow by gradient (RigL)", RigLOptions
    reference = "Evci et al. 2020, Rigging the Lottery: Making All Tickets Winners"
    shared = ("distribution", "every")
    from_start = True

    def __init__(self, context: Context[RigLOptions]) -> None:
        self._layout, timeline, weights, options = context.layout, context.timeline, context.weights, context.options[0]
        self._length, self._every = timeline.length, timeline.often(options.every)
        self._fractions = context.values("fraction")
        self._counts = [nonzeros_of_tensors(context.layout, keep, options.distribution) for keep in context.keep]
        self.mask = torch.ones_like(weights, dtype=torch.bool)
        drawn = uniform(context.seeds, timeline.clock, context.layout.count, weights.dtype)
        keep_largest_(self.mask, context.layout, drawn, self._counts)
        self._gradient = torch.zeros_like(weights)

    def update_masks(self, step: Step) -> None:
        self._gradient.copy_(step.gradient)
        self.weight_gradient(step.gradient, step.weights)

    def topology_due(self, step: int) -> bool:
        return step % self._every == 0 and step < self._length

    def update_topology(self, weights: Tensor, step: int) -> Tensor:
        decay = regrowth(step, self._length)
        runs = list(zip(self._counts, self._fractions, strict=True))
        grown = [[int(fraction * decay * count) for count in counts] for counts, fraction in runs]
        kept = [[a - b for a, b in zip(*each, strict=True)] for each in zip(self._counts, grown, strict=True)]
        stays, grows = torch.empty_like(self.mask), torch.empty_like(self.mask)
        keep_largest_(stays, self._layout, weights.abs().masked_fill_(~self.mask, -torch.inf), kept)
        keep_largest_(grows, self._layout, self._gradient.abs().masked_fill_(stays, -torch.inf), grown)
        torch.logical_or(stays, grows, out=self.mask)
        weights.masked_fill_(~stays, 0.0)  # a weight that is pruned and grown at once also starts at zero
        return ~stays

    def finalize(self, weights: Tensor) -> Tensor:
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self.mask, "gradient": self._gradient}
