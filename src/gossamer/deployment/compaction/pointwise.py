"""Operations that treat every feature alone: activations, dropout, sums and products of two tensors.

What such an operation makes of a constant is found by running it on the constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from gossamer.deployment.compaction.analysis import Analysis
from gossamer.deployment.compaction.groups import Features, Hold, Reason
from gossamer.deployment.compaction.nodes import bound, constants_like, shape

UNARY_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.LogSigmoid, nn.Threshold, nn.Identity),
    *(nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_DROPOUT = (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d)
UNARY_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(functional.relu, functional.relu_, functional.relu6, functional.leaky_relu, functional.elu, functional.gelu),
    *(functional.silu, functional.mish, functional.softplus, functional.hardswish, functional.hardsigmoid),
    *(functional.hardtanh, functional.sigmoid, functional.tanh, functional.softsign, functional.selu),
    *(torch.relu, torch.relu_, torch.sigmoid, torch.tanh, torch.abs, torch.clamp, torch.square, torch.neg),
    *_DROPOUT,
)
UNARY_METHODS = (
    *("relu", "sigmoid", "tanh", "abs", "clamp", "square", "neg", "contiguous", "clone", "detach"),
    *("relu_", "sigmoid_", "tanh_", "abs_", "clamp_", "square_", "neg_"),
)
ADDITIONS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
PRODUCTS: tuple[Any, ...] = (operator.mul, operator.imul, torch.mul, "mul", "mul_")
BINARY: tuple[Any, ...] = (*ADDITIONS, *PRODUCTS, operator.sub, operator.isub, torch.sub, "sub", "sub_")


class Unary:
    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        source = analysis.of(node.args[0]) if node.args else None
        if source is None or len(node.all_input_nodes) != 1 or shape(node) is None or _random(node):
            return None
        if changes_what_others_see(analysis, node):
            return None
        given = constants_like(node, source.dim, source.constant)
        return Features(source.dim, source.ids, _evaluate(analysis, node, given))

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """It has nothing for single features."""


def changes_what_others_see(analysis: Analysis, node: fx.Node) -> bool:
    """Whether an operation in place gives other users of its input another value than the one the graph shows."""
    first = node.args[0]
    return _in_place(analysis, node) and isinstance(first, fx.Node) and len(first.users) > 1


def _random(node: fx.Node) -> bool:
    return node.target in _DROPOUT and bool(bound(node, "input", "p", "training", "inplace", training=True)["training"])


def _in_place(analysis: Analysis, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(analysis.module(node), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") or name in ("iadd", "imul", "isub") or True in (*node.args, node.kwargs.get("inplace"))


def _evaluate(analysis: Analysis, node: fx.Node, *given: Tensor) -> Tensor:
    rest = node.args[len(given) :]
    with torch.no_grad():
        if node.op == "call_module":
            result = analysis.module(node)(*given)
        elif node.op == "call_method":
            result = getattr(given[0].clone(), str(node.target))(*given[1:], *rest, **node.kwargs)
        else:
            assert callable(node.target)
            result = node.target(given[0].clone(), *given[1:], *rest, **node.kwargs)
    found: Tensor = result.flatten().double().cpu()
    return found


class Binary:
    """Sums, differences and products of two tensors, or of a tensor and a number."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        size = shape(node)
        if len(node.args) != 2 or node.kwargs or size is None:
            return None
        sides = [analysis.of(each) for each in node.args]
        wide = [features for features in sides if features is not None and features.count > 1]
        if not wide or any(features.dim != wide[0].dim or features.count != wide[0].count for features in wide):
            return None
        dim, count = wide[0].dim, wide[0].count
        if not all(_fits(each, features, dim, count) for each, features in zip(node.args, sides, strict=True)):
            return None
        if changes_what_others_see(analysis, node):
            return None
        for features in wide[1:]:
            analysis.groups.join(wide[0].ids, features.ids)
        constants = [_constants(each, features, count) for each, features in zip(node.args, sides, strict=True)]
        given = [constants_like(node, dim, constant) for constant in constants]
        values = _evaluate(analysis, node, *given)
        if node.target in PRODUCTS:
            values = values.where((constants[0] != 0) & (constants[1] != 0), 0)
        return Features(dim, wide[0].ids, values)

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        count = needed.numel()
        sides = [analysis.of(each) for each in node.args]
        constants = [_constants(each, side, count) for each, side in zip(node.args, sides, strict=True)]
        for each, side, other in zip(node.args, sides, reversed(constants), strict=True):
            if side is not None and side.count == count:
                analysis.read(each, needed & (other != 0) if node.target in PRODUCTS else needed)
            else:
                analysis.hold_all(each, Reason(Hold.UNKNOWN, analysis.name(node)))

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Its two sides have become smaller in the same way."""


def _fits(argument: object, features: Features | None, dim: int, count: int) -> bool:
    """Whether this side has the features, or the same value for all of them."""
    if features is not None and features.count == count:
        return True
    if not isinstance(argument, fx.Node):
        return isinstance(argument, int | float)
    size = shape(argument)
    return size is not None and (len(size) < -dim or size[dim] == 1)


def _constants(argument: object, features: Features | None, count: int) -> Tensor:
    if features is not None and features.count == count:
        return features.constant
    value = float(argument) if isinstance(argument, int | float) else torch.nan
    return torch.full((count,), value, dtype=torch.float64)
