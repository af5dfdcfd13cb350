"""RigL: sparse from the first step to the last, moving connections to where the gradient is.

Rule: every tensor keeps its number of connections. Every ΔT steps a share f(t) = α/2·(1 + cos(π·t/T)) of them, those
with the smallest |w|, goes, and as many of those that are not there come, those with the largest |∂L/∂w| (the gradient
is dense there and then). What comes starts at zero, without momentum, and is zero at the end where its gradient stays
zero: such a connection is in the mask, but not in the count of a finished network. Between, only what is there trains.
Moves end after three quarters of the run, where our fine-tuning begins. Tensors share the connections by the
Erdős–Rényi-kernel rule (density ∝ Σ dimensions / Π dimensions, at most 1) or all alike.
Reference: Evci et al. 2020, Rigging the Lottery: Making All Tickets Winners.
Ours: the moves are made after the ΔT-th step, with the gradient of that step, instead of in its place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.budgets import largest, shares
from gossamer.methods.noise import uniform
from gossamer.methods.rule import Layout, Options, RemovedIsZero, Request, Timeline, expect

DISTRIBUTIONS = ("erk", "uniform")


@dataclass(frozen=True)
class RigLOptions(Options):
    distribution: str = "erk"
    fraction: float = 0.3  # α
    every: int = 100  # ΔT

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(f"distribution: expected one of {', '.join(DISTRIBUTIONS)}, got {self.distribution!r}")
        expect(
            self,
            fraction=(0 <= self.fraction <= 1, "a share from 0 to 1"),
            every=(self.every >= 1, "at least 1 step"),
        )


def erdos_renyi(layout: Layout, keep: int) -> list[float]:
    """Density of each tensor: ε·Σd/Πd, but at most 1, with the ε that leaves `keep` connections."""
    dense: set[int] = set()
    raw = [sum(shape) / size for shape, size in zip(layout.shapes, layout.sizes, strict=True)]
    while True:
        left = keep - sum(layout.sizes[index] for index in dense)
        free = [index for index in range(len(raw)) if index not in dense]
        scale = left / sum(raw[index] * layout.sizes[index] for index in free) if free else 0.0
        over = {index for index in free if raw[index] * scale > 1.0}
        if not over:
            return [1.0 if index in dense else raw[index] * scale for index in range(len(raw))]
        dense |= over


class RigL(RemovedIsZero[RigLOptions]):
    name, title, options = "rigl", "drop by magnitude, grow by gradient (RigL)", RigLOptions
    reference = "Evci et al. 2020, Rigging the Lottery: Making All Tickets Winners"
    apart = ("distribution", "every")
    from_start = True

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[RigLOptions]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        self._layout, self._length = layout, timeline.length
        self._every = timeline.often(requests[0].settings.every)
        self._fractions = [request.settings.fraction for request in requests]
        keep = [layout.keep(request.sparsity) for request in requests]
        densities = [
            erdos_renyi(layout, each)
            if request.settings.distribution == "erk"
            else [each / layout.count] * len(layout.sizes)
            for request, each in zip(requests, keep, strict=True)
        ]
        self._counts = [shares(layout.sizes, each, density) for each, density in zip(keep, densities, strict=True)]
        seeds = torch.tensor([request.seed for request in requests], device=weights.device)
        draw = uniform(seeds, timeline.clock, layout.count, weights.dtype)
        parts = [
            largest(part, [counts[index] for counts in self._counts]) for index, part in enumerate(layout.split(draw))
        ]
        self._mask = torch.cat(parts, dim=1)
        self._gradient = torch.zeros_like(weights)

    @property
    def mask(self) -> Tensor:
        return self._mask

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        self._gradient.copy_(gradient)
        gradient.masked_fill_(~self._mask, 0.0)

    def due(self, step: int) -> bool:
        return step % self._every == 0 and step < self._length

    def refresh_(self, weights: Tensor, step: int) -> Tensor:
        decay = 0.5 * (1.0 + math.cos(math.pi * step / self._length))
        fresh = []
        for index, (weight, gradient, mask) in enumerate(
            zip(*(self._layout.split(each) for each in (weights, self._gradient, self._mask)), strict=True)
        ):
            have = [counts[index] for counts in self._counts]
            stay = [count - int(share * decay * count) for count, share in zip(have, self._fractions, strict=True)]
            stays = largest(weight.abs().masked_fill_(~mask, -torch.inf), stay)
            come = [count - left for count, left in zip(have, stay, strict=True)]
            comes = largest(gradient.abs().masked_fill_(stays, -torch.inf), come)
            weight.masked_fill_(~stays, 0.0)  # also what goes and comes back at once starts at zero
            mask.copy_(stays | comes)
            fresh.append(~stays)
        return torch.cat(fresh, dim=1)

    def freeze_(self, weights: Tensor) -> Tensor:
        return self._mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self._mask, "gradient": self._gradient}
