"""Network slimming: channels are judged by the gain of the batch norm behind them.

Rule: an L1 penalty on the gains γ of the batch norm behind each convolution during the sparsify phase, then the
channels with the smallest |γ| of the whole network go, and the rest is fine-tuned.
Reference: Liu et al. 2017, Learning Efficient Convolutional Networks through Network Slimming.
Ours: bias and gain of a removed channel are left alone, as they are no connections. What counts is in filters.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from gossamer.methods.filters import check_reach, laid_out
from gossamer.methods.rule import Layout, Options, Request, Rule, Timeline, column, expect, is_rate


@dataclass(frozen=True)
class SlimmingOptions(Options):
    penalty: float = 1e-4  # on the gains

    def __post_init__(self) -> None:
        expect(self, penalty=(is_rate(self.penalty), "a number of at least 0"))


def gains_of(model: nn.Module, names: Sequence[str], others: Sequence[tuple[str, int]]) -> tuple[slice | None, ...]:
    """For each weight the place, among the other parameters, of the gains of the batch norm that follows it."""
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
    """Raise an error where a convolution has no gains behind it by which its channels could be judged."""
    filters = [index for index, shape in enumerate(layout.shapes) if len(shape) > 2]
    alone = [layout.names[index] for index in filters if not layout.gains or layout.gains[index] is None]
    if alone:
        raise ValueError(f"slimming needs a batch norm behind every convolution, got none behind {alone[0]}")


def channels_to_keep(layout: Layout, filters: Sequence[int], gains: Sequence[float], wanted: int) -> list[list[bool]]:
    """Smallest gains first, channels go until the number of weights that is gone is nearest to `wanted`."""
    where = [(index, channel) for index in filters for channel in range(layout.shapes[index][0])]
    stays = {index: [True] * layout.shapes[index][0] for index in filters}
    gone = 0
    for number in sorted(range(len(where)), key=lambda number: gains[number]):
        index, channel = where[number]
        size = layout.sizes[index] // layout.shapes[index][0]
        if sum(stays[index]) == 1 or gone + size / 2 > wanted:
            continue
        stays[index][channel] = False
        gone += size
    return [stays[index] for index in filters]


class Slimming(Rule[SlimmingOptions]):
    name, title, options = "slimming", "channels by batch-norm gain (network slimming)", SlimmingOptions
    reference = "Liu et al. 2017, Learning Efficient Convolutional Networks through Network Slimming"
    structured, penalises = True, True

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[SlimmingOptions]],
        timeline: Timeline,
        weights: Tensor,
        *,
        floor: float,
    ) -> None:
        filters = [index for index, shape in enumerate(layout.shapes) if len(shape) > 2]
        check_gains(layout)
        for request in requests:
            check_reach(layout, request.sparsity)
        self._layout, self._requests, self._filters = layout, requests, filters
        self._cut_at, self._timeline = timeline.plan.sparsify, timeline
        places = [layout.gains[index] for index in filters]
        columns = [torch.arange(place.start, place.stop) for place in places if place is not None]
        self._columns = torch.cat(columns).to(weights.device)
        self._penalty = column([request.settings.penalty for request in requests], weights)
        self._gains = torch.ones(len(requests), len(self._columns), dtype=weights.dtype, device=weights.device)
        self._mask = torch.ones_like(weights, dtype=torch.bool)

    @property
    def mask(self) -> Tensor:
        return self._mask

    def penalise_(self, gradient: Tensor, others: Tensor) -> None:
        gains = others.index_select(1, self._columns)
        self._gains.copy_(gains)
        pressing = (self._timeline.clock < self._cut_at).to(gains.dtype)
        gradient.index_add_(1, self._columns, gains.sign() * self._penalty * pressing)

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(~self._mask, 0.0)

    def show_(self, weights: Tensor, out: Tensor) -> None:
        out.copy_(weights)

    def settle_(self, weights: Tensor) -> None:
        weights.masked_fill_(~self._mask, 0.0)

    def due(self, step: int) -> bool:
        return step == self._cut_at

    def refresh_(self, weights: Tensor, step: int) -> None:
        self._cut()
        weights.masked_fill_(~self._mask, 0.0)

    def freeze_(self, weights: Tensor) -> Tensor:
        if bool(self._mask.all()):
            self._cut()  # the run ended before the cut
        return self._mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self._mask, "gains": self._gains}

    def _cut(self) -> None:
        kept = [
            torch.ones(len(self._requests), shape[0], dtype=torch.bool, device=self._mask.device)
            for shape in self._layout.shapes
        ]
        for row, request in enumerate(self._requests):
            wanted = self._layout.count - self._layout.keep(request.sparsity)
            stays = channels_to_keep(self._layout, self._filters, self._gains[row].abs().tolist(), wanted)
            for index, mask in zip(self._filters, stays, strict=True):
                kept[index][row] = torch.tensor(mask, device=self._mask.device)
        self._mask.copy_(laid_out(self._layout, kept))
