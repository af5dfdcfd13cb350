"""Common parts of the methods that prune whole filters of convolutions: soft_filter.py, l1_filter.py and slimming.py.

The sparsity counts the weights of the pruned filters. Convolutions are the tensors with three or more dimensions; all
others stay dense. At least one filter of each convolution is kept, and the number of pruned weights is the closest to
the request that whole filters allow.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.methods.base import Layout, Request
from gossamer.methods.budgets import largest


def equal_share(layout: Layout, sparsity: float) -> list[int]:
    """The number of filters to keep per tensor if the same fraction of every convolution is pruned; other tensors keep
    all rows."""
    filters = [index for index, shape in enumerate(layout.shapes) if len(shape) > 2]
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
    counts = [equal_share(layout, request.sparsity) for request in requests]
    sizes = norms(layout, weights, order)
    return laid_out(layout, [largest(each, [row[index] for row in counts]) for index, each in enumerate(sizes)])


def norms(layout: Layout, weights: Tensor, order: int) -> list[Tensor]:
    """The norm of every output feature of every tensor: (runs, features) each."""
    parts = zip(layout.shapes, layout.split(weights), strict=True)
    return [part.reshape(len(part), shape[0], -1).norm(p=order, dim=2) for shape, part in parts]


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
