"""The translation of each ATen call to operations of the runtime."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx

from gossamer.deployment.graph import shape_of
from gossamer.deployment.runtime.network import (
    Concat,
    Constant,
    Embed,
    Floats,
    Join,
    Pair,
    Pointwise,
    Product,
    UnsupportedError,
    Value,
    batch_axis,
    dense_taps,
    diagonal_taps,
)
from gossamer.deployment.runtime.translate_attention import ATTENTION, OF_SCORES
from gossamer.deployment.runtime.translate_norms import NORMS, OF_SQUARES
from gossamer.deployment.runtime.translate_pointwise import POINTWISE
from gossamer.deployment.runtime.translate_recurrent import RECURRENT
from gossamer.deployment.runtime.translate_views import (
    EVERYTHING,
    converted,
    expanded,
    gathered,
    item,
    or_view,
    parts,
    permuted,
    reshaped,
    same,
    selected,
    sliced,
    squeezed,
    turned_tokens,
    unbind,
    unsqueezed,
    with_tokens,
)
from gossamer.deployment.runtime.translate_windows import WINDOWS
from gossamer.deployment.runtime.translator import (
    Form,
    Handle,
    Tokens,
    Translation,
    Translator,
    Zeros,
    activation,
    as_vector,
    bias_or_zeros,
    has_features,
    loaded_as,
    to_floats,
)
from gossamer.deployment.runtime.views import axis

aten = torch.ops.aten


def _linear(t: Translator, node: fx.Node) -> Handle:
    x, weight, bias = t.arguments(node, None, None, None)
    return _times(t, node, x, to_floats(weight), bias, node.args[1])


def _addmm(t: Translator, node: fx.Node) -> Handle:
    """A linear layer with the weight of (inputs, outputs), as in ``Conv1D`` of transformers."""
    bias, x, weight = t.arguments(node)[:3]
    options = [node.kwargs.get(name, 1) for name in ("alpha", "beta")]
    if options != [1, 1] or not isinstance(weight, Tensor) or not isinstance(bias, Tensor) or bias.dim() != 1:
        raise UnsupportedError(f"addmm of other than a bias, an activation and a weight (node {node.name})")
    return _times(t, node, x, np.ascontiguousarray(to_floats(weight).T), bias, node.args[2])


def _times(t: Translator, node: fx.Node, x: Any, dense: Floats, bias: Any, named: Any) -> Handle:
    x = activation(x, node)
    before = t.values[x.value]
    if x.form == "view" and not has_features(t, x):
        raise UnsupportedError(f"a linear layer over an axis of a view (node {node.name})")
    if x.form in ("picture", "signal", "bare", "grouped"):
        raise UnsupportedError(f"a linear layer over the last dimension of a {x.form} (node {node.name})")
    if x.form == "flat":
        taps = dense_taps(dense.reshape(dense.shape[0], before.channels, before.height, before.width))
        y = t.new(Value(dense.shape[0], 1, 1), "vector")
    else:
        taps = dense_taps(dense[:, :, None, None])
        y = t.new(Value(dense.shape[0], before.height, before.width), x.form)
    name, rows = t.parameter_name(named), dense.shape[0]
    t.operations.append(Product(x.value, y.value, taps, bias_or_zeros(bias, rows), (1, 1), (0, 0), dense.size, name))
    if x.view is not None:
        y = replace(y, view=replace(x.view, axes=(*x.view.axes[:-1], axis("channel", rows))))
    return y


def _dropout(t: Translator, node: fx.Node) -> Handle:
    x, share, active = t.arguments(node, None, None, None)
    if active and share:
        raise UnsupportedError(f"dropout that stays on in evaluation mode (node {node.name})")
    return activation(x, node)


def _reshape(t: Translator, node: fx.Node) -> Handle:
    """Flattening, squeezing and views that keep the samples apart."""
    x = activation(t.arguments(node)[0], node)
    value, shape, before = t.values[x.value], shape_of(node), shape_of(node.args[0])
    if _changes_samples(t, x, node):
        pass  # valid only for a batch of one
    elif x.form == "sequence":
        if shape[-1] == value.channels:
            return x
        if value.channels == 1 and shape == before[:2] and not t.time_major:
            return Handle(x.value, "flat")
    elif x.form == "state" and before[0] > 1 and shape != before:
        pass  # layers come before samples: a view mixes them
    elif x.form == "turned" and (shape == before or value.pixels > 1):
        if shape == before:  # any other would mix channels and pixels
            return x
    elif len(shape) == 2 and shape[1] == value.channels * value.pixels:
        return Handle(x.value, "vector" if value.pixels == 1 else "flat")
    elif len(shape) == 3 and value.height == 1 and shape[1:] == (value.channels, value.width):
        return Handle(x.value, "signal")
    elif len(shape) == 3 and x.form == "vector" and shape[1] == 1:
        y = t.new(Value(1, 1, value.channels), "signal")
        if loaded_as(t, x, y):
            return y
    elif shape == before or (len(shape) == 4 and shape[1:] == (value.channels, value.height, value.width)):
        return Handle(x.value, "picture" if len(shape) == 4 else x.form)
    elif len(shape) == 5 and min(shape[1:3]) > 1 and shape[3:] == (value.height, value.width):
        return Handle(x.value, "grouped")
    elif value.channels == 1 and shape in ((before[0], *before[2:]), before[:1]):
        return Handle(x.value, "bare")
    raise UnsupportedError(f"a view from {before} to {shape} (node {node.name})")


def _changes_samples(t: Translator, x: Handle, node: fx.Node) -> bool:
    """Whether the batch axis is removed, or gets an axis before it."""
    dim, rank = node.args[1] if len(node.args) > 1 else None, max(len(shape_of(node)), len(shape_of(node.args[0])))
    squeezes = node.target in (aten.squeeze.dim, aten.unsqueeze.default)
    return squeezes and cast(int, dim) % rank == batch_axis(x.form, t.time_major)


def _concat(t: Translator, node: fx.Node) -> Handle:
    tensors, dim = t.arguments(node, None, 0)
    if (turned := _half_turned(t, node, dim)) is not None:
        return turned
    if (joined := _joined(t, node, tensors, dim % len(shape_of(node)))) is not None:
        return joined
    handles = [activation(as_vector(t, x), node, "picture", "signal", "vector", "sequence") for x in tensors]
    values, rank = [t.values[x.value] for x in handles], len(shape_of(node))
    along = rank - 1 if handles[0].form == "sequence" else 1
    sizes = {(x.form, v.height, v.width) for x, v in zip(handles, values, strict=True)}
    if dim % rank != along or len(sizes) > 1:
        raise UnsupportedError(f"a concatenation along dimension {dim} (node {node.name})")
    y = t.new(Value(sum(v.channels for v in values), values[0].height, values[0].width), handles[0].form)
    t.operations.append(Concat(tuple(x.value for x in handles), y.value, node.name))
    return y


def _half_turned(t: Translator, node: fx.Node, dim: int) -> Handle | None:
    """(-second half, first half) of the last axis of a view, as in rotary positions."""
    first, *others = cast(list[Any], node.args[0])
    rank, half = len(shape_of(node)), shape_of(node)[-1] // 2
    if len(others) != 1 or dim % rank != rank - 1 or getattr(first, "target", None) is not aten.neg.default:
        return None
    halves = [each for each in (first.args[0], *others) if getattr(each, "target", None) is aten.slice.Tensor]
    given = [cast(tuple[Any, ...], each.args) for each in halves]
    if len(given) != 2 or given[0][0] is not given[1][0] or shape_of(given[0][0]) != shape_of(node):
        return None
    if [(each[1] % rank, each[2]) for each in given] != [(rank - 1, half), (rank - 1, 0)]:
        return None
    x = t.settled(t.env[given[0][0]])
    view = t.view_of(x, shape_of(node)) if isinstance(x, Handle) else None
    last = view.axes[-1] if view is not None else ()
    if view is None or len(last) != 1 or last[0].of != "channel":
        return None
    value, stride, size = t.values[x.value], last[0].stride, last[0].size
    channel = np.arange(value.channels)
    inside = channel // stride % size
    sign = np.where(inside < half, -1, 1).astype(np.float32)
    taps = diagonal_taps(value.channels, np.stack([channel, channel - sign.astype(np.int64) * half * stride], 1), sign)
    y = t.like(x)
    bias = np.zeros(value.channels, np.float32)
    t.operations.append(Product(x.value, y.value, taps, bias, (1, 1), (0, 0), taps.count, node.name, kind="copy"))
    return y


def _joined(t: Translator, node: fx.Node, tensors: list[Any], dim: int) -> Handle | None:
    """Sequences one after the other; some may be constants, such as a class token. None if these are no sequences."""
    handles = [x for x in tensors if isinstance(x, Handle)]
    if len(shape_of(node)) != 3 or dim != (0 if t.time_major else 1) or any(x.form != "sequence" for x in handles):
        return None
    items = []
    for x in tensors:
        if isinstance(x, Tensor):
            steps, each = (x, x[:, :1]) if t.time_major else (x.transpose(0, 1), x[:1].transpose(0, 1))
            if not torch.equal(each.expand_as(steps), steps):
                raise UnsupportedError(f"a constant that differs between samples (node {node.name})")
            y = t.new(Value(x.shape[2], 1, len(each)), "sequence")
            t.operations.append(Constant(y.value, np.ascontiguousarray(to_floats(each[:, 0]).T), node.name))
            items.append(y.value)
        else:
            items.append(activation(x, node).value)
    y = t.new(Value(t.values[items[0]].channels, 1, sum(t.values[item].pixels for item in items)), "sequence")
    t.operations.append(Join(tuple(items), y.value, node.name))
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
    first: Pair = (0, 0),
) -> Handle:
    """Select channels (pairs of new and old) and pixels; ``first`` is the first row and column read."""
    y = t.new(after, form or x.form)
    taps = diagonal_taps(after.channels, np.array(pairs, np.int64).reshape(-1, 2), np.ones(len(pairs), np.float32))
    taps = replace(taps, dy=taps.dy + first[0], dx=taps.dx + first[1])
    bias = np.zeros(after.channels, np.float32)
    t.operations.append(Product(x.value, y.value, taps, bias, stride, padding, taps.count, node.name, kind="copy"))
    return y


def _channels(t: Translator, x: Handle, node: fx.Node, first: int, count: int, step: int = 1) -> Handle:
    value = t.values[x.value]
    pairs = [(i, first + i * step) for i in range(count)]
    return _copy(t, x, node, pairs, Value(count, value.height, value.width))


def _split(t: Translator, node: fx.Node) -> tuple[Handle, ...]:
    """``chunk`` and ``split`` along the channels."""
    x, _, dim = t.arguments(node, None, None, 0)
    if isinstance(x, Handle) and x.form in ("view", "sequence"):
        return parts(t, node)
    x = activation(as_vector(t, x), node, "picture", "signal", "vector")
    shapes = [tuple(part.shape) for part in node.meta["val"]]
    if dim % len(shapes[0]) != 1:
        raise UnsupportedError(f"a split of dimension {dim} (node {node.name})")
    sizes = [shape[1] for shape in shapes]
    return tuple(_channels(t, x, node, sum(sizes[:i]), size) for i, size in enumerate(sizes))


def _glu(t: Translator, node: fx.Node) -> Handle:
    """The first half of the channels, times the sigmoid of the second."""
    x, dim = t.arguments(node, None, -1)
    x = activation(as_vector(t, x), node, "picture", "signal", "vector", "sequence")
    shape = shape_of(node)
    channels = len(shape) - 1 if x.form == "sequence" else 1
    if dim % len(shape) != channels:
        raise UnsupportedError(f"a gated linear unit along dimension {dim} of a {x.form} (node {node.name})")
    half = shape[channels]
    kept, gate = (_channels(t, x, node, first, half) for first in (0, half))
    y = t.new(t.values[kept.value], x.form)
    t.operations.append(Pointwise(gate.value, y.value, "sigmoid", node.name, by=kept.value))
    return y


def _select(t: Translator, node: fx.Node) -> Handle:
    """One time step of a sequence or signal, or one layer of a recurrent layer's last state."""
    x, dim, index = t.arguments(node)
    x = activation(x, node, "sequence", "signal", "state")
    value, shape = t.values[x.value], tuple(cast(fx.Node, node.args[0]).meta["val"].shape)
    index %= shape[dim]
    if x.form == "state" and dim == 0:
        pairs = [(i, index * shape[2] + i) for i in range(shape[2])]
        return _copy(t, x, node, pairs, Value(shape[2], 1, 1), form="vector")
    steps = 2 if x.form == "signal" else 0 if t.time_major else 1
    if x.form != "state" and len(shape) == 3 and dim % 3 == steps:
        pairs = [(i, i) for i in range(value.channels)]
        return _copy(t, x, node, pairs, Value(value.channels, 1, 1), form="vector", first=(0, index))
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
    channels = len(shape) - 1 if x.form == "sequence" else 1
    if x.form in ("picture", "signal", "vector", "sequence") and dim == channels:
        return _channels(t, x, node, start, shape[dim], step)
    if x.form in ("picture", "signal", "sequence") and len(shape) > 2:
        down = x.form == "picture" and dim == 2
        pairs = [(i, i) for i in range(value.channels)]
        after = replace(value, height=shape[dim]) if down else replace(value, width=shape[dim])
        stride, first = ((step, 1), (start, 0)) if down else ((1, step), (0, start))
        return _copy(t, x, node, pairs, after, stride=stride, first=first)
    raise UnsupportedError(f"a slice of dimension {dim} (node {node.name})")


def _pad(t: Translator, node: fx.Node) -> Handle:
    x, widths, mode, fill = t.arguments(node, None, None, "constant", None)
    x = activation(x, node, "picture", "signal")
    value = t.values[x.value]
    each = list(widths) if x.form == "picture" else [*widths[:2], 0, 0, *widths[2:]]
    left, right, top, bottom, before, after, *more = (each + [0] * 8)[:8]
    if mode != "constant" or fill or any(more) or min(widths) < 0:
        raise UnsupportedError(f"padding by {widths} in mode {mode} (node {node.name})")
    pairs = [(i + before, i) for i in range(value.channels)]
    wider = Value(value.channels + before + after, value.height + top + bottom, value.width + left + right)
    return _copy(t, x, node, pairs, wider, padding=(top, left))


def _turn(t: Translator, node: fx.Node) -> Handle:
    """Move channels before or after the steps or pixels, which only changes the form of a value; or shuffle groups of
    channels."""
    x, *dims = t.arguments(node)
    x, rank = activation(x, node), len(shape_of(node))
    order = [d % rank for d in (dims[0] if isinstance(dims[0], list) else dims)]
    if node.target is aten.transpose.int:
        order = [order[1] if d == order[0] else order[0] if d == order[1] else d for d in range(rank)]
    if order == list(range(rank)):
        return x
    if x.form == "grouped" and order == [0, 2, 1, 3, 4]:
        return _shuffled(t, x, node, shape_of(node)[2], "grouped")
    ways: dict[Form, tuple[list[int], Form]] = {
        "sequence": ([1, 2, 0] if t.time_major else [0, 2, 1], "signal"),
        "signal": ([2, 0, 1] if t.time_major else [0, 2, 1], "sequence"),
        "picture": ([0, 2, 3, 1], "turned"),
        "turned": ([0, 3, 1, 2], "picture"),
    }
    wanted, form = ways.get(x.form, (None, x.form))
    if order != wanted:
        raise UnsupportedError(f"axes of a {x.form} in the order {order} (node {node.name})")
    return Handle(x.value, form)


def _shuffled(t: Translator, x: Handle, node: fx.Node, groups: int, form: Form) -> Handle:
    """The first channel of each group, then the second of each."""
    value = t.values[x.value]
    channels = np.arange(value.channels).reshape(groups, -1).T.ravel().tolist()
    return _copy(t, x, node, list(enumerate(channels)), value, form=form)


def _channel_shuffle(t: Translator, node: fx.Node) -> Handle:
    x, groups = t.arguments(node)
    x = activation(x, node, "picture", "signal")
    return _shuffled(t, x, node, groups, x.form)


def _embedding(t: Translator, node: fx.Node) -> Handle:
    weight, tokens = t.arguments(node)[:2]
    if not isinstance(tokens, Tokens) or len(tokens.shape) != 2:
        raise UnsupportedError(f"an embedding of something else than a batch of token sequences (node {node.name})")
    steps = tokens.shape[0] if t.time_major else tokens.shape[1]
    y = t.new(Value(weight.shape[1], 1, steps), "sequence")
    t.operations.append(Embed(y.value, tokens.slot, to_floats(weight), t.parameter_name(node.args[0])))
    if tokens.turned:
        return t.viewed(y.value, t.view_of(y, (steps, *shape_of(node)[::2])).permuted([1, 0, 2]))
    return y


TRANSLATIONS: dict[Any, Translation] = {
    **NORMS,
    **POINTWISE,
    **RECURRENT,
    **WINDOWS,
    **ATTENTION,
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.dropout.default: _dropout,
    aten.alpha_dropout.default: _dropout,
    aten.feature_dropout.default: _dropout,
    aten.contiguous.default: same,
    aten.clone.default: same,
    aten.flatten.using_ints: or_view(reshaped, _reshape),
    aten.view.default: with_tokens(or_view(reshaped, _reshape)),
    aten.reshape.default: with_tokens(or_view(reshaped, _reshape)),
    aten.unflatten.int: or_view(reshaped, _reshape),
    aten.squeeze.dim: or_view(squeezed, _reshape),
    aten.squeeze.dims: or_view(squeezed, _reshape),
    aten.squeeze.default: or_view(squeezed, _reshape),
    aten.unsqueeze.default: with_tokens(or_view(unsqueezed, _reshape)),
    aten.expand.default: with_tokens(or_view(expanded)),
    aten.t.default: turned_tokens,
    aten.transpose.int: or_view(permuted, _turn),
    aten.permute.default: or_view(permuted, _turn),
    aten.channel_shuffle.default: _channel_shuffle,
    aten.cat.default: _concat,
    aten.slice.Tensor: or_view(sliced, _slice, steps=True),
    aten.select.int: or_view(selected, _select),
    aten.unbind.int: unbind,
    aten.chunk.default: _split,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.index.Tensor: gathered,
    aten.to.dtype: converted,
    aten.to.device: converted,
    aten.to.dtype_layout: converted,
    aten.glu.default: _glu,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: _pad,
    aten.embedding.default: _embedding,
    aten.zeros.default: lambda t, node: Zeros(),
    aten.zeros_like.default: lambda t, node: Zeros(),
    aten.new_zeros.default: lambda t, node: Zeros(),
    operator.getitem: item,
}
OF_LAZY = {**OF_SCORES, **OF_SQUARES}
#: Calls that take views of some channels or pixels; all others get copies of them.
OF_VIEWS = frozenset(
    [
        *(*ATTENTION, aten.contiguous.default, aten.clone.default, aten.dropout.default, operator.getitem),
        *(aten.flatten.using_ints, aten.view.default, aten.reshape.default, aten.unflatten.int, aten.squeeze.dim),
        *(aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default, aten.expand.default, aten.t.default),
        *(aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.select.int, aten.unbind.int),
        *(aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.index.Tensor),
        *(aten.to.dtype, aten.to.device, aten.to.dtype_layout),
    ]
)
