"""Operations on positions: pooling, concatenation, padding, selection and permutation of axes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

from gossamer.deployment.compaction.analysis import Analysis
from gossamer.deployment.compaction.groups import Features, Hold, Reason
from gossamer.deployment.compaction.nodes import shape
from gossamer.deployment.graph import aten, bound

_AVERAGES = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
_RESIZES = (
    *(aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec),
    *(aten._upsample_nearest_exact1d.vec, aten._upsample_nearest_exact2d.vec, aten._upsample_nearest_exact3d.vec),
    *(aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec),
    aten.upsample_trilinear3d.vec,
)
WITH_PLACES = (
    *(aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default),
    aten.max_pool2d_with_indices.default,
)
"""Calls that return maxima and their positions."""
POOLS = (
    *(*_AVERAGES, *_RESIZES, *WITH_PLACES, aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default),
    *(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default),
)
REDUCTIONS = (aten.mean.dim, aten.amax.default)
CONCATENATIONS = (aten.cat.default,)
NEW_AXES = (aten.squeeze.dim, aten.unsqueeze.default)
MOVES = (aten.permute.default, aten.transpose.int)
PICKS = (aten.select.int, aten.slice.Tensor)
PADS = (aten.pad.default, aten.constant_pad_nd.default)


class Pool:
    """Pooling, resizing and spatial padding: positions change, features do not."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        source, before = analysis.of(node.args[0]), shape(cast(fx.Node, node.args[0]))
        if source is None or before is None or len(before) + source.dim != 1:
            return None
        kept = source.is_constant if self._keeps_constants(node) else source.constant == 0
        return Features(source.dim, source.ids, source.constant.where(kept, torch.nan))

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Nothing: it has no parameters per feature."""

    @staticmethod
    def _keeps_constants(node: fx.Node) -> bool:
        """Whether the operation preserves a constant, also at the border."""
        if node.target in _AVERAGES:
            given = bound(node)
            return not any(given["padding"]) and given.get("divisor_override") is None
        return node.target not in _RESIZES


class Reduction:
    """The mean or maximum over positions."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        given, before = bound(node), shape(cast(fx.Node, node.args[0]))
        source, dims = analysis.of(given["self"]), given["dim"]
        if source is None or before is None or not dims:
            return None
        reduced = {dim - len(before) if dim >= 0 else dim for dim in dims}
        if source.dim in reduced:
            return None
        behind = 0 if given["keepdim"] else sum(dim > source.dim for dim in reduced)
        return Features(source.dim + behind, source.ids, source.constant)

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Nothing: it has no parameters per feature."""


class Move:
    """A permutation of axes."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        source, size = analysis.of(node.args[0]), shape(node)
        if source is None or size is None:
            return None
        if node.target is aten.permute.default:
            order = [dim % len(size) for dim in cast(list[int], node.args[1])]
        else:
            one, other = cast(tuple[int, int], node.args[1:])
            order = list(range(len(size)))
            order[one], order[other] = order[other], order[one]
        return Features(order.index(len(size) + source.dim) - len(size), source.ids, source.constant)

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Nothing: it has no parameters per feature."""


class NewAxis:
    """Adding or removing an axis of size one."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        dim = bound(node)["dim"]
        source, before, after = analysis.of(node.args[0]), shape(cast(fx.Node, node.args[0])), shape(node)
        if source is None or before is None or after is None:
            return None
        place, axis = dim % max(len(before), len(after)), len(before) + source.dim
        if len(after) > len(before):
            return Features(source.dim - (place > axis), source.ids, source.constant)
        if place == axis:
            return None
        return Features(source.dim + (len(after) < len(before) and place > axis), source.ids, source.constant)

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Nothing: it has no parameters per feature."""


class Pick:
    """A selection of positions."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        source, before = analysis.of(node.args[0]), shape(cast(fx.Node, node.args[0]))
        if source is None or before is None:
            return None
        place, axis = bound(node)["dim"] % len(before), len(before) + source.dim
        if place == axis:
            return None
        behind = node.target is aten.select.int and place > axis
        return Features(source.dim + behind, source.ids, source.constant)

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Nothing: it has no parameters per feature."""


class Concatenation:
    """Concatenation along features, where features of unknown tensors are kept; or along positions of tensors with the
    same features, which are then tied."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        given, size = bound(node), shape(node)
        parts, dim = given["tensors"], given["dim"]
        if size is None:
            return None
        axis = dim - len(size) if dim >= 0 else dim
        known = [features for features in map(analysis.of, parts) if features is not None]
        if known and len(known) == len(parts) and all(features.dim != axis for features in known):
            return self._along_positions(analysis, known)
        pieces = [self._piece(analysis, node, part, axis) for part in parts]
        if any(piece is None for piece in pieces) or not any(analysis.of(part) for part in parts):
            return None
        found = cast(list[Features], pieces)
        return Features(axis, torch.cat([each.ids for each in found]), torch.cat([each.constant for each in found]))

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        parts = bound(node)["tensors"]
        first = analysis.of(parts[0])
        if first is not None and first.count == needed.numel() and len(parts) > 1:
            for part in parts:
                analysis.read(part, needed)
        else:
            analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Nothing: its parts are already smaller."""

    @staticmethod
    def _along_positions(analysis: Analysis, parts: list[Features]) -> Features | None:
        first = parts[0]
        if any(features.dim != first.dim or features.count != first.count for features in parts):
            return None
        for features in parts[1:]:
            analysis.groups.join(first.ids, features.ids)
        same = torch.stack([features.constant == first.constant for features in parts]).all(0)
        return Features(first.dim, first.ids, first.constant.where(same, torch.nan))

    @staticmethod
    def _piece(analysis: Analysis, node: fx.Node, part: Any, axis: int) -> Features | None:
        features, size = analysis.of(part), shape(part)
        if size is None or (features is not None and features.dim != axis):
            return None
        if features is None:
            ids = analysis.groups.fresh(size[axis])
            analysis.groups.hold(ids, Reason(Hold.UNKNOWN, analysis.name(node)))
            return Features(axis, ids, torch.full((size[axis],), torch.nan, dtype=torch.float64))
        return features


class Padding:
    """Padding with new constant features, as in the shortcuts of ResNets, or with new positions."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        given = bound(node)
        source, pads = analysis.of(given["self"]), given["pad"]
        if source is None or not all(isinstance(pad, int) and pad >= 0 for pad in pads):
            return None
        first, last = _new_features(pads, source.dim)
        if given.get("mode", "constant") != "constant":  # new positions are copies of existing ones
            return None if first + last else source
        value = float(given["value"] or 0)
        constant = source.constant
        if sum(pads) > first + last:
            constant = constant.where(constant == value, torch.nan)
        ids = [analysis.groups.fresh(first), source.ids, analysis.groups.fresh(last)]
        constants = [constant.new_full((first,), value), constant, constant.new_full((last,), value)]
        return Features(source.dim, torch.cat(ids), torch.cat(constants))

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        kept = analysis.kept(node)
        assert kept is not None
        given = bound(node)
        dim, pads = analysis.features[node].dim, list(given["pad"])
        first, last = _new_features(pads, dim)
        if first + last:
            pads[2 * (-dim - 1)] = int(kept[:first].sum())
            pads[2 * (-dim - 1) + 1] = int(kept[len(kept) - last :].sum())
            node.target = aten.constant_pad_nd.default
            node.args, node.kwargs = (given["self"], pads, given["value"] or 0), {}


def _new_features(pads: Any, dim: int) -> tuple[int, int]:
    """The number of features added in front and behind."""
    place = 2 * (-dim - 1)
    return (pads[place], pads[place + 1]) if place + 1 < len(pads) else (0, 0)
