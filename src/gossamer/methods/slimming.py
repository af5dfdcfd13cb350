"""Network slimming: channels are ranked by the gain of the batch norm that follows them.

Rule: an L1 penalty on the gains γ of the batch norm after each convolution during the sparsify phase; then the
channels with the smallest |γ| of the whole network are pruned, and the rest is fine-tuned.
Reference: Liu et al. 2017, Learning Efficient Convolutional Networks through Network Slimming.
Ours: gain and bias of a pruned channel do not change, as they are not prunable. filters.py defines the sparsity.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from gossamer.methods.base import Context, Layout, Options, Request, expect, is_rate
from gossamer.methods.filters import check_reach, laid_out
from gossamer.methods.timing import PrunedOnce


@dataclass(frozen=True)
class SlimmingOptions(Options):
    penalty: float = 1e-4  # on the gains

    def __post_init__(self) -> None:
        expect(self, penalty=(is_rate(self.penalty), "a number of at least 0"))


def gains_of(model: nn.Module, names: Sequence[str], others: Sequence[tuple[str, int]]) -> tuple[slice | None, ...]:
    """For each weight, the positions of the gains of the following batch norm among the other parameters."""
    places, offset = {}, 0
    for name, size in others:
        places[name] = slice(offset, offset + size)
        offset += size
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _ConvNd | _NormBase)]
    found = {}
    for (name, module), (next_name, norm) in pairwise(layers):
        if isinstance(module, _ConvNd) and isinstance(norm, _NormBase) and norm.num_features == module.out_channels:
            found[f"{name}.weight"] = places.get(f"{next_name}.weight")
    return tuple(found.get(name) for name in names)


def check_gains(layout: Layout) -> None:
    """Raise an error if a convolution has no batch norm after it to rank its channels."""
    filters = [index for index, shape in enumerate(layout.shapes) if len(shape) > 2]
    alone = [layout.names[index] for index in filters if not layout.gains or layout.gains[index] is None]
    if alone:
        raise ValueError(f"slimming needs a batch norm after every convolution, got none after {alone[0]}")


def channels_to_keep(layout: Layout, filters: Sequence[int], gains: Sequence[float], wanted: int) -> list[list[bool]]:
    """Prune channels, smallest gains first, until the number of pruned weights is closest to `wanted`."""
    where = [(index, channel) for index in filters for channel in range(layout.shapes[index][0])]
    stays = {index: [True] * layout.shapes[index][0] for index in filters}
    pruned = 0
    for number in sorted(range(len(where)), key=lambda number: gains[number]):
        index, channel = where[number]
        size = layout.sizes[index] // layout.shapes[index][0]
        if sum(stays[index]) == 1 or pruned + size / 2 > wanted:
            continue
        stays[index][channel] = False
        pruned += size
    return [stays[index] for index in filters]


class Slimming(PrunedOnce[SlimmingOptions]):
    name, title, options = "slimming", "channels by batch-norm gain (network slimming)", SlimmingOptions
    reference = "Liu et al. 2017, Learning Efficient Convolutional Networks through Network Slimming"
    structured = penalizes = True
    exact = False

    def __init__(self, context: Context[SlimmingOptions]) -> None:
        self._layout, self._requests, self._timeline = context.layout, context.requests, context.timeline
        weights = context.weights
        for request in self._requests:
            self.check(self._layout, request)
        self._filters = [index for index, shape in enumerate(self._layout.shapes) if len(shape) > 2]
        places = [self._layout.gains[index] for index in self._filters]
        columns = [torch.arange(place.start, place.stop) for place in places if place is not None]
        self._columns = torch.cat(columns).to(weights.device)
        self._prune_after, self._penalty = context.timeline.plan.sparsify, context.column("penalty")
        self._gains = weights.new_ones(len(weights), len(self._columns))
        self.mask = torch.ones_like(weights, dtype=torch.bool)

    @classmethod
    def check(cls, layout: Layout, request: Request[SlimmingOptions]) -> None:
        check_gains(layout)
        check_reach(layout, request.sparsity)

    def add_penalty(self, gradient: Tensor, others: Tensor) -> None:
        gains = others.index_select(1, self._columns)
        self._gains.copy_(gains)
        pressing = (self._timeline.clock < self._prune_after).to(gains.dtype)
        gradient.index_add_(1, self._columns, gains.sign() * self._penalty * pressing)

    def _prune(self, weights: Tensor) -> None:
        kept = [self.mask.new_ones(len(self.mask), shape[0]) for shape in self._layout.shapes]
        for row, request in enumerate(self._requests):
            wanted = self._layout.count - self._layout.keep(request.sparsity)
            stays = channels_to_keep(self._layout, self._filters, self._gains[row].abs().tolist(), wanted)
            for index, mask in zip(self._filters, stays, strict=True):
                kept[index][row] = torch.tensor(mask, device=self.mask.device)
        self.mask.copy_(laid_out(self._layout, kept))

    def state(self) -> dict[str, Tensor]:
        return {"mask": self.mask, "gains": self._gains}
