"""Reshapes: flattening, views, and splitting features into attention heads.

Flattening turns a feature of an image into one feature per pixel, which are removed together. Splitting into heads
joins the features of a head, which are also removed together; merging the heads separates them again.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, fx

from gossamer.deployment.compaction.analysis import Analysis
from gossamer.deployment.compaction.groups import Features
from gossamer.deployment.compaction.nodes import shape
from gossamer.deployment.graph import aten

RESHAPES = (aten.flatten.using_ints, aten.unflatten.int, aten.reshape.default)


class Reshape:
    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        source, before, after = analysis.of(node.args[0]), shape(cast(fx.Node, node.args[0])), shape(node)
        if source is None or not before or after is None:
            return None
        form, sizes = _form(len(before) + source.dim, before, after), _sizes(node)
        if form is None:
            return None
        dim = {"second": 1 - len(after), "heads": -2, "stacked": -2}.get(form, -1)
        if form != "flat" and sizes and not _can_change(node, sizes, len(after) + dim, len(after)):
            return None
        if form in ("heads", "stacked"):
            return _into_heads(analysis, source, after[-2], 3 if form == "stacked" else 1)
        repeats = {"flat": math.prod(before[2:]), "merged": before[-1]}.get(form, 1)
        return Features(dim, source.ids.repeat_interleave(repeats), source.constant.repeat_interleave(repeats))

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        source = analysis.of(node.args[0])
        assert source is not None
        if source.count > needed.numel():  # into heads: all features of a needed head
            heads = needed.numel()
            size = cast(tuple[int, ...], shape(node))[-1]
            analysis.read(node.args[0], needed.repeat_interleave(size).repeat(source.count // (heads * size)))
        else:
            analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        kept, sizes = analysis.kept(node), _sizes(node)
        features, after = analysis.features[node], shape(node)
        assert kept is not None
        assert after is not None
        if kept.all() or not sizes:
            return
        if len(after) == 2 and features.dim == -1:
            sizes = [sizes[0], -1] if sizes[0] != -1 else [-1, int(kept.sum())]
        else:
            place = len(sizes) + features.dim
            sizes[place] = _new_size(sizes[place], int(kept.sum()))
        node.args = (*node.args[:-1], sizes)


def _form(axis: int, before: tuple[int, ...], after: tuple[int, ...]) -> str | None:
    """The effect of a reshape on the feature axis; None if it does not preserve features."""
    if axis == 1 and len(after) == 2 and after[0] == before[0]:
        return "flat"
    if axis == 1 and len(after) > 2 and after[:2] == before[:2]:
        return "second"
    last = axis == len(before) - 1
    if last and after[-1] == before[-1]:
        return "last"
    if last and after[:-2] == before[:-1]:
        return "heads"
    if last and len(after) > 2 and after[:-3] == before[:-1] and after[-3] == 3:
        return "stacked"  # queries, keys and values of all heads
    if axis == len(before) - 2 and after[:-1] == before[:-2]:
        return "merged"
    return None


def _into_heads(analysis: Analysis, source: Features, heads: int, parts: int) -> Features:
    """Join the features of each head; a head is constant if all its features are the same constant.

    Queries, keys and values may be stacked in front of the axis of heads: these three ``parts`` of a head are joined.
    """
    places = torch.arange(source.count).view(parts, heads, -1).transpose(0, 1).reshape(heads, -1)
    for head in places:
        analysis.groups.join(source.ids[head[:1]].expand(len(head)), source.ids[head])
    values = source.constant[places]
    same = (values == values[:, :1]).all(1)
    return Features(-2, source.ids[places[:, 0]], values[:, 0].where(same, torch.nan))


def _can_change(node: fx.Node, sizes: list[Any], place: int, dims: int) -> bool:
    """Whether the call can be given fewer features: by a number, or by -1 if no other size is -1."""
    if node.target is aten.unflatten.int:
        place += len(sizes) - dims
    elif len(sizes) != dims:
        return False
    return isinstance(sizes[place], int) or -1 not in sizes


def _new_size(size: Any, count: int) -> int:
    return -1 if size == -1 or not isinstance(size, int) else count


def _sizes(node: fx.Node) -> list[Any]:
    """The sizes of a reshape call; none for flattening."""
    return [] if node.target is aten.flatten.using_ints else list(cast(list[Any], node.args[-1]))
