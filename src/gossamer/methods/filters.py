"""Methods that remove whole filters of convolutions: soft filter pruning, L1 filters, network slimming.

What counts is the weights of the removed filters. Convolutions are the tensors with three or more dimensions; all
others stay dense. At least one filter of each convolution stays, and the count is the nearest to the asked one that
whole filters allow.

Soft filter pruning (He et al. 2018): after every epoch the filters with the smallest L2 norm, the same share of every
layer, are set to zero, but train on as all others do; at the end they go. Ours: in the sparsify phase, from the
warmed-up network, with the final share in every epoch; after it the choice stands. Zeroed filters begin without
momentum, and their gradient is limited to the mean norm of the gradients of the filters that stay: a batch norm behind
a filter of zeros divides by √ε, which would throw it back larger than all others, and others would go in its place.
L1 filters (Li et al. 2017): the filters with the smallest L1 norm go, once, where masks begin, the same share of every
layer; the rest of the run is fine-tuning. Ours: no layer is spared by hand.
Network slimming (Liu et al. 2017): an L1 penalty on the gains γ of the batch norm behind each convolution during the
sparsify phase, then the channels with the smallest |γ| of the whole network go, and the rest is fine-tuned. Ours: bias
and gain of a removed channel are left alone, as they are no connections.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from gossamer import method
from gossamer.methods.budgets import largest
from gossamer.methods.rule import Layout, Options, RemovedIsZero, Request, Rule, Timeline, column, expect, is_rate


def equal_share(layout: Layout, sparsity: float) -> list[int]:
    """How many filters of each tensor stay when every convolution loses the same share; for other tensors all rows."""
    filters = [index for index, shape in enumerate(layout.shapes) if len(shape) > 2]
    wanted = layout.count - layout.keep(sparsity)
    check_reach(layout, sparsity)

    def kept(share: float) -> list[int]:
        rows = [shape[0] for shape in layout.shapes]
        return [max(1, round(share * rows[index])) if index in filters else rows[index] for index in range(len(rows))]

    def misses(counts: list[int]) -> int:
        gone = sum(
            (shape[0] - count) * (size // shape[0])
            for shape, size, count in zip(layout.shapes, layout.sizes, counts, strict=True)
        )
        return abs(gone - wanted)

    # Every share at which a filter more or less stays is at a half of one of the tensors.
    most = max(layout.shapes[index][0] for index in filters)
    return min((kept(step / (4 * most)) for step in range(4 * most + 1)), key=misses)


def norms(layout: Layout, weights: Tensor, order: int) -> list[Tensor]:
    """The norm of every output feature of every tensor: (rows, features) each."""
    parts = zip(layout.shapes, layout.split(weights), strict=True)
    return [part.reshape(len(part), shape[0], -1).norm(p=order, dim=2) for shape, part in parts]


def laid_out(layout: Layout, kept: Sequence[Tensor]) -> Tensor:
    """Masks of features as masks of connections."""
    parts = zip(layout.shapes, layout.sizes, kept, strict=True)
    return torch.cat([mask.repeat_interleave(size // shape[0], dim=1) for shape, size, mask in parts], dim=1)


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


def check_reach(layout: Layout, sparsity: float) -> None:
    """Raise an error where whole filters are too coarse for a sparsity."""
    most = sum(
        size - size // shape[0] for shape, size in zip(layout.shapes, layout.sizes, strict=True) if len(shape) > 2
    )
    if layout.count - layout.keep(sparsity) > most:
        raise ValueError(
            f"sparsity={sparsity} cannot be met by whole filters, of which each convolution keeps at least one: "
            f"at most {most / layout.count:.4f} of the weights can go"
        )


def check_gains(layout: Layout) -> None:
    """Raise an error where a convolution has no gains behind it by which its channels could be judged."""
    filters = [index for index, shape in enumerate(layout.shapes) if len(shape) > 2]
    alone = [layout.names[index] for index in filters if not layout.gains or layout.gains[index] is None]
    if alone:
        raise ValueError(f"slimming needs a batch norm behind every convolution, got none behind {alone[0]}")


class L1Filter(RemovedIsZero[Options]):
    name, title, options = "l1_filter", "filters by L1 norm, at once (Li)", Options
    reference = "Li et al. 2017, Pruning Filters for Efficient ConvNets"
    structured = True

    def __init__(
        self, layout: Layout, requests: Sequence[Request[Options]], timeline: Timeline, weights: Tensor, *, floor: float
    ) -> None:
        self._mask = _by_norm(layout, requests, weights, order=1)

    @property
    def mask(self) -> Tensor:
        return self._mask

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(~self._mask, 0.0)

    def freeze_(self, weights: Tensor) -> Tensor:
        return self._mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self._mask}


class SoftFilter(Rule[Options]):
    name, title, options = "soft_filter", "soft filter pruning (He)", Options
    reference = "He et al. 2018, Soft Filter Pruning for Accelerating Deep Convolutional Neural Networks"
    structured = True

    def __init__(
        self, layout: Layout, requests: Sequence[Request[Options]], timeline: Timeline, weights: Tensor, *, floor: float
    ) -> None:
        self._layout, self._requests, self._every = layout, requests, timeline.often(timeline.epoch)
        self._last = timeline.plan.sparsify
        self._mask = _by_norm(layout, requests, weights, order=2)
        self._soft = torch.ones(1, dtype=torch.bool, device=weights.device)  # whether removed filters train on

    @property
    def mask(self) -> Tensor:
        return self._mask

    def show_(self, weights: Tensor, out: Tensor) -> None:
        out.copy_(weights)

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(~(self._mask | self._soft), 0.0)
        parts = zip(self._layout.shapes, self._layout.split(gradient), self._layout.split(self._mask), strict=True)
        for shape, part, kept in parts:
            filters, stays = (each.view(len(each), shape[0], -1) for each in (part, kept))
            _limit_(filters, stays[:, :, 0])

    def settle_(self, weights: Tensor) -> None:
        weights.masked_fill_(~(self._mask | self._soft), 0.0)

    def due(self, step: int) -> bool:
        return (step < self._last and step % self._every == 0) or step == self._last

    def refresh_(self, weights: Tensor, step: int) -> Tensor:
        self._mask.copy_(_by_norm(self._layout, self._requests, weights, order=2))
        weights.masked_fill_(~self._mask, 0.0)
        self._soft.fill_(step < self._last)
        return ~self._mask

    def freeze_(self, weights: Tensor) -> Tensor:
        if bool(self._soft):
            self._mask.copy_(_by_norm(self._layout, self._requests, weights, order=2))  # the run ended before
        return self._mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self._mask, "soft": self._soft}


def _limit_(filters: Tensor, stays: Tensor) -> None:
    """Scale gradients of removed filters down to the mean norm of those that stay."""
    sizes = filters.norm(dim=2)
    usual = (sizes * stays).sum(1, keepdim=True) / stays.sum(1, keepdim=True)
    factors = (usual / sizes.clamp_min(method.EPSILON)).clamp_max(1.0)
    filters.mul_(torch.where(stays, 1.0, factors)[:, :, None])


@dataclass(frozen=True)
class SlimmingOptions(Options):
    penalty: float = 1e-4  # on the gains

    def __post_init__(self) -> None:
        expect(self, penalty=(is_rate(self.penalty), "a number of at least 0"))


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


def _by_norm(layout: Layout, requests: Sequence[Request[Any]], weights: Tensor, *, order: int) -> Tensor:
    counts = [equal_share(layout, request.sparsity) for request in requests]
    sizes = norms(layout, weights, order)
    return laid_out(layout, [largest(each, [row[index] for row in counts]) for index, each in enumerate(sizes)])
