"""What each ATen call means in terms of the runtime's operations."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import fx

from gossamer.runtime.graph import (
    Concat,
    Embed,
    Input,
    Pair,
    Pool,
    Product,
    Taps,
    UnsupportedError,
    Value,
    batch_axis,
    dense_taps,
    diagonal_taps,
)
from gossamer.runtime.translate_pointwise import POINTWISE
from gossamer.runtime.translate_recurrent import RECURRENT
from gossamer.runtime.translator import (
    Form,
    Handle,
    Tokens,
    Translation,
    Translator,
    Zeros,
    activation,
    append_affine,
    bias_or_zeros,
    shape_of,
    to_floats,
)

aten = torch.ops.aten
#: The end of a slice that was left open, as the exporter writes it.
EVERYTHING = 2**63 - 1


def _as_vector(t: Translator, handle: Any) -> Any:
    """A picture that was flattened, with its pixels as channels of one pixel."""
    if not isinstance(handle, Handle) or handle.form != "flat":
        return handle
    value = t.values[handle.value]
    size = value.channels * value.pixels
    y = t.new(Value(size, 1, 1), "vector")
    source = next((op for op in t.operations if isinstance(op, Input) and op.y == handle.value), None)
    if source is not None:  # nothing has to be moved, only loaded in another way
        t.operations.append(Input(y.value, source.slot, source.name))
    else:
        channel, dy, dx = np.indices((value.channels, value.height, value.width)).reshape(3, -1)
        taps = Taps(size, np.arange(size), channel, dy, dx, np.ones(size, np.float32))
        bias = np.zeros(size, np.float32)
        t.operations.append(Product(handle.value, y.value, taps, bias, (1, 1), (0, 0), size, "flatten"))
    return y


def _pair(value: Any) -> Pair:
    if isinstance(value, int):
        return value, value
    return (value[0], value[-1]) if value else (1, 1)


def _linear(t: Translator, node: fx.Node) -> Handle:
    x, weight, bias = t.arguments(node, None, None, None)
    x = activation(x, node)
    before = t.values[x.value]
    dense = to_floats(weight)
    if x.form == "picture":
        raise UnsupportedError(f"a linear layer over the last dimension of a picture (node {node.name})")
    if x.form == "flat":
        taps = dense_taps(dense.reshape(dense.shape[0], before.channels, before.height, before.width))
        y = t.new(Value(dense.shape[0], 1, 1), "vector")
    else:
        taps = dense_taps(dense[:, :, None, None])
        y = t.new(Value(dense.shape[0], before.height, before.width), x.form)
    name, rows = t.parameter_name(node.args[1]), dense.shape[0]
    t.operations.append(Product(x.value, y.value, taps, bias_or_zeros(bias, rows), (1, 1), (0, 0), dense.size, name))
    return y


def _conv(t: Translator, node: fx.Node) -> Handle:
    x, weight, bias, stride, padding, dilation, groups = t.arguments(node, None, None, None, [1], [0], [1], 1)
    x = activation(x, node, "picture")
    before, dense = t.values[x.value], to_floats(weight)
    rows, inputs, height, width = dense.shape
    dilation, stride = _pair(dilation), _pair(stride)
    reach = (dilation[0] * (height - 1), dilation[1] * (width - 1))
    if padding == "valid":
        padding = (0, 0)
    elif padding == "same":
        padding = (reach[0] // 2, reach[1] // 2)
        after = (before.height, before.width)
    else:
        padding = _pair(padding)
    if node.args[4:5] != ("same",):
        after = (
            (before.height + 2 * padding[0] - reach[0] - 1) // stride[0] + 1,
            (before.width + 2 * padding[1] - reach[1] - 1) // stride[1] + 1,
        )
    taps = dense_taps(dense)
    group = taps.row // (rows // groups)
    channel, dy, dx = taps.channel + group * inputs, taps.dy * dilation[0], taps.dx * dilation[1]
    taps = type(taps)(rows, taps.row, channel, dy, dx, taps.weight)
    y = t.new(Value(rows, *after), "picture")
    name = t.parameter_name(node.args[1])
    t.operations.append(Product(x.value, y.value, taps, bias_or_zeros(bias, rows), stride, padding, dense.size, name))
    return y


def _batch_norm(t: Translator, node: fx.Node) -> Handle:
    x, weight, bias, mean, variance, training, _, eps = t.arguments(node)[:8]
    x = activation(_as_vector(t, x), node, "picture", "vector")
    if training or mean is None:
        raise UnsupportedError(f"normalisation with the statistics of the batch (node {node.name})")
    scale = 1 / torch.sqrt(variance.double() + eps)
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale + (0 if bias is None else bias.double())
    return append_affine(t, x, name=node.name, scale=to_floats(scale.float()), shift=to_floats(shift.float()))


def _identity(t: Translator, node: fx.Node) -> Handle:
    return cast(Handle, t.arguments(node)[0])


def _dropout(t: Translator, node: fx.Node) -> Handle:
    x, share, active = t.arguments(node, None, None, None)
    if active and share:
        raise UnsupportedError(f"dropout that stays on in evaluation mode (node {node.name})")
    return activation(x, node)


def _pool(t: Translator, x: Handle, name: str, kind: Literal["max", "average"], kernel: Pair, **given: Any) -> Handle:
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
    x, kernel = activation(x, node, "picture"), _pair(kernel)
    given = {
        "stride": _pair(stride) if stride else kernel,
        "padding": _pair(padding),
        "dilation": _pair(dilation),
    }
    return _pool(t, x, node.name, "max", kernel, ceil=ceil, **given)


def _average_pool(t: Translator, node: fx.Node) -> Handle:
    arguments = t.arguments(node, None, None, [], [0], False, True, None)
    x, kernel, stride, padding, ceil, count, divisor = arguments
    x, kernel = activation(x, node, "picture"), _pair(kernel)
    given = {"stride": _pair(stride) if stride else kernel, "padding": _pair(padding), "ceil": ceil}
    return _pool(t, x, node.name, "average", kernel, count_padding=count, divisor=divisor or 0, **given)


def _adaptive_pool(t: Translator, node: fx.Node, kind: Literal["max", "average"]) -> Handle:
    x, size = t.arguments(node, None, None)
    x = activation(x, node, "picture")
    before, after = t.values[x.value], _pair(size)
    if before.height % after[0] or before.width % after[1]:
        raise UnsupportedError(f"adaptive pooling of {before.height}x{before.width} to {after} (node {node.name})")
    kernel = (before.height // after[0], before.width // after[1])
    return _pool(t, x, node.name, kind, kernel)


def _adaptive_average(t: Translator, node: fx.Node) -> Handle:
    return _adaptive_pool(t, node, "average")


def _adaptive_max(t: Translator, node: fx.Node) -> tuple[Handle, None]:
    """The maxima; their places, which torch returns too, are not known here."""
    return _adaptive_pool(t, node, "max"), None


def _mean(t: Translator, node: fx.Node) -> Handle:
    x, dims, keep = t.arguments(node, None, None, False)
    x = activation(x, node, "picture", "sequence")
    value = t.values[x.value]
    wanted = {2, 3} if x.form == "picture" else ({0} if t.time_major else {1})
    rank = 4 if x.form == "picture" else 3
    if dims is None or {d % rank for d in dims} != wanted or (keep and x.form == "sequence"):
        raise UnsupportedError(f"a mean over {dims} (node {node.name})")
    y = _pool(t, x, node.name, "average", (value.height, value.width))
    return Handle(y.value, "picture" if keep else "vector")


def _reshape(t: Translator, node: fx.Node) -> Handle:
    """Flattening, squeezing and views that keep the samples apart."""
    x = activation(t.arguments(node)[0], node)
    value, shape, before = t.values[x.value], shape_of(node), shape_of(node.args[0])
    if x.form == "sequence":
        if shape[-1] == value.channels:
            return x
    elif x.form == "state" and before[0] > 1 and shape != before:
        pass  # layers come before samples: a view mixes them
    elif len(shape) == 2 and shape[1] == value.channels * value.pixels:
        return Handle(x.value, "vector" if value.pixels == 1 else "flat")
    elif len(shape) == 3 and value.pixels == 1 and shape[1] == value.channels:
        return Handle(x.value, "picture")
    elif shape == before or (len(shape) == 4 and shape[1:] == (value.channels, value.height, value.width)):
        return Handle(x.value, "picture" if len(shape) == 4 else x.form)
    raise UnsupportedError(f"a view from {before} to {shape} (node {node.name})")


def _concat(t: Translator, node: fx.Node) -> Handle:
    tensors, dim = t.arguments(node, None, 0)
    parts = [activation(_as_vector(t, x), node, "picture", "vector") for x in tensors]
    values = [t.values[x.value] for x in parts]
    if dim not in (1, 1 - len(node.meta["val"].shape)) or len({(v.height, v.width) for v in values}) > 1:
        raise UnsupportedError(f"a concatenation along dimension {dim} (node {node.name})")
    y = t.new(Value(sum(v.channels for v in values), values[0].height, values[0].width), parts[0].form)
    t.operations.append(Concat(tuple(x.value for x in parts), y.value, node.name))
    return y


def _copy(
    t: Translator,
    x: Handle,
    node: fx.Node,
    pairs: list[Pair],
    after: Value,
    *,
    form: Form | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    step: int = 0,
) -> Handle:
    """Picks channels (pairs of new and old) and pixels; ``step`` is the first column that is read."""
    y = t.new(after, form or x.form)
    taps = diagonal_taps(after.channels, np.array(pairs, np.int64).reshape(-1, 2), np.ones(len(pairs), np.float32))
    taps = replace(taps, dx=taps.dx + step)
    bias = np.zeros(after.channels, np.float32)
    t.operations.append(Product(x.value, y.value, taps, bias, stride, padding, taps.count, node.name))
    return y


def _channels(t: Translator, x: Handle, node: fx.Node, first: int, count: int, step: int = 1) -> Handle:
    value = t.values[x.value]
    pairs = [(i, first + i * step) for i in range(count)]
    return _copy(t, x, node, pairs, Value(count, value.height, value.width))


def _split(t: Translator, node: fx.Node) -> tuple[Handle, ...]:
    """``chunk`` and ``split`` along the channels."""
    x, _, dim = t.arguments(node, None, None, 0)
    x = activation(_as_vector(t, x), node, "picture", "vector", "sequence")
    shapes = [tuple(part.shape) for part in node.meta["val"]]
    channels = 2 if x.form == "sequence" else 1
    if dim % len(shapes[0]) != channels:
        raise UnsupportedError(f"a split of dimension {dim} (node {node.name})")
    sizes = [shape[channels] for shape in shapes]
    return tuple(_channels(t, x, node, sum(sizes[:i]), size) for i, size in enumerate(sizes))


def _select(t: Translator, node: fx.Node) -> Handle:
    """One time step of a sequence, or one layer of a recurrent layer's last state."""
    x, dim, index = t.arguments(node)
    x = activation(x, node, "sequence", "state")
    value, shape = t.values[x.value], tuple(cast(fx.Node, node.args[0]).meta["val"].shape)
    index %= shape[dim]
    if x.form == "state" and dim == 0:
        pairs = [(i, index * shape[2] + i) for i in range(shape[2])]
        return _copy(t, x, node, pairs, Value(shape[2], 1, 1), form="vector")
    if x.form == "sequence" and len(shape) == 3 and dim == (0 if t.time_major else 1):
        pairs = [(i, i) for i in range(value.channels)]
        return _copy(t, x, node, pairs, Value(value.channels, 1, 1), form="vector", step=index)
    raise UnsupportedError(f"a selection from dimension {dim} of a {x.form} (node {node.name})")


def _slice(t: Translator, node: fx.Node) -> Handle:
    x, dim, start, end, step = t.arguments(node, None, 0, None, None, 1)
    x = activation(x, node)
    value, shape, before = t.values[x.value], shape_of(node), shape_of(node.args[0])
    dim %= len(shape)
    if dim == batch_axis(x.form, t.time_major) and (start or (end is not None and end < EVERYTHING)):
        raise UnsupportedError(f"some samples of the batch (node {node.name})")
    if shape == before:
        return x
    start = slice(start, None).indices(before[dim])[0]
    if x.form in ("picture", "vector") and dim == 1:
        return _channels(t, x, node, start, shape[1], step)
    if x.form == "picture" and start == 0 and dim in (2, 3):
        size = -(-value.height // step), -(-value.width // step)
        if shape[dim] == size[dim - 2]:
            pairs = [(i, i) for i in range(value.channels)]
            stride = (step, 1) if dim == 2 else (1, step)
            return _copy(t, x, node, pairs, Value(value.channels, *shape[2:]), stride=stride)
    raise UnsupportedError(f"a slice of dimension {dim} (node {node.name})")


def _pad(t: Translator, node: fx.Node) -> Handle:
    x, widths, mode, fill = t.arguments(node, None, None, "constant", None)
    x = activation(x, node, "picture")
    value = t.values[x.value]
    left, right, top, bottom, before, after, *more = (list(widths) + [0] * 8)[:8]
    if mode != "constant" or fill or any(more) or min(widths) < 0:
        raise UnsupportedError(f"padding by {widths} in mode {mode} (node {node.name})")
    pairs = [(i + before, i) for i in range(value.channels)]
    wider = Value(value.channels + before + after, value.height + top + bottom, value.width + left + right)
    return _copy(t, x, node, pairs, wider, padding=(top, left))


def _embedding(t: Translator, node: fx.Node) -> Handle:
    weight, tokens = t.arguments(node)[:2]
    if not isinstance(tokens, Tokens) or len(tokens.shape) != 2:
        raise UnsupportedError(f"an embedding of something else than a batch of token sequences (node {node.name})")
    steps = tokens.shape[0] if t.time_major else tokens.shape[1]
    y = t.new(Value(weight.shape[1], 1, steps), "sequence")
    t.operations.append(Embed(y.value, tokens.slot, to_floats(weight), t.parameter_name(node.args[0])))
    return y


def _item(t: Translator, node: fx.Node) -> Any:
    source, index = t.arguments(node)
    return source[index]


TRANSLATIONS: dict[Any, Translation] = {
    **POINTWISE,
    **RECURRENT,
    aten.linear.default: _linear,
    aten.conv2d.default: _conv,
    aten.conv2d.padding: _conv,
    aten.batch_norm.default: _batch_norm,
    aten.dropout.default: _dropout,
    aten.dropout_.default: _dropout,
    aten.alpha_dropout.default: _dropout,
    aten.feature_dropout.default: _dropout,
    aten.contiguous.default: _identity,
    aten.detach.default: _identity,
    aten.max_pool2d.default: _max_pool,
    aten.avg_pool2d.default: _average_pool,
    aten.adaptive_avg_pool2d.default: _adaptive_average,
    aten.adaptive_max_pool2d.default: _adaptive_max,
    aten.mean.dim: _mean,
    aten.flatten.using_ints: _reshape,
    aten.view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.squeeze.default: _reshape,
    aten.cat.default: _concat,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.chunk.default: _split,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: _pad,
    aten.embedding.default: _embedding,
    aten.zeros.default: lambda t, node: Zeros(),
    aten.zeros_like.default: lambda t, node: Zeros(),
    aten.new_zeros.default: lambda t, node: Zeros(),
    operator.getitem: _item,
}
