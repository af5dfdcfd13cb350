"""Calls that only name elements in another way: they move no data, and become views where no form fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx

from gossamer.deployment.graph import shape_of
from gossamer.deployment.runtime.network import UnsupportedError
from gossamer.deployment.runtime.translator import Handle, Tokens, Translation, Translator, activation
from gossamer.deployment.runtime.views import View

aten = torch.ops.aten
EVERYTHING = 2**63 - 1  # the end of an open slice, as the exporter writes it
Change = Callable[[Translator, fx.Node, View], View]


def or_view(change: Change, plain: Translation | None = None, *, steps: bool = False) -> Translation:
    """The translation of a call that changes the view of its input. Where ``plain`` has a form for the result, that is
    preferred, unless the input is a sequence and ``steps`` says so."""

    def translate(t: Translator, node: fx.Node) -> Any:
        x = t.arguments(node)[0]
        if plain is not None and not (isinstance(x, Handle) and (x.form == "view" or (steps and x.form == "sequence"))):
            try:
                made = plain(t, node)
                if not isinstance(made, Handle) or t.fits(made, node):
                    return made
            except UnsupportedError as error:
                return _viewed(t, node, change, error)
        return _viewed(t, node, change, None)

    return translate


def _viewed(t: Translator, node: fx.Node, change: Change, first: UnsupportedError | None) -> Handle:
    x = activation(t.arguments(node)[0], node)
    try:
        return t.viewed(x.value, change(t, node, t.view_of(x, shape_of(node.args[0]))))
    except UnsupportedError as error:
        raise first or UnsupportedError(f"{error} (node {node.name})") from None


def reshaped(t: Translator, node: fx.Node, view: View) -> View:
    return view.reshaped(shape_of(node))


def unsqueezed(t: Translator, node: fx.Node, view: View) -> View:
    return view.with_axis(t.arguments(node)[1] % len(shape_of(node)))


def squeezed(t: Translator, node: fx.Node, view: View) -> View:
    dims = t.arguments(node, None, None)[1]
    rank = len(view.axes)
    chosen = range(rank) if dims is None else [dims % rank] if isinstance(dims, int) else [d % rank for d in dims]
    for dim in sorted((d for d in chosen if view.shape[d] == 1), reverse=True):
        view = view.without_axis(dim)
    return view


def permuted(t: Translator, node: fx.Node, view: View) -> View:
    _, *dims = t.arguments(node)
    rank = len(view.axes)
    if node.target is aten.permute.default:
        return view.permuted([d % rank for d in dims[0]])
    first, second = (d % rank for d in (dims or (0, 1)))
    order = list(range(rank))
    order[first], order[second] = second, first
    return view.permuted(order)


def sliced(t: Translator, node: fx.Node, view: View) -> View:
    _, dim, start, end, step = t.arguments(node, None, 0, None, None, 1)
    dim %= len(view.axes)
    if any(part.of == "sample" for part in view.axes[dim]) and (start or (end is not None and end < EVERYTHING)):
        raise UnsupportedError("some samples of the batch")
    first = slice(start, None).indices(view.shape[dim])[0]
    return view.sliced(dim, first, shape_of(node)[dim], step)


def selected(t: Translator, node: fx.Node, view: View) -> View:
    _, dim, index = t.arguments(node)
    dim %= len(view.axes)
    return view.selected(dim, index % view.shape[dim])


def expanded(t: Translator, node: fx.Node, view: View) -> View:
    return view.expanded(shape_of(node))


def parts(t: Translator, node: fx.Node) -> tuple[Handle, ...]:
    """``chunk`` and ``split`` of a view."""
    x, _, dim = t.arguments(node, None, None, 0)
    x = activation(x, node)
    view, found, start = t.view_of(x, shape_of(node.args[0])), [], 0
    for part in node.meta["val"]:
        size = part.shape[dim]
        found.append(t.viewed(x.value, view.sliced(dim % len(view.axes), start, size, 1)))
        start += size
    return tuple(found)


def unbind(t: Translator, node: fx.Node) -> tuple[Handle, ...]:
    x, dim = t.arguments(node, None, 0)
    x = activation(x, node)
    view = t.view_of(x, shape_of(node.args[0]))
    dim %= len(view.axes)
    return tuple(t.viewed(x.value, view.selected(dim, i)) for i in range(view.shape[dim]))


def turned_tokens(t: Translator, node: fx.Node) -> Any:
    x = t.arguments(node)[0]
    if isinstance(x, Tokens):
        if len(x.shape) != 2 or x.turned or not t.time_major:
            raise UnsupportedError(f"tokens of shape {x.shape} transposed (node {node.name})")
        return Tokens(x.slot, x.shape, turned=True)
    return or_view(permuted)(t, node)


def item(t: Translator, node: fx.Node) -> Any:
    source, index = t.arguments(node)
    return source[index]


def same(t: Translator, node: fx.Node) -> Any:
    return t.arguments(node)[0]


def gathered(t: Translator, node: fx.Node) -> Handle:
    """``x[samples, steps]`` with all samples and all steps in order: new axes around those of x."""
    x, places = t.arguments(node)
    if isinstance(x, Tokens):
        x = t.numbers(x)
    x = activation(x, node)
    view = t.view_of(x, shape_of(node.args[0]))
    shape = shape_of(node)
    axes: list[tuple[Any, ...]] = [()] * len(shape)
    if len(places) != len(view.axes) or not all(isinstance(each, Tensor) for each in places):
        raise UnsupportedError(f"an index of some axes (node {node.name})")
    for place, each, size in zip(places, view.axes, view.shape, strict=True):
        along = [len(shape) - place.dim() + d for d in range(place.dim()) if place.shape[d] > 1]
        if size == 1 and not along and not place.any():
            along = [len(shape) - place.dim()]
        if len(along) != 1 or not torch.equal(place.flatten(), torch.arange(size)):
            raise UnsupportedError(f"an index that is not all of an axis in order (node {node.name})")
        axes[along[0]] = (*axes[along[0]], *each)
    return t.viewed(x.value, View(tuple(axes)))


def converted(t: Translator, node: fx.Node) -> Any:
    """``to`` another kind of number, where it changes none."""
    x = t.arguments(node)[0]
    after = cast(Tensor, node.meta["val"]).dtype
    if isinstance(x, Tokens):
        if not after.is_floating_point and after is not torch.bool:
            return x
        x = t.numbers(x)
        return t.pointwise(x, node.name, "differs") if after is torch.bool else x
    before = cast(Tensor, cast(fx.Node, node.args[0]).meta["val"]).dtype
    if after is not before and not (before is torch.bool and after is torch.float32):
        raise UnsupportedError(f"a conversion from {before} to {after} (node {node.name})")
    return activation(x, node)


def with_tokens(plain: Translation) -> Translation:
    """Reshapes of tokens that leave their shape."""

    def translate(t: Translator, node: fx.Node) -> Any:
        x = t.arguments(node)[0]
        if isinstance(x, Tokens):
            if shape_of(node) == shape_of(node.args[0]):
                return x
            return _viewed_numbers(t, node, x)
        return plain(t, node)

    return translate


def _viewed_numbers(t: Translator, node: fx.Node, tokens: Tokens) -> Handle:
    x = t.numbers(tokens)
    view = t.view_of(x, tokens.shape)
    changes: dict[Any, Change] = {aten.unsqueeze.default: unsqueezed, aten.expand.default: expanded}
    change = changes.get(node.target)
    if change is None and math.prod(shape_of(node)) == math.prod(tokens.shape) and node.target in _RESHAPES:
        change = reshaped
    if change is None:
        raise UnsupportedError(f"{node.target} of tokens (node {node.name})")
    return t.viewed(x.value, change(t, node, view))


_RESHAPES = (aten.view.default, aten.reshape.default)
