"""Normalisation: with statistics of the model, which is a scale and a shift, or with those of the sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from gossamer.deployment.graph import shape_of
from gossamer.deployment.runtime.network import Normalise, UnsupportedError
from gossamer.deployment.runtime.translator import (
    Handle,
    Lazy,
    Translation,
    Translator,
    activation,
    append_affine,
    as_vector,
    has_features,
    to_floats,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Squares(Lazy):
    """x squared; then its mean over the channels plus an epsilon, and one over the root of that."""

    about: ClassVar[str] = "squares that are not those of a root mean square"
    x: Handle
    epsilon: float | None = None
    inverse: bool = False


def _batch_norm(t: Translator, node: fx.Node) -> Handle:
    x, weight, bias, mean, variance, training, _, eps = t.arguments(node)[:8]
    x = activation(as_vector(t, x), node, "picture", "signal", "vector")
    if training or mean is None:
        raise UnsupportedError(f"normalisation with the statistics of the batch (node {node.name})")
    return _by_constants(t, x, node, weight, bias, mean, variance, eps)


def _by_constants(
    t: Translator, x: Handle, node: fx.Node, weight: Any, bias: Any, mean: Tensor, variance: Tensor, eps: float
) -> Handle:
    scale = 1 / torch.sqrt(variance.double() + eps)
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale + (0 if bias is None else bias.double())
    return append_affine(t, x, name=node.name, scale=to_floats(scale.float()), shift=to_floats(shift.float()))


def _by_itself(
    t: Translator,
    x: Handle,
    node: fx.Node,
    groups: int,
    weight: Any,
    bias: Any,
    eps: float,
    each_pixel: bool = False,
    centred: bool = True,
) -> Handle:
    y = t.like(x)
    scale, shift = (None if each is None else to_floats(each).reshape(-1) for each in (weight, bias))
    t.operations.append(Normalise(x.value, y.value, groups, each_pixel, eps, node.name, scale, shift, centred=centred))
    return y


def _group_norm(t: Translator, node: fx.Node) -> Handle:
    x, groups, weight, bias, eps = t.arguments(node, None, None, None, None, 1e-5, None)[:5]
    x = activation(as_vector(t, x), node, "picture", "signal", "vector")
    return _by_itself(t, x, node, groups, weight, bias, eps)


def _instance_norm(t: Translator, node: fx.Node) -> Handle:
    """Each channel is a group, unless there are running statistics."""
    x, weight, bias, mean, variance, of_the_sample, _, eps = t.arguments(node)[:8]
    x = activation(x, node, "picture", "signal")
    if not of_the_sample:
        return _by_constants(t, x, node, weight, bias, mean, variance, eps)
    return _by_itself(t, x, node, t.values[x.value].channels, weight, bias, eps)


def _layer_norm(t: Translator, node: fx.Node) -> Handle:
    """Over the channels, where these come last; or, without weights, over all of a sample."""
    x, sizes, weight, bias, eps = t.arguments(node, None, None, None, None, 1e-5, None)[:5]
    x = activation(as_vector(t, x), node, "picture", "turned", "signal", "vector", "sequence", "view")
    value, rank = t.values[x.value], len(shape_of(node))
    whole = len(sizes) == rank - 1 and not (x.form == "sequence" and t.time_major)
    if len(sizes) == 1 and (x.form in ("turned", "vector", "sequence") or has_features(t, x)):
        return _by_itself(t, x, node, 1, weight, bias, eps, each_pixel=True)
    if whole and (value.pixels == 1 or (weight is None and bias is None)):
        return _by_itself(t, x, node, 1, weight, bias, eps)
    affine = "" if weight is None and bias is None else " with a factor or shift for each value"
    raise UnsupportedError(f"layer normalisation of a {x.form} over {tuple(sizes)}{affine} (node {node.name})")


def _rms_norm(t: Translator, node: fx.Node) -> Handle:
    x, sizes, weight, eps = t.arguments(node, None, None, None, None)
    x = activation(x, node, "turned", "vector", "sequence", "view")
    if len(sizes) != 1 or (x.form == "view" and not has_features(t, x)):
        raise UnsupportedError(f"root mean squares over {tuple(sizes)} (node {node.name})")
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return _by_itself(t, x, node, 1, weight, None, eps, each_pixel=True, centred=False)


def _squares(t: Translator, node: fx.Node) -> Squares:
    x, power = t.arguments(node)
    if power != 2:
        raise UnsupportedError(f"a power of {power} (node {node.name})")
    x = activation(x, node, "turned", "vector", "sequence", "view")
    if x.form == "view" and not has_features(t, x):
        raise UnsupportedError(f"squares of a view (node {node.name})")
    return Squares(x)


def _mean_square(t: Translator, node: fx.Node) -> Squares:
    squares, dims, keep = t.arguments(node, None, None, False)
    rank, dims = len(shape_of(node)), [dims] if isinstance(dims, int) else dims
    if not isinstance(squares, Squares) or squares.epsilon is not None:
        raise UnsupportedError(f"a mean of a mean of squares (node {node.name})")
    if not keep or dims is None or [d % rank for d in dims] != [rank - 1]:
        raise UnsupportedError(f"a mean of squares over {dims} (node {node.name})")
    return replace(squares, epsilon=0.0)


def _plus_epsilon(t: Translator, node: fx.Node) -> Squares:
    squares, epsilon = t.arguments(node)[:2]
    if not isinstance(squares, Squares) or squares.epsilon is None or not isinstance(epsilon, int | float):
        raise UnsupportedError(f"a sum with squares (node {node.name})")
    return replace(squares, epsilon=squares.epsilon + epsilon)


def _inverse_root(t: Translator, node: fx.Node) -> Squares:
    (squares,) = t.arguments(node)
    if not isinstance(squares, Squares) or squares.epsilon is None or squares.inverse:
        raise UnsupportedError(f"the root of squares (node {node.name})")
    return replace(squares, inverse=True)


def _by_inverse_root(t: Translator, node: fx.Node) -> Handle:
    """x times one over its root mean square."""
    x, squares = t.arguments(node)[:2]
    if isinstance(x, Squares):
        x, squares = squares, x
    if not isinstance(squares, Squares) or not squares.inverse or squares.epsilon is None or x != squares.x:
        raise UnsupportedError(f"a product with squares (node {node.name})")
    return _by_itself(t, squares.x, node, 1, None, None, squares.epsilon, each_pixel=True, centred=False)


OF_SQUARES: dict[tuple[Any, type[Lazy]], Translation] = {
    (aten.mean.dim, Squares): _mean_square,
    (aten.add.Tensor, Squares): _plus_epsilon,
    (aten.rsqrt.default, Squares): _inverse_root,
    (aten.mul.Tensor, Squares): _by_inverse_root,
}
NORMS: dict[Any, Translation] = {
    aten.rms_norm.default: _rms_norm,
    aten.pow.Tensor_Scalar: _squares,
    aten.batch_norm.default: _batch_norm,
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _instance_norm,
    aten.layer_norm.default: _layer_norm,
}
