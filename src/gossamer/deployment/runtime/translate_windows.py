"""Calls with windows: convolutions, also transposed ones, pooling, means, and upsampling.

A signal (batch, channels, steps) is an image of one row. A transposed convolution with a stride is a convolution with
one output channel per phase of the stride, whose planes are then interleaved. This avoids the multiplications with the
zeros that the definition inserts between pixels.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import fx

from gossamer.deployment.graph import shape_of
from gossamer.deployment.runtime.network import (
    Integers,
    Pair,
    Pool,
    Product,
    Spread,
    Taps,
    UnsupportedError,
    Value,
    dense_taps,
)
from gossamer.deployment.runtime.translator import (
    Handle,
    Translation,
    Translator,
    activation,
    bias_or_zeros,
    to_floats,
)

aten = torch.ops.aten
Kind = Literal["max", "average"]


def _sides(x: Handle, given: Any, neutral: int) -> Pair:
    """A number for height and one for width. ``neutral`` is the number for the one row of a signal, and the default."""
    numbers = [given] if isinstance(given, int) else list(given) or [neutral]
    return (neutral, numbers[0]) if x.form == "signal" else (numbers[0], numbers[-1])


def _of(x: Handle, node: fx.Node) -> Handle:
    """A signal if the call is one for signals, otherwise an image."""
    return activation(x, node, "signal" if "1d" in str(node.target) else "picture")


def _conv(t: Translator, node: fx.Node) -> Handle:
    x, weight, bias, stride, padding, dilation, groups = t.arguments(node, None, None, None, [1], [0], [1], 1)
    x = _of(x, node)
    before, dense = t.values[x.value], to_floats(weight)
    dense = dense[:, :, None] if x.form == "signal" else dense
    rows, inputs, height, width = dense.shape
    dilation, stride = _sides(x, dilation, 1), _sides(x, stride, 1)
    reach = (dilation[0] * (height - 1), dilation[1] * (width - 1))
    if padding == "same":
        padding = (reach[0] // 2, reach[1] // 2)
        after = (before.height, before.width)
    else:
        padding = (0, 0) if padding == "valid" else _sides(x, padding, 0)
        after = (
            (before.height + 2 * padding[0] - reach[0] - 1) // stride[0] + 1,
            (before.width + 2 * padding[1] - reach[1] - 1) // stride[1] + 1,
        )
    taps = dense_taps(dense)
    group = taps.row // (rows // groups)
    channel, dy, dx = taps.channel + group * inputs, taps.dy * dilation[0], taps.dx * dilation[1]
    taps = Taps(rows, taps.row, channel, dy, dx, taps.weight)
    y = t.new(Value(rows, *after), x.form)
    parts = (taps, bias_or_zeros(bias, rows), stride, padding, dense.size, t.parameter_name(node.args[1]))
    t.operations.append(Product(x.value, y.value, *parts, kind="convolution"))
    return y


def _conv_transposed(t: Translator, node: fx.Node) -> Handle:
    """Output pixel u * stride + a is the sum over taps k of w[k] * x[u + (a + padding - k * dilation) / stride], where
    that is whole: one convolution for each phase a."""
    x, weight, bias, stride, padding, _, groups, dilation = t.arguments(node, *[None] * 3, [1], [0], [0], 1, [1])
    x, name = _of(x, node), t.parameter_name(node.args[1])
    stride, padding, dilation = _sides(x, stride, 1), _sides(x, padding, 0), _sides(x, dilation, 1)
    dense, shape = to_floats(weight), shape_of(node)
    dense = dense[:, :, None] if x.form == "signal" else dense
    inputs, rows = dense.shape[0], dense.shape[1] * groups
    phases = stride[0] * stride[1]
    taps = dense_taps(dense.swapaxes(0, 1))  # by output, as in a convolution
    row = taps.row + taps.channel // (inputs // groups) * dense.shape[1]
    phase_y, dy = _phase(taps.dy, stride[0], padding[0], dilation[0])
    phase_x, dx = _phase(taps.dx, stride[1], padding[1], dilation[1])
    plane = (row * stride[0] + phase_y) * stride[1] + phase_x
    first = max(0, -int(dy.min(initial=0))), max(0, -int(dx.min(initial=0)))
    taps = Taps(rows * phases, plane, taps.channel, dy + first[0], dx + first[1], taps.weight)
    taps = taps.chosen(np.argsort(plane, kind="stable"))
    after = Value(rows, shape[2] if x.form == "picture" else 1, shape[-1])
    small = Value(rows * phases, -(-after.height // stride[0]), -(-after.width // stride[1]))
    y = t.new(small, x.form)
    every = bias_or_zeros(bias, rows).repeat(phases)
    parts = (taps, every, (1, 1), first, dense.size, name)
    t.operations.append(Product(x.value, y.value, *parts, kind="convolution"))
    return y if stride == (1, 1) else _spread(t, y, node, stride, after, copies=False)


def _phase(tap: Integers, stride: int, padding: int, dilation: int) -> tuple[Integers, Integers]:
    """The phase of the stride that a tap contributes to, and the offset of the pixel that it reads."""
    phase = (tap * dilation - padding) % stride
    return phase, (phase + padding - tap * dilation) // stride


def _spread(t: Translator, x: Handle, node: fx.Node, factor: Pair, after: Value, *, copies: bool) -> Handle:
    y = t.new(after, x.form)
    t.operations.append(Spread(x.value, y.value, factor, copies, node.name))
    return y


def _upsample(t: Translator, node: fx.Node) -> Handle:
    """Nearest-neighbour upsampling. torch itself determines the neighbours, as it computes them in floating point."""
    x, size, scales = t.arguments(node)
    x = _of(x, node)
    before, shape = t.values[x.value], shape_of(node)
    after = Value(before.channels, shape[2] if x.form == "picture" else 1, shape[-1])
    factor = after.height // before.height, after.width // before.width
    numbers = torch.arange(before.pixels, dtype=torch.float64).reshape(1, 1, before.height, before.width)
    wanted = numbers.repeat_interleave(max(1, factor[0]), 2).repeat_interleave(max(1, factor[1]), 3)
    got: Any = node.target(numbers if x.form == "picture" else numbers[:, :, 0], size, scales)  # type: ignore[operator]
    if got.numel() != wanted.numel() or not torch.equal(got.reshape(wanted.shape), wanted):
        raise UnsupportedError(f"a resize from {before.height}x{before.width} to {shape[2:]} (node {node.name})")
    return _spread(t, x, node, factor, after, copies=True)


def _pixel_shuffle(t: Translator, node: fx.Node) -> Handle:
    x, factor = t.arguments(node)
    x, shape = activation(x, node, "picture"), shape_of(node)
    return _spread(t, x, node, (factor, factor), Value(*shape[1:]), copies=False)


def _pool(t: Translator, x: Handle, name: str, kind: Kind, kernel: Pair, **given: Any) -> Handle:
    before = t.values[x.value]
    stride, padding = given.get("stride", kernel), given.get("padding", (0, 0))
    dilation, ceil = given.get("dilation", (1, 1)), given.get("ceil", False)
    sizes = []
    for size, k, s, p, d in zip((before.height, before.width), kernel, stride, padding, dilation, strict=True):
        room = size + 2 * p - d * (k - 1) - 1
        after = -(-room // s) + 1 if ceil else room // s + 1
        # torch drops a last window that would start in the padding
        sizes.append(after - 1 if ceil and (after - 1) * s >= size + p else after)
    y = t.new(Value(before.channels, *sizes), x.form)
    count, divisor = given.get("count_padding", True), given.get("divisor", 0)
    t.operations.append(Pool(x.value, y.value, kind, kernel, stride, padding, dilation, count, divisor, name))
    return y


def _max_pool(t: Translator, node: fx.Node) -> Handle:
    x, kernel, stride, padding, dilation, ceil = t.arguments(node, None, None, [], [0], [1], False)
    x = _of(x, node)
    given = {
        "stride": _sides(x, stride or kernel, 1),
        "padding": _sides(x, padding, 0),
        "dilation": _sides(x, dilation, 1),
    }
    return _pool(t, x, node.name, "max", _sides(x, kernel, 1), ceil=ceil, **given)


def _average_pool(t: Translator, node: fx.Node) -> Handle:
    arguments = t.arguments(node, None, None, [], [0], False, True, None)
    x, kernel, stride, padding, ceil, count, divisor = arguments
    x = _of(x, node)
    given = {"stride": _sides(x, stride or kernel, 1), "padding": _sides(x, padding, 0), "ceil": ceil}
    kernel = _sides(x, kernel, 1)
    return _pool(t, x, node.name, "average", kernel, count_padding=count, divisor=divisor or 0, **given)


def _adaptive_pool(t: Translator, node: fx.Node, kind: Kind) -> Handle:
    x, size = t.arguments(node, None, None)
    x = _of(x, node)
    before, after = t.values[x.value], _sides(x, size, 1)
    if before.height % after[0] or before.width % after[1]:
        raise UnsupportedError(f"adaptive pooling of {before.height}x{before.width} to {after} (node {node.name})")
    kernel = (before.height // after[0], before.width // after[1])
    return _pool(t, x, node.name, kind, kernel)


def _adaptive_max(t: Translator, node: fx.Node) -> tuple[Handle, None]:
    """The maxima, without the indices that torch returns too."""
    return _adaptive_pool(t, node, "max"), None


def _over_all(t: Translator, node: fx.Node, kind: Kind, divisor: int = 0) -> Handle:
    """The mean or maximum over all pixels or steps, or their sum over ``divisor``."""
    x, dims, keep = t.arguments(node, None, None, False, None)[:3]
    x = activation(x, node, "picture", "turned", "signal", "sequence")
    value, rank = t.values[x.value], len(shape_of(node.args[0]))
    steps = {0} if t.time_major else {1}
    wanted = {"picture": {2, 3}, "turned": {1, 2}, "signal": {2}, "sequence": steps}[x.form]
    given = [dims] if isinstance(dims, int) else dims
    if given is None or {d % rank for d in given} != wanted or (keep and x.form == "sequence"):
        raise UnsupportedError(f"a {'mean' if kind == 'average' else 'maximum'} over {dims} (node {node.name})")
    y = _pool(t, x, node.name, kind, (value.height, value.width), divisor=divisor)
    return Handle(y.value, x.form if keep else "vector")


def _total(t: Translator, node: fx.Node) -> Handle:
    dtype = t.arguments(node, None, None, False, None)[3]
    if dtype not in (None, torch.float32):
        raise UnsupportedError(f"a sum in {dtype} (node {node.name})")
    return _over_all(t, node, "average", divisor=1)


def _max_and_where(t: Translator, node: fx.Node) -> tuple[Handle, None]:
    return _over_all(t, node, "max"), None


WINDOWS: dict[Any, Translation] = {
    aten.conv1d.default: _conv,
    aten.conv1d.padding: _conv,
    aten.conv2d.default: _conv,
    aten.conv2d.padding: _conv,
    aten.conv_transpose1d.default: _conv_transposed,
    aten.conv_transpose2d.input: _conv_transposed,
    aten.upsample_nearest1d.vec: _upsample,
    aten.upsample_nearest2d.vec: _upsample,
    aten._upsample_nearest_exact1d.vec: _upsample,
    aten._upsample_nearest_exact2d.vec: _upsample,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.max_pool1d.default: _max_pool,
    aten.max_pool2d.default: _max_pool,
    aten.avg_pool1d.default: _average_pool,
    aten.avg_pool2d.default: _average_pool,
    aten.adaptive_avg_pool1d.default: partial(_adaptive_pool, kind="average"),
    aten.adaptive_avg_pool2d.default: partial(_adaptive_pool, kind="average"),
    aten.adaptive_max_pool1d.default: _adaptive_max,
    aten.adaptive_max_pool2d.default: _adaptive_max,
    aten.mean.dim: partial(_over_all, kind="average"),
    aten.sum.dim_IntList: _total,
    aten.amax.default: partial(_over_all, kind="max"),
    aten.max.dim: _max_and_where,
}
