"""Attention, as one call or written out: a product of queries and keys, a softmax, and a product with the values.

What is written out is collected in ``Scores`` until the last product, when one ``Attention`` replaces it. Masks that
depend on the tokens hide keys; all other masks have to be constants of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, fx

from gossamer.deployment.graph import shape_of
from gossamer.deployment.runtime.network import Attention, Floats, Heads, UnsupportedError, Value
from gossamer.deployment.runtime.translator import Handle, Lazy, Tokens, Translation, Translator, activation
from gossamer.deployment.runtime.views import Part, View

aten = torch.ops.aten
HIDDEN = -1e30  # numbers below hide a key, as -inf does


@dataclass(frozen=True)
class Mask(Lazy):
    """Where a constant and numbers of the keys of each sample are both true."""

    about: ClassVar[str] = "a mask of keys and queries"
    constant: Tensor
    keys: Handle


@dataclass(frozen=True)
class Scores(Lazy):
    """Products of queries and keys; after the softmax the weights of the values."""

    about: ClassVar[str] = "scores of attention"
    queries: Handle
    keys: Handle
    scale: float
    masks: tuple[Any, ...] = ()
    after_softmax: bool = False


def _attention(t: Translator, node: fx.Node) -> Handle:
    q, k, v, mask, dropout, causal, scale, grouped = t.arguments(node, None, None, None, None, 0.0, False, None, False)
    q, k, v = (activation(each, node) for each in (q, k, v))
    if dropout:
        raise UnsupportedError(f"attention with dropout in evaluation mode (node {node.name})")
    shapes = [shape_of(each) for each in node.args[:3]]
    scale = shapes[0][-1] ** -0.5 if scale is None else float(scale)
    masks = () if mask is None else (mask,)
    views = [t.view_of(each, shape) for each, shape in zip((q, k, v), shapes, strict=True)]
    return _attend(t, node, (q, k, v), views, scale, masks, causal, grouped)


def _attend(
    t: Translator,
    node: fx.Node,
    sources: tuple[Handle, Handle, Handle],
    views: list[View],
    scale: float,
    masks: tuple[Any, ...],
    causal: bool = False,
    grouped: bool = False,
) -> Handle:
    queries, keys = views[0].shape[-2], views[1].shape[-2]
    heads = [_heads(t, source, view, node) for source, view in zip(sources, views, strict=True)]
    count = len(heads[0].first)
    if grouped:
        heads[1:] = [_repeated(each, count) for each in heads[1:]]
    if any(len(each.first) != count for each in heads) or heads[0].size != heads[1].size:
        raise UnsupportedError(f"attention with {[len(each.first) for each in heads]} heads (node {node.name})")
    constant: Tensor | None = None
    hidden: Handle | None = None
    for mask in masks:
        own, handle = (mask.constant, mask.keys) if isinstance(mask, Mask) else (mask, None)
        if isinstance(own, Handle | Tokens):
            own, handle = None, own
        if own is not None:
            added = _additive(own, (count, queries, keys), node)
            constant = added if constant is None else constant + added
        if handle is not None:
            if hidden is not None:
                raise UnsupportedError(f"two masks that depend on the tokens (node {node.name})")
            hidden = _hidden(t, handle, keys, node)
    mask_planes, is_causal = _planes(constant, causal, queries, keys)
    y = t.new(Value(count * heads[2].size, 1, queries), "view")
    t.operations.append(
        Attention(
            *(sources[0].value, sources[1].value, sources[2].value, y.value),
            heads=(heads[0], heads[1], heads[2]),
            lengths=(queries, keys),
            scale=scale,
            causal=is_causal,
            name=node.name,
            mask=mask_planes,
            hidden=None if hidden is None else hidden.value,
        )
    )
    return t.viewed(y.value, _result(views[0], count, queries, heads[2].size))


def _heads(t: Translator, x: Handle, view: View, node: fx.Node) -> Heads:
    """The places of queries, keys or values with axes (…, tokens, channels), of which the others are heads."""
    value, (*leading, tokens, features) = t.values[x.value], view.axes
    plain_tokens = len(tokens) <= 1 and all(part.of == "pixel" and part.stride == 1 for part in tokens)
    plain_features = len(features) <= 1 and all(part.of == "channel" for part in features)
    if value.height > 1 or not plain_tokens or not plain_features:
        raise UnsupportedError(f"attention over other axes than tokens and channels (node {node.name})")
    if any(part.of == "pixel" for each in leading for part in each):
        raise UnsupportedError(f"attention with some of the tokens (node {node.name})")
    first = View(tuple(leading), view.channel).places("channel").ravel()
    stride = features[0].stride if features else 1
    return Heads(tuple(first.tolist()), stride, view.shape[-1], view.pixel)


def _repeated(heads: Heads, count: int) -> Heads:
    return replace(heads, first=tuple(np.repeat(heads.first, count // len(heads.first)).tolist()))


def _result(queries: View, heads: int, tokens: int, width: int) -> View:
    """Axes like those of the queries, with the channels of one head after those of another."""
    axes, left = [], heads
    for each in queries.axes[:-2]:
        parts = []
        for part in each:
            if part.of == "channel":
                left //= part.size
                part = replace(part, stride=left * width)
            parts.append(part)
        axes.append(tuple(parts))
    own: list[tuple[Part, ...]] = [(Part("pixel", tokens),) if tokens > 1 else ()]
    own.append((Part("channel", width),) if width > 1 else ())
    return View((*axes, *own))


def _additive(mask: Tensor, sizes: tuple[int, int, int], node: fx.Node) -> Tensor:
    """A constant mask as numbers to add, (heads or 1, queries, keys)."""
    heads, queries, keys = sizes
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    shape = [1] * (4 - mask.dim()) + list(mask.shape)
    mask = mask.reshape(shape[-4:]).float() if mask.dim() <= 4 else mask.float()
    if mask.dim() > 4 or not torch.equal(mask[:1].expand_as(mask), mask) or mask.shape[1] not in (1, heads):
        raise UnsupportedError(f"a mask of shape {tuple(mask.shape)} that differs between samples (node {node.name})")
    return mask[0].expand(-1, queries, keys)


def _planes(mask: Tensor | None, causal: bool, queries: int, keys: int) -> tuple[Floats | None, bool]:
    """The mask as [head][key][query], or None, and whether attention is causal."""
    if mask is None or not mask.any():
        return None, causal
    future = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    if len(mask) == 1 and (mask[0][future] < HIDDEN).all() and not mask[0][~future].any():
        return None, True
    return np.ascontiguousarray(mask.transpose(1, 2).numpy().astype(np.float32)), causal


def _hidden(t: Translator, mask: Handle | Tokens, keys: int, node: fx.Node) -> Handle:
    """A mask of the keys of each sample as numbers to add."""
    if isinstance(mask, Tokens):
        raise UnsupportedError(f"attention with a mask of tokens (node {node.name})")
    value = t.values[mask.value]
    source = next((n for n in t.env if t.env[n] is mask), None)
    view = mask.view if mask.view is not None or source is None else t.view_of(mask, shape_of(source))
    last = None if view is None or not view.axes else view.axes[-1]
    pixels = [part for each in (view.axes if view else ()) for part in each if part.of == "pixel" and part.stride]
    if value.channels > 1 or value.pixels != keys or last is None or list(last) != pixels:
        raise UnsupportedError(f"a mask that depends on the tokens and the queries (node {node.name})")
    if source is not None and source.meta["val"].dtype is torch.float32:
        return mask
    return t.pointwise(mask, node.name, "hides")


# ------------------------------------------------------------------------------------------------------- written out


def _matmul(t: Translator, node: fx.Node) -> Any:
    """Scores of queries and keys."""
    q, k = (activation(each, node) for each in t.arguments(node)[:2])
    rank = len(shape_of(node))
    if rank < 3:
        raise UnsupportedError(f"a product of two activations (node {node.name})")
    views = [t.view_of(x, shape_of(n)) for x, n in zip((q, k), node.args[:2], strict=True)]
    if any(len(view.axes) != rank for view in views):
        raise UnsupportedError(f"a product of two activations that broadcasts (node {node.name})")
    order = [*range(rank - 2), rank - 1, rank - 2]
    handles = Handle(q.value, "view", views[0]), Handle(k.value, "view", views[1].permuted(order))
    return Scores(*handles, 1.0)


def _weighted(t: Translator, node: fx.Node) -> Handle:
    """The last product: weights times values."""
    scores, v = t.arguments(node)[:2]
    if not isinstance(scores, Scores) or not scores.after_softmax or scores.queries.view is None:
        raise UnsupportedError(f"a product with scores of attention (node {node.name})")
    assert scores.keys.view is not None
    v = activation(v, node)
    views = [scores.queries.view, scores.keys.view, t.view_of(v, shape_of(node.args[1]))]
    made = _attend(t, node, (scores.queries, scores.keys, v), views, scores.scale, scores.masks)
    if t.fits(made, node):
        return made
    source = t.view_of(made, (*views[0].shape[:-1], views[2].shape[-1]))
    return t.viewed(made.value, source.reshaped(shape_of(node)))


def _scaled(t: Translator, node: fx.Node) -> Scores:
    scores, factor = t.arguments(node)[:2]
    if isinstance(factor, Scores):
        scores, factor = factor, scores
    if isinstance(factor, Tensor) and factor.numel() == 1:
        factor = float(factor)
    if not isinstance(scores, Scores) or not isinstance(factor, int | float) or scores.masks or scores.after_softmax:
        raise UnsupportedError(f"a product with scores of attention (node {node.name})")
    factor = 1 / factor if "div" in str(node.target) else factor
    return replace(scores, scale=scores.scale * factor)


def _masked(t: Translator, node: fx.Node) -> Scores:
    """Scores plus a mask."""
    scores, mask = t.arguments(node)[:2]
    if isinstance(mask, Scores):
        scores, mask = mask, scores
    if not isinstance(scores, Scores) or scores.after_softmax or not isinstance(mask, Tensor | Handle | Mask):
        raise UnsupportedError(f"a sum with scores of attention (node {node.name})")
    return replace(scores, masks=(*scores.masks, mask))


def _filled(t: Translator, node: fx.Node) -> Scores:
    """Scores with some of them hidden by a constant mask."""
    scores, mask, number = t.arguments(node)
    number = float(number)
    if not isinstance(scores, Scores) or scores.after_softmax or not isinstance(mask, Tensor) or number > HIDDEN:
        raise UnsupportedError(f"scores of attention that are replaced by {number} (node {node.name})")
    return replace(scores, masks=(*scores.masks, ~mask.bool()))


def _softmax(t: Translator, node: fx.Node) -> Scores:
    scores, dim, dtype = t.arguments(node, None, None, None)
    if not isinstance(scores, Scores) or dim % len(shape_of(node)) != len(shape_of(node)) - 1 or scores.after_softmax:
        raise UnsupportedError(f"softmax over dimension {dim} of scores (node {node.name})")
    if dtype not in (None, torch.float32):
        raise UnsupportedError(f"softmax in {dtype} (node {node.name})")
    return replace(scores, after_softmax=True)


def _same(t: Translator, node: fx.Node) -> Any:
    """Conversions, dropout, and other leading axes."""
    x = t.arguments(node)[0]
    before, after = shape_of(node.args[0]), shape_of(node)
    if isinstance(x, Scores) and (before[-2:] != after[-2:] or node.meta["val"].dtype is not torch.float32):
        raise UnsupportedError(f"{node.target} of scores of attention (node {node.name})")
    return x


def _as_addend(t: Translator, node: fx.Node) -> Any:
    """``where(mask, 0, -inf)``: the mask again, which attention adds in this way."""
    mask, shown, other = t.arguments(node)
    zero = not shown.any() if isinstance(shown, Tensor) else shown == 0
    if isinstance(other, Tensor):
        other = float(other.max())
    if not zero or other > HIDDEN or not isinstance(mask, Mask):
        raise UnsupportedError(f"{node.target} of activations (node {node.name})")
    return mask


def _both(t: Translator, node: fx.Node) -> Any:
    """Two masks together, one of them constant."""
    first, second = t.arguments(node)
    constant, handle = (first, second) if isinstance(first, Tensor) else (second, first)
    if isinstance(handle, Mask) and isinstance(constant, Tensor):
        return replace(handle, constant=handle.constant & constant)
    if not isinstance(constant, Tensor) or not isinstance(handle, Handle) or constant.dtype is not torch.bool:
        raise UnsupportedError(f"{node.target} of two activations (node {node.name})")
    return Mask(constant, handle)


_UNCHANGED = (
    *(aten.dropout.default, aten.to.dtype, aten.to.dtype_layout, aten.contiguous.default, aten.clone.default),
    *(aten.reshape.default, aten.expand.default),
)
ATTENTION: dict[Any, Translation] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.matmul.default: _matmul,
    aten.bmm.default: _matmul,
    aten.__and__.Tensor: _both,
    aten.bitwise_and.Tensor: _both,
    aten.logical_and.default: _both,
}
#: Calls that may receive scores or masks.
OF_SCORES: dict[tuple[Any, type[Lazy]], Translation] = {
    (aten.matmul.default, Scores): _weighted,
    (aten.bmm.default, Scores): _weighted,
    (aten.mul.Tensor, Scores): _scaled,
    (aten.div.Tensor, Scores): _scaled,
    (aten.add.Tensor, Scores): _masked,
    (aten.masked_fill.Scalar, Scores): _filled,
    (aten.softmax.int, Scores): _softmax,
    (aten.scaled_dot_product_attention.default, Mask): _attention,
    (aten.__and__.Tensor, Mask): _both,
    (aten.where.ScalarOther, Mask): _as_addend,
    (aten.where.self, Mask): _as_addend,
    **{(target, kind): _same for target in _UNCHANGED for kind in (Scores, Mask)},
}
