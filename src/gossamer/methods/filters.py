"""Common parts of the methods that prune whole filters of convolutions.

The sparsity counts the weights of the pruned filters. Convolutions are the tensors with three or more dimensions; all
others stay dense. At least one filter of each convolution is kept, and the number of pruned weights is the closest to
the request that whole filters allow.
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from gossamer.methods.base import Context, Layout, Norm, Request, S
from gossamer.methods.budgets import largest
from gossamer.methods.timing import PrunedOnce


def filters_of(layout: Layout) -> list[int]:
    """The tensors whose filters can be pruned."""
    return [index for index, shape in enumerate(layout.shapes) if len(shape) > 2]


# --- the same fraction of every convolution ---


def equal_share(layout: Layout, sparsity: float) -> list[int]:
    """The number of filters to keep per tensor if the same fraction of every convolution is pruned; other tensors keep
    all rows."""
    filters = filters_of(layout)
    wanted = layout.count - layout.keep(sparsity)
    check_reach(layout, sparsity)

    def kept(share: float) -> list[int]:
        rows = [shape[0] for shape in layout.shapes]
        return [max(1, round(share * rows[index])) if index in filters else rows[index] for index in range(len(rows))]

    def misses(counts: list[int]) -> int:
        pruned = sum(
            (shape[0] - count) * (size // shape[0])
            for shape, size, count in zip(layout.shapes, layout.sizes, counts, strict=True)
        )
        return abs(pruned - wanted)

    # The number of kept filters of a tensor changes where its share is a half-integer.
    most = max(layout.shapes[index][0] for index in filters)
    return min((kept(step / (4 * most)) for step in range(4 * most + 1)), key=misses)


def by_norm(layout: Layout, requests: Sequence[Request[Any]], weights: Tensor, *, order: int) -> Tensor:
    """A mask of weights that keeps the filters with the largest norms, the same fraction in every convolution."""
    return in_equal_shares(layout, requests, [each.norm(p=order, dim=2) for each in by_filter(layout, weights)])


def in_equal_shares(layout: Layout, requests: Sequence[Request[Any]], scores: Sequence[Tensor]) -> Tensor:
    """A mask of weights that keeps the filters with the largest scores, (runs, features) for each tensor."""
    counts = [equal_share(layout, request.sparsity) for request in requests]
    return laid_out(layout, [largest(each, [row[index] for row in counts]) for index, each in enumerate(scores)])


def by_filter(layout: Layout, weights: Tensor) -> list[Tensor]:
    """The weights of every output feature of every tensor: (runs, features, weights) each."""
    parts = zip(layout.shapes, layout.split(weights), strict=True)
    return [part.reshape(len(part), shape[0], -1) for shape, part in parts]


def laid_out(layout: Layout, kept: Sequence[Tensor]) -> Tensor:
    """Masks of features as masks of weights."""
    parts = zip(layout.shapes, layout.sizes, kept, strict=True)
    return torch.cat([mask.repeat_interleave(size // shape[0], dim=1) for shape, size, mask in parts], dim=1)


def check_reach(layout: Layout, sparsity: float) -> None:
    """Raise an error if whole filters are too coarse for a sparsity."""
    most = sum(
        size - size // shape[0] for shape, size in zip(layout.shapes, layout.sizes, strict=True) if len(shape) > 2
    )
    if layout.count - layout.keep(sparsity) > most:
        raise ValueError(
            f"sparsity={sparsity} cannot be met by whole filters, of which each convolution keeps at least one: "
            f"at most {most / layout.count:.4f} of the weights can be pruned"
        )


# --- the batch norm after each convolution ---


def norms_of(model: nn.Module, names: Sequence[str], others: Sequence[tuple[str, int]]) -> tuple[Norm | None, ...]:
    """For each weight, the following batch norm. `others` are the names and sizes of the other parameters."""
    places, offset = dict[str, slice](), 0
    for name, size in others:
        places[name] = slice(offset, offset + size)
        offset += size
    found = {}
    for name, (next_name, _) in norms_after(model).items():
        gains, biases = (places.get(f"{next_name}.{kind}") for kind in ("weight", "bias"))
        found[f"{name}.weight"] = None if gains is None or biases is None else Norm(gains, biases)
    return tuple(found.get(name) for name in names)


def norms_after(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """The name of each convolution with a batch norm next to it, and the name and module of that norm."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _ConvNd | _NormBase)]
    return {
        name: (next_name, norm)
        for (name, module), (next_name, norm) in pairwise(layers)
        if isinstance(module, _ConvNd) and isinstance(norm, _NormBase) and norm.num_features == module.out_channels
    }


def check_norms(layout: Layout, method: str) -> None:
    """Raise an error if a convolution has no batch norm after it to rank its channels."""
    alone = [layout.names[index] for index in filters_of(layout) if not layout.norms or layout.norms[index] is None]
    if alone:
        raise ValueError(f"{method} needs a batch norm after every convolution, got none after {alone[0]}")


# --- one ranking of all channels of the network, at one step ---


def channels_to_keep(layout: Layout, filters: Sequence[int], scores: Sequence[float], wanted: int) -> list[list[bool]]:
    """Prune channels, smallest scores first, until the number of pruned weights is closest to `wanted`."""
    where = [(index, channel) for index in filters for channel in range(layout.shapes[index][0])]
    stays = {index: [True] * layout.shapes[index][0] for index in filters}
    pruned = 0
    for number in sorted(range(len(where)), key=lambda number: scores[number]):
        index, channel = where[number]
        size = layout.sizes[index] // layout.shapes[index][0]
        if sum(stays[index]) == 1 or pruned + size / 2 > wanted:
            continue
        stays[index][channel] = False
        pruned += size
    return [stays[index] for index in filters]


class PrunedChannels(PrunedOnce[S]):
    """Base of methods that rank all channels of the network at the end of the sparsify phase, and prune the last."""

    structured = True
    exact = False

    def _begin(self, context: Context[S]) -> None:
        self._layout, self._requests, self._timeline = context.layout, context.requests, context.timeline
        for request in self._requests:
            self.check(self._layout, request)
        self._filters, self._prune_after = filters_of(self._layout), context.timeline.plan.sparsify
        self.mask = torch.ones_like(context.weights, dtype=torch.bool)

    @classmethod
    def check(cls, layout: Layout, request: Request[S]) -> None:
        check_reach(layout, request.sparsity)

    @abstractmethod
    def _scores(self, weights: Tensor) -> Tensor:
        """One number per filter, (runs, filters)."""

    def _sparsifying(self, dtype: torch.dtype) -> Tensor:
        """1 in the sparsify phase, 0 after it."""
        return (self._timeline.clock < self._prune_after).to(dtype)

    def _prune(self, weights: Tensor) -> None:
        kept = [self.mask.new_ones(len(self.mask), shape[0]) for shape in self._layout.shapes]
        for row, (request, scores) in enumerate(zip(self._requests, self._scores(weights).tolist(), strict=True)):
            wanted = self._layout.count - self._layout.keep(request.sparsity)
            stays = channels_to_keep(self._layout, self._filters, scores, wanted)
            for index, mask in zip(self._filters, stays, strict=True):
                kept[index][row] = torch.tensor(mask, device=self.mask.device)
        self.mask.copy_(laid_out(self._layout, kept))

    def state(self) -> dict[str, Tensor]:
        return {"mask": self.mask}


class PrunedByNorm(PrunedChannels[S]):
    """Base of those whose ranking comes from the batch norm after each convolution."""

    penalizes = True

    def _begin(self, context: Context[S]) -> None:
        super()._begin(context)
        norms = [norm for norm in (self._layout.norms[index] for index in self._filters) if norm is not None]
        self._columns, self._bias_columns = (
            torch.cat([torch.arange(place.start, place.stop) for place in places]).to(context.weights.device)
            for places in ([norm.gains for norm in norms], [norm.biases for norm in norms])
        )
        self._gains = context.weights.new_ones(len(context.weights), len(self._columns))  # of the latest step

    @classmethod
    def check(cls, layout: Layout, request: Request[S]) -> None:
        check_norms(layout, cls.name)
        check_reach(layout, request.sparsity)

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "gains": self._gains}
