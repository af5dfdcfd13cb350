"""Gradual magnitude pruning with a sparsity of its own in every tensor.

Rule: every n-th step the smallest |w| of each tensor are pruned, s(t) = s_f · (1 - (1 - t/T)³) of them. Pruned
weights are zero and never return.
Reference: Zhu & Gupta 2017, To Prune, or Not to Prune.
Ours: the counts of the tensors are rounded such that their sum is exactly the budget. All tensors have the same s_f,
which published schedules set by hand for some layers (the first, the last, depthwise ones). `depthwise` and `linear`
set that of the depthwise convolutions (one input channel per filter) and of the linear layers; the others get what the
sparsity of the network leaves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Layout, Options, Request, expect
from gossamer.methods.budgets import keep_largest_, shares
from gossamer.methods.timing import PrunedInStages
from gossamer.schedule import cubic_budget


@dataclass(frozen=True)
class PerLayerOptions(Options):
    every: int = 100  # steps between two prunings
    depthwise: float | None = None  # sparsity of depthwise convolutions; None: as all others
    linear: float | None = None  # sparsity of linear layers

    def __post_init__(self) -> None:
        share = "a number of at least 0 and below 1, or none"
        expect(
            self,
            every=(self.every >= 1, "at least 1 step"),
            depthwise=(self.depthwise is None or 0 <= self.depthwise < 1, share),
            linear=(self.linear is None or 0 <= self.linear < 1, share),
        )


class GradualPerLayer(PrunedInStages[PerLayerOptions]):
    name, title, options = "gradual_per_layer", "gradual magnitude, per layer (Zhu & Gupta)", PerLayerOptions
    reference = "Zhu & Gupta 2017, To Prune, or Not to Prune"
    shared = ("every",)

    def __init__(self, context: Context[PerLayerOptions]) -> None:
        self._layout, self._keep = context.layout, context.keep
        self._sparsities = [final_sparsities(self._layout, request) for request in context.requests]
        self._schedule(context.timeline, context.options[0].every)
        self.mask = torch.ones_like(context.weights, dtype=torch.bool)

    @classmethod
    def check(cls, layout: Layout, request: Request[PerLayerOptions]) -> None:
        final_sparsities(layout, request)

    def _prune(self, weights: Tensor, step: int) -> None:
        """Prune each tensor to its part of the budget."""
        total, sizes = self._layout.count, self._layout.sizes
        counts = []
        for keep, sparsities in zip(self._keep, self._sparsities, strict=True):
            left = cubic_budget(step / self._last, total, keep)
            done = (total - left) / max(1, total - keep)  # 1 - (1 - t/T)³
            counts.append(shares(sizes, left, [1.0 - done * sparsity for sparsity in sparsities]))
        keep_largest_(self.mask, self._layout, weights.abs().masked_fill_(~self.mask, -torch.inf), counts)

    def state(self) -> dict[str, Tensor]:
        return {"mask": self.mask}


def final_sparsities(layout: Layout, request: Request[PerLayerOptions]) -> list[float]:
    """The sparsity of each tensor that the request sets, and for the others what the budget leaves."""
    options = request.options
    chosen = [_own(options, shape) for shape in layout.shapes]
    fixed = sum(size * (share or 0.0) for size, share in zip(layout.sizes, chosen, strict=True))
    free = sum(size for size, share in zip(layout.sizes, chosen, strict=True) if share is None)
    wanted = layout.count - layout.keep(request.sparsity)
    rest = (wanted - fixed) / free if free else 0.0
    if not 0 <= rest < 1 or (not free and round(fixed) != wanted):
        raise ValueError(
            f"sparsity={request.sparsity} cannot be met with depthwise={options.depthwise} and "
            f"linear={options.linear}: these prune {fixed:,.0f} of {layout.count:,} weights, and the other {free:,} "
            f"would have a sparsity of {rest:.4f}"
        )
    return [rest if share is None else share for share in chosen]


def _own(options: PerLayerOptions, shape: tuple[int, ...]) -> float | None:
    if len(shape) > 2 and shape[-1] == 1:
        return options.depthwise
    return options.linear if len(shape) == 2 else None
