"""What each ATen call means in terms of the runtime's operations."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, fx

from gossamer.runtime.graph import (
    Affine,
    Concat,
    Embed,
    Floats,
    Input,
    Pair,
    Pool,
    Product,
    Recurrence,
    Recurrent,
    Taps,
    UnsupportedError,
    Value,
    dense_taps,
    diagonal_taps,
)
from gossamer.runtime.translator import Handle, Tokens, Translator, Zeros

aten = torch.ops.aten


def _floats(tensor: Tensor) -> Floats:
    if tensor.dtype != torch.float32:
        raise UnsupportedError(f"parameters of dtype {tensor.dtype}; the kernels work in float32")
    return tensor.detach().cpu().contiguous().numpy()


def _activation(handle: Any, node: fx.Node, *forms: str) -> Handle:
    if not isinstance(handle, Handle) or (forms and handle.form not in forms):
        raise UnsupportedError(f"{node.target} on {getattr(handle, 'form', type(handle).__name__)} (node {node.name})")
    return handle


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


def _bias(tensor: Tensor | None, rows: int) -> Floats:
    return np.zeros(rows, np.float32) if tensor is None else _floats(tensor)


def _linear(t: Translator, node: fx.Node) -> Handle:
    x, weight, bias = t.arguments(node, None, None, None)
    x = _activation(x, node)
    before = t.values[x.value]
    dense = _floats(weight)
    if x.form == "picture":
        raise UnsupportedError(f"a linear layer over the last dimension of a picture (node {node.name})")
    if x.form == "flat":
        taps = dense_taps(dense.reshape(dense.shape[0], before.channels, before.height, before.width))
        y = t.new(Value(dense.shape[0], 1, 1), "vector")
    else:
        taps = dense_taps(dense[:, :, None, None])
        y = t.new(Value(dense.shape[0], before.height, before.width), x.form)
    name, rows = t.parameter_name(node.args[1]), dense.shape[0]
    t.operations.append(Product(x.value, y.value, taps, _bias(bias, rows), (1, 1), (0, 0), dense.size, name))
    return y


def _conv(t: Translator, node: fx.Node) -> Handle:
    x, weight, bias, stride, padding, dilation, groups = t.arguments(node, None, None, None, [1], [0], [1], 1)
    x = _activation(x, node, "picture")
    before, dense = t.values[x.value], _floats(weight)
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
    t.operations.append(Product(x.value, y.value, taps, _bias(bias, rows), stride, padding, dense.size, name))
    return y


def _affine(t: Translator, x: Handle, **parts: Any) -> Handle:
    y = t.new(t.values[x.value], x.form)
    t.operations.append(Affine(x.value, y.value, **parts))
    return y


def _batch_norm(t: Translator, node: fx.Node) -> Handle:
    x, weight, bias, mean, variance, training, _, eps = t.arguments(node)[:8]
    x = _activation(_as_vector(t, x), node, "picture", "vector")
    if training or mean is None:
        raise UnsupportedError(f"normalisation with the statistics of the batch (node {node.name})")
    scale = 1 / torch.sqrt(variance.double() + eps)
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale + (0 if bias is None else bias.double())
    return _affine(t, x, name=node.name, scale=_floats(scale.float()), shift=_floats(shift.float()))


def _relu(t: Translator, node: fx.Node) -> Handle:
    return _affine(t, _activation(t.arguments(node)[0], node), name=node.name, relu=True)


def _add(t: Translator, node: fx.Node) -> Handle:
    first, second = t.arguments(node)[:2]
    a, b = _activation(first, node), _activation(second, node)
    if t.values[a.value] != t.values[b.value] or a.form != b.form or node.kwargs.get("alpha", 1) != 1:
        raise UnsupportedError(f"an addition that broadcasts or scales (node {node.name})")
    return _affine(t, a, name=node.name, add=b.value)


def _identity(t: Translator, node: fx.Node) -> Handle:
    return cast(Handle, t.arguments(node)[0])


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
    x, kernel = _activation(x, node, "picture"), _pair(kernel)
    given = {
        "stride": _pair(stride) if stride else kernel,
        "padding": _pair(padding),
        "dilation": _pair(dilation),
    }
    return _pool(t, x, node.name, "max", kernel, ceil=ceil, **given)


def _average_pool(t: Translator, node: fx.Node) -> Handle:
    arguments = t.arguments(node, None, None, [], [0], False, True, None)
    x, kernel, stride, padding, ceil, count, divisor = arguments
    x, kernel = _activation(x, node, "picture"), _pair(kernel)
    given = {"stride": _pair(stride) if stride else kernel, "padding": _pair(padding), "ceil": ceil}
    return _pool(t, x, node.name, "average", kernel, count_padding=count, divisor=divisor or 0, **given)


def _adaptive_pool(t: Translator, node: fx.Node) -> Handle:
    x, size = t.arguments(node)[:2]
    x = _activation(x, node, "picture")
    before, after = t.values[x.value], _pair(size)
    if before.height % after[0] or before.width % after[1]:
        raise UnsupportedError(f"adaptive pooling of {before.height}x{before.width} to {after} (node {node.name})")
    kernel = (before.height // after[0], before.width // after[1])
    return _pool(t, x, node.name, "max" if "max" in str(node.target) else "average", kernel)


def _mean(t: Translator, node: fx.Node) -> Handle:
    x, dims, keep = t.arguments(node, None, None, False)
    x = _activation(x, node, "picture", "sequence")
    value = t.values[x.value]
    wanted = {2, 3} if x.form == "picture" else ({0} if t.time_major else {1})
    rank = 4 if x.form == "picture" else 3
    if dims is None or {d % rank for d in dims} != wanted or (keep and x.form == "sequence"):
        raise UnsupportedError(f"a mean over {dims} (node {node.name})")
    y = _pool(t, x, node.name, "average", (value.height, value.width))
    return Handle(y.value, "picture" if keep else "vector")


def _reshape(t: Translator, node: fx.Node) -> Handle:
    """Flattening, squeezing and views that keep the samples apart."""
    x = _activation(t.arguments(node)[0], node)
    value, shape = t.values[x.value], tuple(node.meta["val"].shape)
    before = tuple(cast(fx.Node, node.args[0]).meta["val"].shape)
    if x.form == "sequence":
        if shape[-1] == before[-1] == value.channels and len(shape) in (2, 3):
            return x
    elif len(shape) == 2 and shape[1] == value.channels * value.pixels:
        return Handle(x.value, "vector" if value.pixels == 1 else "flat")
    elif len(shape) == 3 and value.pixels == 1 and shape[1] == value.channels:
        return Handle(x.value, "picture")
    elif shape == before or (len(shape) == 4 and shape[1:] == (value.channels, value.height, value.width)):
        return Handle(x.value, "picture" if len(shape) == 4 else x.form)
    raise UnsupportedError(f"a view from {before} to {shape} (node {node.name})")


def _concat(t: Translator, node: fx.Node) -> Handle:
    tensors, dim = t.arguments(node, None, 0)
    parts = [_activation(_as_vector(t, x), node, "picture", "vector") for x in tensors]
    values = [t.values[x.value] for x in parts]
    if dim not in (1, 1 - len(node.meta["val"].shape)) or len({(v.height, v.width) for v in values}) > 1:
        raise UnsupportedError(f"a concatenation along dimension {dim} (node {node.name})")
    y = t.new(Value(sum(v.channels for v in values), values[0].height, values[0].width), parts[0].form)
    t.operations.append(Concat(tuple(x.value for x in parts), y.value, node.name))
    return y


def _copy_taps(
    t: Translator, x: Handle, node: fx.Node, pairs: list[Pair], rows: int, stride: Pair, size: Pair
) -> Handle:
    y = t.new(Value(rows, *size), x.form)
    taps = diagonal_taps(rows, np.array(pairs, np.int64).reshape(-1, 2), np.ones(len(pairs), np.float32))
    bias = np.zeros(rows, np.float32)
    t.operations.append(Product(x.value, y.value, taps, bias, stride, (0, 0), taps.count, node.name))
    return y


def _slice(t: Translator, node: fx.Node) -> Handle:
    x, dim, start, _, step = t.arguments(node, None, 0, None, None, 1)
    x = _activation(x, node)
    value, shape = t.values[x.value], tuple(node.meta["val"].shape)
    if shape == tuple(cast(fx.Node, node.args[0]).meta["val"].shape):
        return x
    start = start or 0
    if x.form in ("picture", "vector") and dim == 1:
        pairs = [(i, start + i * step) for i in range(shape[1])]
        return _copy_taps(t, x, node, pairs, shape[1], (1, 1), (value.height, value.width))
    if x.form == "picture" and start == 0 and dim in (2, 3):
        size = -(-value.height // step), -(-value.width // step)
        if shape[dim] == size[dim - 2]:
            pairs = [(i, i) for i in range(value.channels)]
            stride = (step, 1) if dim == 2 else (1, step)
            return _copy_taps(t, x, node, pairs, value.channels, stride, shape[2:])
    raise UnsupportedError(f"a slice of dimension {dim} (node {node.name})")


def _pad(t: Translator, node: fx.Node) -> Handle:
    x, widths, mode, fill = t.arguments(node, None, None, "constant", None)
    x = _activation(x, node, "picture")
    value = t.values[x.value]
    widths = (list(widths) + [0] * 8)[:8]
    if mode != "constant" or fill or any(widths[:4]) or any(widths[6:]) or min(widths) < 0:
        raise UnsupportedError(f"padding by {widths} in mode {mode} (node {node.name})")
    pairs = [(i + widths[4], i) for i in range(value.channels)]
    rows = value.channels + widths[4] + widths[5]
    return _copy_taps(t, x, node, pairs, rows, (1, 1), (value.height, value.width))


def _embedding(t: Translator, node: fx.Node) -> Handle:
    weight, tokens = t.arguments(node)[:2]
    if not isinstance(tokens, Tokens) or len(tokens.shape) != 2:
        raise UnsupportedError(f"an embedding of something else than a batch of token sequences (node {node.name})")
    steps = tokens.shape[0] if t.time_major else tokens.shape[1]
    y = t.new(Value(weight.shape[1], 1, steps), "sequence")
    t.operations.append(Embed(y.value, tokens.slot, _floats(weight), t.parameter_name(node.args[0])))
    return y


def _recurrent(t: Translator, node: fx.Node) -> tuple[Any, ...]:
    x, state, weights, has_bias, layers, _, training, both, _ = t.arguments(node)
    kind: Literal["lstm", "gru"] = "lstm" if node.target == aten.lstm.input else "gru"
    x = _activation(x, node, "sequence")
    given = state if isinstance(state, list) else [state]
    if training or not (all(isinstance(s, Zeros) for s in given) or all(isinstance(s, Handle) for s in given)):
        raise UnsupportedError(f"a recurrent layer in training or with a mixed initial state (node {node.name})")
    each, directions = 4 if has_bias else 2, 2 if both else 1
    if len(weights) != each * layers * directions:
        raise UnsupportedError(f"a recurrent layer with projections (node {node.name})")
    nodes = cast(list[fx.Node], node.args[2])
    all_units = sum(weights[i * each + 1].shape[1] for i in range(layers * directions))
    before = tuple(s.value for s in given if isinstance(s, Handle))
    after: list[Handle] = []
    if any(user.args[1] != 0 and user.users for user in node.users):
        after = [t.new(Value(all_units, 1, 1), "state") for _ in given]
    for layer in range(layers):
        steps = t.values[x.value].width
        units = weights[layer * directions * each + 1].shape[1]
        y = t.new(Value(units * directions, 1, steps), "sequence")
        for direction in range(directions):
            at = (layer * directions + direction) * each
            w_in, w_hidden = (_floats(w) for w in weights[at : at + 2])
            b_in, b_hidden = (_bias(b, w_in.shape[0]) for b in (weights[at + 2 : at + 4] if has_bias else (None, None)))
            if kind == "lstm":  # one sum; in a GRU the reset gate stands between the two
                b_in, b_hidden = b_in + b_hidden, np.zeros_like(b_hidden)
            taps = dense_taps(w_in[:, :, None, None]), dense_taps(w_hidden[:, :, None, None])
            name = t.parameter_name(nodes[at]).replace("weight_ih", kind)
            t.operations.append(
                Recurrent(
                    *(x.value, y.value, kind, units, taps[0], b_in, taps[1], b_hidden),
                    reverse=direction == 1,
                    channel=direction * units,
                    dense_size=w_in.size + w_hidden.size,
                    name=name,
                    state=Recurrence((layer * directions + direction) * units, before, tuple(h.value for h in after)),
                )
            )
        x = y
    return (x, *after) if after else (x, *[None] * len(given))


def _item(t: Translator, node: fx.Node) -> Any:
    source, index = t.arguments(node)
    return source[index]


_Translation = Callable[[Translator, fx.Node], Any]
TRANSLATIONS: dict[Any, _Translation] = {
    aten.linear.default: _linear,
    aten.conv2d.default: _conv,
    aten.conv2d.padding: _conv,
    aten.batch_norm.default: _batch_norm,
    aten.relu.default: _relu,
    aten.relu_.default: _relu,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add,
    aten.dropout.default: _identity,
    aten.feature_dropout.default: _identity,
    aten.contiguous.default: _identity,
    aten.detach.default: _identity,
    aten.max_pool2d.default: _max_pool,
    aten.avg_pool2d.default: _average_pool,
    aten.adaptive_avg_pool2d.default: _adaptive_pool,
    aten.adaptive_max_pool2d.default: _adaptive_pool,
    aten.mean.dim: _mean,
    aten.flatten.using_ints: _reshape,
    aten.view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.squeeze.default: _reshape,
    aten.cat.default: _concat,
    aten.slice.Tensor: _slice,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: _pad,
    aten.embedding.default: _embedding,
    aten.zeros.default: lambda t, node: Zeros(),
    aten.zeros_like.default: lambda t, node: Zeros(),
    aten.new_zeros.default: lambda t, node: Zeros(),
    aten.lstm.input: _recurrent,
    aten.gru.input: _recurrent,
    operator.getitem: _item,
}
