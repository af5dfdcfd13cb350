"""Attention heads: products, softmax and the fused operation act on every head independently.

Queries, keys, values and results of a head are removed together. A head whose values are zero is zero, and a head whose
result is unused is removed in any case. If a tensor is split along its features, each part keeps its own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, fx

from gossamer.deployment.compaction.analysis import Analysis
from gossamer.deployment.compaction.groups import Features
from gossamer.deployment.compaction.nodes import shape
from gossamer.deployment.graph import aten, bound

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
_HEADS = -3  # the axis of heads in (batch, heads, positions, features)


class Attended:
    """``scaled_dot_product_attention``. Its weights sum to one, so a head with a constant value returns that value."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        given = bound(node)
        if given["dropout_p"] or given["enable_gqa"] or not _same_for_all_heads(given["attn_mask"]):
            return None
        sides = [analysis.of(each) for each in node.args[:3]]
        if not _alike(node.args[:3], sides):
            return None
        query, key, value = cast(list[Features], sides)
        analysis.groups.join(value.ids, query.ids)
        analysis.groups.join(value.ids, key.ids)
        return Features(_HEADS, value.ids, value.constant)

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        for each in node.args[:3]:
            analysis.read(each, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Nothing: its three inputs are already smaller."""


class MatrixProduct:
    """A matrix product per head."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        sides = [analysis.of(each) for each in node.args]
        if not _alike(node.args, sides):
            return None
        left, right = cast(list[Features], sides)
        analysis.groups.join(left.ids, right.ids)
        zero = (left.constant == 0) | (right.constant == 0)
        return Features(_HEADS, left.ids, torch.zeros_like(left.constant).where(zero, torch.nan))

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        for each in node.args:
            analysis.read(each, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Nothing: its two inputs are already smaller."""


class Softmax:
    """Softmax along another axis: features are preserved, constants are not."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        source, size = analysis.of(node.args[0]), shape(node)
        if source is None or size is None or bound(node)["dim"] % len(size) == len(size) + source.dim:
            return None
        return Features(source.dim, source.ids, torch.full_like(source.constant, torch.nan))

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Nothing: it has no parameters per feature."""


class Parts:
    """A split tensor: along another axis all parts have its features; along the feature axis each has its own."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        source, before = analysis.of(node.args[0]), shape(cast(fx.Node, node.args[0]))
        dim = bound(node)["dim"]
        if source is None or before is None:
            return None
        along, axis = dim % len(before), len(before) + source.dim
        if node.target is aten.unbind.int:
            return None if along == axis else Features(source.dim + (along > axis), source.ids, source.constant)
        if any(user.target is not operator.getitem for user in node.users):
            return None
        return source

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        kept, places = analysis.kept(node), places_of_parts(analysis, node)
        if kept is None or kept.all() or places is None:
            return
        sizes = [int(kept[each].sum()) for each in places]
        node.target, node.args = aten.split_with_sizes.default, (node.args[0], sizes, bound(node)["dim"])


def places_of_parts(analysis: Analysis, node: fx.Node) -> list[slice] | None:
    """The features of each part of a tensor that is split along its features."""
    before, source, dim = shape(cast(fx.Node, node.args[0])), analysis.of(node.args[0]), bound(node)["dim"]
    if node.target is aten.unbind.int or before is None or source is None:
        return None
    if dim % len(before) != len(before) + source.dim:
        return None
    places, first = [], 0
    for part in node.meta["tensor_meta"]:
        places.append(slice(first, first + part.shape[dim]))
        first += part.shape[dim]
    return places


def _alike(arguments: Sequence[object], sides: Sequence[Features | None]) -> bool:
    """Whether all are matrices with the same heads."""
    for argument, side in zip(arguments, sides, strict=True):
        size = shape(argument) if isinstance(argument, fx.Node) else None
        if side is None or side.dim != _HEADS or size is None or len(size) != 4:
            return False
    return len({cast(Features, side).count for side in sides}) == 1


def _same_for_all_heads(mask: object) -> bool:
    size = shape(mask) if isinstance(mask, fx.Node) else None
    return mask is None or (size is not None and (len(size) < -_HEADS or size[_HEADS] == 1))
