"""Normalisation: with statistics of the model, which is a scale and a shift, or with those of the sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from gossamer.deployment.graph import shape_of
from gossamer.deployment.runtime.network import Normalise, UnsupportedError
from gossamer.deployment.runtime.translator import (
    Handle,
    Translation,
    Translator,
    activation,
    append_affine,
    as_vector,
    has_features,
    to_floats,
)

aten = torch.ops.aten


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
) -> Handle:
    y = t.like(x)
    scale, shift = (None if each is None else to_floats(each).reshape(-1) for each in (weight, bias))
    t.operations.append(Normalise(x.value, y.value, groups, each_pixel, eps, node.name, scale, shift))
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


NORMS: dict[Any, Translation] = {
    aten.batch_norm.default: _batch_norm,
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _instance_norm,
    aten.layer_norm.default: _layer_norm,
}
