"""Calls that look at one value at a time: ReLU and sums, which are folded into products, and other activations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx

from gossamer.deployment.graph import shape_of
from gossamer.deployment.runtime.network import Constant, Floats, Function, Softmax, UnsupportedError
from gossamer.deployment.runtime.translator import (
    Handle,
    Tokens,
    Translation,
    Translator,
    activation,
    append_affine,
    to_floats,
)

aten = torch.ops.aten


def _per_channel(t: Translator, x: Handle, given: Any, node: fx.Node) -> Floats:
    """A number, or a tensor of the model that has one for each channel (and one for all pixels), by channel."""
    channels, rank = t.values[x.value].channels, len(shape_of(node))
    if isinstance(given, Tensor) and given.numel() > 1:
        axis = _axis_of_channels(x, rank)
        sizes = [1] * (rank - given.dim()) + list(given.shape)
        others = [size for place, size in enumerate(sizes) if place != axis]
        no_axis = x.form in ("flat", "state", "bare", "grouped", "view")
        if no_axis or axis is None or sizes[axis] != channels or any(size != 1 for size in others):
            raise UnsupportedError(f"a tensor of shape {tuple(given.shape)} with a {x.form} (node {node.name})")
        values = to_floats(given if given.is_floating_point() else given.float()).reshape(-1).astype(np.float64)
    else:
        values = np.full(channels, float(given), np.float64)
    return _in_float32(values, node)


def _in_float32(values: npt.NDArray[np.float64], node: fx.Node) -> Floats:
    if not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise UnsupportedError(f"a number that float32 does not have (node {node.name})")
    return values.astype(np.float32)


def _is_constant(given: Any) -> bool:
    return isinstance(given, int | float | Tensor)


def _planes(t: Translator, x: Handle, given: Any, node: fx.Node) -> int | None:
    """The planes of a tensor of the model that has a number for each pixel, as a value; None for one number, or one per
    channel."""
    shape = shape_of(node)
    if not isinstance(given, Tensor) or given.numel() == 1 or not given.is_floating_point():
        return None
    view, axis = t.view_of(x, shape) if x.form in _WITH_PLANES else None, _axis_of_channels(x, len(shape))
    own = [1] * (len(shape) - given.dim()) + list(given.shape)
    if view is None or all(size == 1 for dim, size in enumerate(own) if dim != axis) or len(own) != len(shape):
        return None
    samples = [dim for dim, each in enumerate(view.axes) if any(part.of == "sample" for part in each)]
    each_sample = given.reshape(own)
    if len(samples) != 1 or len(view.axes[samples[0]]) != 1:
        return None
    first = each_sample.narrow(samples[0], 0, 1)
    if not torch.equal(first.expand_as(each_sample), each_sample):
        raise UnsupportedError(f"a tensor that differs between samples (node {node.name})")
    value = t.values[x.value]
    planes = np.zeros((value.channels, value.pixels), np.float32)
    channel, pixel = view.places("channel"), view.places("pixel")
    planes[channel, pixel] = to_floats(first).astype(np.float32)
    y = t.new(value, x.form)
    t.operations.append(Constant(y.value, planes, node.name))
    return y.value


_WITH_PLANES = ("sequence", "signal", "picture", "turned", "view")


def _axis_of_channels(x: Handle, rank: int) -> int | None:
    if x.view is None:
        return rank - 1 if x.form in ("sequence", "turned") else 1
    return None


def _relu(t: Translator, node: fx.Node) -> Handle:
    return append_affine(t, activation(t.arguments(node)[0], node), name=node.name, relu=True)


def _sum(t: Translator, node: fx.Node) -> Handle:
    """``add`` and ``sub`` of two activations, or of an activation and one number, or one number per channel."""
    first, second = t.arguments(node)[:2]
    alpha: Any = node.kwargs.get("alpha", 1)
    sign = -alpha if "sub" in str(node.target) else alpha
    if _is_constant(first):
        return _subtracted(t, second, first, sign, node)
    a = activation(first, node)
    if _is_constant(second):
        if (planes := _planes(t, a, second, node)) is not None:
            return _with_planes(t, a, planes, sign, node)
        return append_affine(t, a, name=node.name, shift=_per_channel(t, a, sign * second, node))
    b = activation(second, node)
    if (a.form, a.view) != (b.form, b.view) or shape_of(node.args[0]) != shape_of(node.args[1]):
        raise UnsupportedError(f"a sum that broadcasts (node {node.name})")
    if sign == 1:
        return append_affine(t, a, name=node.name, add=b.value)
    return append_affine(t, b, name=node.name, scale=_per_channel(t, b, sign, node), add=a.value)


def _subtracted(t: Translator, x: Any, number: Any, sign: float, node: fx.Node) -> Handle:
    """number + sign * x"""
    x = activation(x, node)
    if (planes := _planes(t, x, number, node)) is not None:
        return _with_planes(t, x, planes, sign, node, scaled=True)
    scale = None if sign == 1 else _per_channel(t, x, sign, node)
    return append_affine(t, x, name=node.name, scale=scale, shift=_per_channel(t, x, number, node))


def _with_planes(t: Translator, x: Handle, planes: int, sign: float, node: fx.Node, *, scaled: bool = False) -> Handle:
    """x + sign * planes, or sign * x + planes if x is ``scaled``."""
    if sign == 1:
        return append_affine(t, x, name=node.name, add=planes)
    scaled_by = np.full(t.values[x.value].channels, sign, np.float32)
    if scaled:
        return append_affine(t, x, name=node.name, scale=scaled_by, add=planes)
    return append_affine(t, replace(x, value=planes), name=node.name, scale=scaled_by, add=x.value)


def _reversed_difference(t: Translator, node: fx.Node) -> Handle:
    """``number - x``, or one number a channel."""
    x, number = t.arguments(node)[:2]
    alpha: Any = node.kwargs.get("alpha", 1)
    if not _is_constant(number):
        raise UnsupportedError(f"{node.target} of two activations (node {node.name})")
    return _subtracted(t, x, number, -alpha, node)


def _negative(t: Translator, node: fx.Node) -> Handle:
    x = activation(t.arguments(node)[0], node)
    return append_affine(t, x, name=node.name, scale=_per_channel(t, x, -1, node))


def _product(t: Translator, node: fx.Node) -> Handle:
    """``mul`` and ``div`` by one number or one per channel, ``mul`` of two activations, one of which may have a single
    pixel."""
    first, second = t.arguments(node, None, None)
    divides = "div" in str(node.target)
    if _is_constant(first) and not divides:
        first, second = second, first
    if _is_constant(second):
        a = activation(first, node)
        if not divides and (planes := _planes(t, a, second, node)) is not None:
            return t.pointwise(a, node.name, "identity", by=planes)
        factor = _per_channel(t, a, second, node)
        if divides:
            with np.errstate(divide="ignore"):
                factor = _in_float32(1 / factor.astype(np.float64), node)
        return append_affine(t, a, name=node.name, scale=factor)
    a, b = activation(first, node), activation(second, node)
    if divides:
        return _factored(t, a, t.pointwise(b, node.name, "reciprocal"), node)
    if t.values[a.value].pixels == 1 or _broadcasts(node):
        a, b = b, a
    return _factored(t, a, b, node)


def _broadcasts(node: fx.Node) -> bool:
    """Whether the first of two factors is the smaller one."""
    return shape_of(node.args[0]) != shape_of(node)


def _factored(t: Translator, a: Handle, b: Handle, node: fx.Node) -> Handle:
    """a times b, which may have a single pixel or a single channel."""
    x, by = t.values[a.value], t.values[b.value]
    same_rank = len(shape_of(node.args[0])) == len(shape_of(node.args[1]))
    same_axes = a.form == b.form and (a.view == b.view or x.channels != by.channels)
    fits = by.channels in (1, x.channels) and (by.same_pixels(x) or by.pixels == 1)
    if not same_rank or not same_axes or not fits or (by != x and a.form == "view"):
        raise UnsupportedError(f"a product that broadcasts, or a quotient (node {node.name})")
    return t.pointwise(a, node.name, "identity", by=b.value)


def _append(t: Translator, x: Handle, node: fx.Node, function: Function, **parts: Any) -> Handle:
    return t.pointwise(x, node.name, function, **parts)


def _plain(function: Function) -> Translation:
    return lambda t, node: _append(t, activation(t.arguments(node)[0], node), node, function)


def _clamp(t: Translator, node: fx.Node) -> Handle:
    default = (-1.0, 1.0) if "hardtanh" in str(node.target) else (None, None)
    x, low, high = t.arguments(node, None, *default)
    limits = -math.inf if low is None else float(low), math.inf if high is None else float(high)
    return _append(t, activation(x, node), node, "clamp", parameters=limits)


def _leaky(t: Translator, node: fx.Node) -> Handle:
    x, slope = t.arguments(node, None, 0.01)
    x = activation(x, node)
    channels = t.values[x.value].channels
    if isinstance(slope, Tensor):
        slopes = to_floats(slope).reshape(-1)
        if x.form not in ("picture", "signal", "vector") and slopes.size > 1:
            raise UnsupportedError(f"slopes of a {x.form} (node {node.name})")
        slopes = np.broadcast_to(slopes, channels).copy()
    else:
        slopes = np.full(channels, slope, np.float32)
    return _append(t, x, node, "leaky", slopes=slopes)


def _gelu(t: Translator, node: fx.Node) -> Handle:
    x, approximate = t.arguments(node, None, "none")
    return _append(t, activation(x, node), node, "gelu" if approximate == "none" else "gelu_tanh")


def _elu(t: Translator, node: fx.Node) -> Handle:
    x, alpha, scale, input_scale = t.arguments(node, None, 1, 1, 1)
    if scale != 1 or input_scale != 1:
        raise UnsupportedError(f"a scaled exponential linear unit (node {node.name})")
    return _append(t, activation(x, node), node, "elu", parameters=(float(alpha), 0.0))


def _softplus(t: Translator, node: fx.Node) -> Handle:
    x, beta, threshold = t.arguments(node, None, 1, 20)
    return _append(t, activation(x, node), node, "softplus", parameters=(float(beta), float(threshold)))


def _softmax(t: Translator, node: fx.Node) -> Handle:
    x, dim, dtype = t.arguments(node, None, None, None)
    x = activation(x, node, "picture", "signal", "vector", "sequence")
    shape = tuple(node.meta["val"].shape)
    if dim % len(shape) != (len(shape) - 1 if x.form == "sequence" else 1) or dtype not in (None, torch.float32):
        raise UnsupportedError(f"softmax over dimension {dim} of a {x.form} (node {node.name})")
    y = t.like(x)
    t.operations.append(Softmax(x.value, y.value, "log" in str(node.target), node.name))
    return y


def _differs(t: Translator, node: fx.Node) -> Handle:
    """``x != number``, of tokens or numbers."""
    x, number = t.arguments(node)
    x = t.numbers(x) if isinstance(x, Tokens) else activation(x, node)
    return t.pointwise(x, node.name, "differs", parameters=(float(number), 0.0))


def _clamp_min(t: Translator, node: fx.Node) -> Handle:
    x, low = t.arguments(node)
    return t.pointwise(activation(x, node), node.name, "clamp", parameters=(float(low), math.inf))


POINTWISE: dict[Any, Translation] = {
    aten.ne.Scalar: _differs,
    aten.clamp_min.default: _clamp_min,
    aten.relu.default: _relu,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    aten.rsub.Scalar: _reversed_difference,
    aten.rsub.Tensor: _reversed_difference,
    aten.neg.default: _negative,
    aten.mul.Tensor: _product,
    aten.div.Tensor: _product,
    aten.clamp.default: _clamp,
    aten.hardtanh.default: _clamp,
    aten.leaky_relu.default: _leaky,
    aten.prelu.default: _leaky,
    aten.sigmoid.default: _plain("sigmoid"),
    aten.tanh.default: _plain("tanh"),
    aten.silu.default: _plain("silu"),
    aten.hardsigmoid.default: _plain("hard_sigmoid"),
    aten.hardswish.default: _plain("hard_swish"),
    aten.gelu.default: _gelu,
    aten.elu.default: _elu,
    aten.softplus.default: _softplus,
    aten.softmax.int: _softmax,
    aten.log_softmax.int: _softmax,
}
