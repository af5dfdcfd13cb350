"""Operations on every feature independently: activations, sums, products, conditions.

The result of such an operation on constants is computed by running it on the constants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from gossamer.deployment.compaction.analysis import Analysis
from gossamer.deployment.compaction.groups import Features, Hold, Reason
from gossamer.deployment.compaction.nodes import constants_like, shape
from gossamer.deployment.graph import aten

_UNTAGGED = (
    *(aten.hardswish.default, aten.log_sigmoid.default, aten.contiguous.default),
    *(aten.to.dtype, aten._to_copy.default),
)


def is_pointwise(target: object) -> bool:
    """Whether torch marks a call as pointwise; random calls do not count."""
    tags = getattr(target, "tags", ())
    tagged = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return tagged or target in _UNTAGGED


class Pointwise:
    """A call on tensors with the same features, numbers, and tensors with one value for all features."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        size, inputs = shape(node), node.all_input_nodes
        sides = [features for each in inputs if (features := analysis.of(each)) is not None]
        wide = [features for features in sides if features.count > 1 or len(inputs) == 1]
        if size is None or not wide:
            return None
        dim, count = wide[0].dim, wide[0].count
        if any(features.dim != dim or features.count != count for features in wide):
            return None
        if not all(_fits(analysis, each, dim, count) for each in inputs):
            return None
        for features in wide[1:]:
            analysis.groups.join(wide[0].ids, features.ids)
        constants = {each: _constants(analysis, each, count) for each in inputs}
        given = {each: constants_like(each, len(size), dim, constant) for each, constant in constants.items()}
        with torch.no_grad():
            target: Any = node.target
            result = target(*fx.map_arg(node.args, given.get), **fx.map_arg(node.kwargs, given.get))
        known = ~torch.stack(list(constants.values())).isnan().any(0)
        values = result.flatten().double().cpu().where(known, torch.nan)
        if node.target is aten.mul.Tensor:
            factors = [_constants(analysis, each, count) for each in node.args]
            values = values.where((factors[0] != 0) & (factors[1] != 0), 0)
        return Features(dim, wide[0].ids, values)

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        for each in node.all_input_nodes:
            features = analysis.of(each)
            if features is None or features.count != needed.numel():
                analysis.hold_all(each, Reason(Hold.UNKNOWN, analysis.name(node)))
                continue
            read = needed
            if node.target is aten.mul.Tensor:
                for other in [other for other in node.args if other is not each]:
                    read = read & (_constants(analysis, other, needed.numel()) != 0)
            analysis.read(each, read)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Nothing: its inputs are already smaller."""


def _fits(analysis: Analysis, node: fx.Node, dim: int, count: int) -> bool:
    """Whether a tensor has the features, or one value for all of them."""
    features, size = analysis.of(node), shape(node)
    if features is not None and features.count == count:
        return True
    return size is not None and (len(size) < -dim or size[dim] == 1)


def _constants(analysis: Analysis, argument: object, count: int) -> Tensor:
    features = analysis.of(argument)
    if features is not None and features.count == count:
        return features.constant
    value = float(argument) if isinstance(argument, int | float) else torch.nan
    return torch.full((count,), value, dtype=torch.float64)
