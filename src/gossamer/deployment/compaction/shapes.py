"""Operations that move, join or summarise positions: pooling, concatenation, padding, other orders of axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.padding import _ConstantPadNd

from gossamer.deployment.compaction.analysis import Analysis
from gossamer.deployment.compaction.groups import Features, Hold, Reason
from gossamer.deployment.compaction.nodes import bound, shape

POOL_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.Upsample, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
)
_EXACT_POOLS = (functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d)
_AVERAGES = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
_MAXIMA = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
POOL_FUNCTIONS: tuple[Callable[..., Any], ...] = (*_EXACT_POOLS, *_AVERAGES, *_MAXIMA, functional.interpolate)
REDUCTIONS: tuple[Any, ...] = (torch.mean, "mean", torch.amax, "amax")
CONCATENATIONS: tuple[Any, ...] = (torch.cat, torch.concat)
NEW_AXES: tuple[Any, ...] = (torch.squeeze, "squeeze", torch.unsqueeze, "unsqueeze")
MOVES: tuple[Any, ...] = (torch.permute, "permute", torch.transpose, "transpose")


class Pool:
    """Pooling, resizing and spatial padding: positions change, features stay."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        source, size = analysis.of(node.args[0]), shape(node)
        if source is None or size is None or len(node.all_input_nodes) != 1 or len(size) + source.dim != 1:
            return None
        kept = source.is_constant if self._keeps_constants(analysis, node) else source.constant == 0
        if node.op == "call_module" and isinstance(module := analysis.module(node), _ConstantPadNd):
            kept = source.constant == module.value
        return Features(source.dim, source.ids, source.constant.where(kept, torch.nan))

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """It has nothing for single features."""

    @staticmethod
    def _keeps_constants(analysis: Analysis, node: fx.Node) -> bool:
        """Whether the average, the largest or the resized of equal values is that value, also at the border."""
        if node.op == "call_module":
            module = analysis.module(node)
            if isinstance(module, nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d):
                padding = module.padding if isinstance(module.padding, tuple) else (module.padding,)
                return not any(padding) and getattr(module, "divisor_override", None) is None
            return not isinstance(module, nn.Upsample)
        if node.target in _AVERAGES:
            names = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
            given = bound(node, *names, padding=0)
            padding = given.get("padding", 1)
            zero = not any(padding) if isinstance(padding, tuple | list) else padding == 0
            return zero and given.get("divisor_override") is None
        return node.target is not functional.interpolate


class Reduction:
    """The mean or maximum over positions."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        given = bound(node, "input", "dim", "keepdim", keepdim=False, dim=None)
        source = analysis.of(given.get("input"))
        before = shape(node.args[0]) if isinstance(node.args[0], fx.Node) else None
        dims = (given["dim"],) if given and isinstance(given["dim"], int) else given.get("dim")
        if source is None or before is None or not isinstance(dims, tuple | list) or len(node.all_input_nodes) != 1:
            return None
        gone = {dim - len(before) if dim >= 0 else dim for dim in cast(tuple[int, ...], dims)}
        if source.dim in gone:
            return None
        behind = 0 if given["keepdim"] else sum(dim > source.dim for dim in gone)
        return Features(source.dim + behind, source.ids, source.constant)

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """It has nothing for single features."""


class Move:
    """Axes in another order."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        source, size = analysis.of(node.args[0]), shape(node)
        if source is None or size is None or node.kwargs:
            return None
        rest = node.args[1:]
        dims = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else list(rest)
        if not all(isinstance(dim, int) for dim in dims):
            return None
        order = [dim % len(size) for dim in cast(list[int], dims)]
        if node.target in (torch.transpose, "transpose"):
            one, other = order
            order = list(range(len(size)))
            order[one], order[other] = other, one
        return Features(order.index(len(size) + source.dim) - len(size), source.ids, source.constant)

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """It has nothing for single features."""


class NewAxis:
    """An axis of size one that comes or goes."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        dim = bound(node, "input", "dim", dim=None).get("dim")
        source, before, after = analysis.of(node.args[0]), shape(cast(fx.Node, node.args[0])), shape(node)
        if source is None or before is None or after is None or not isinstance(dim, int):
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
        """It has nothing for single features."""


class Concatenation:
    """Features of several tensors one after the other, where those that come from elsewhere stay; or positions of
    tensors with the same features, which then go together."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        given, size = bound(node, "tensors", "dim", dim=0), shape(node)
        parts, dim = given.get("tensors"), given.get("dim")
        if not isinstance(parts, tuple | list) or not isinstance(dim, int) or size is None:
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
        parts = cast(list[Any], bound(node, "tensors", "dim", dim=0)["tensors"])
        first = analysis.of(parts[0])
        if first is not None and first.count == needed.numel() and len(parts) > 1:
            for part in parts:
                analysis.read(part, needed)
        else:
            analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Its parts have become smaller."""

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
    """``functional.pad`` with a constant: new features, as in the shortcuts of ResNets, or new positions."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        given = bound(node, "input", "pad", "mode", "value", mode="constant", value=None)
        source, pads = analysis.of(given.get("input")), given.get("pad")
        if source is None or given["mode"] != "constant" or not isinstance(pads, tuple | list):
            return None
        if not all(isinstance(pad, int) and pad >= 0 for pad in pads):
            return None
        value = float(given["value"] or 0)
        first, last = _new_features(pads, source.dim)
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
        given = bound(node, "input", "pad", "mode", "value", mode="constant", value=None)
        dim, pads = analysis.features[node].dim, list(given["pad"])
        first, last = _new_features(pads, dim)
        if first + last:
            pads[2 * (-dim - 1)] = int(kept[:first].sum())
            pads[2 * (-dim - 1) + 1] = int(kept[len(kept) - last :].sum())
            node.args, node.kwargs = (given["input"], tuple(pads), given["mode"], given["value"]), {}


def _new_features(pads: Any, dim: int) -> tuple[int, int]:
    """How many features are put in front and behind."""
    place = 2 * (-dim - 1)
    return (pads[place], pads[place + 1]) if place + 1 < len(pads) else (0, 0)
