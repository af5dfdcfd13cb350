"""An exported graph without writes in place, said in calls that compaction knows.

The exporter can write a change of a part as a new tensor: ``slice_scatter`` gives a tensor with some of its places
replaced. Along any axis that is a concatenation of what was before, the new part, and what is behind; and a slice is
one of the parts of a split. Slices of everything, copies over all of a tensor and the like do nothing and go.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

_ATEN = torch.ops.aten
_END = 2**63 - 1


def without_writes(program: ExportedProgram) -> ExportedProgram:
    """The same with a new tensor for each change; no other call is taken apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about torch
        found = program.run_decompositions({})
    assert isinstance(found, ExportedProgram)
    return found


def simplify(graph: fx.Graph) -> None:
    """Write slices, and tensors with a new part, as splits and concatenations."""
    for node in list(graph.nodes):
        if node.target in (_ATEN.slice.Tensor, _ATEN.slice_scatter.default):
            _slice(graph, node)
        elif node.target is _ATEN.copy.default and _shape(node.args[0]) == _shape(node.args[1]):
            _becomes(graph, node, node.args[1])
        elif node.target is _ATEN._native_batch_norm_legit_no_training.default:
            _batch_norm(graph, node)


def _slice(graph: fx.Graph, node: fx.Node) -> None:
    scatters = node.target is _ATEN.slice_scatter.default
    x, *rest = node.args
    new = rest.pop(0) if scatters else None
    places: list[Any] = [*rest, *(0, None, None, 1)[len(rest) :]]
    dim, start, end, step = places
    sizes = _shape(x)
    if node.kwargs or sizes is None or not isinstance(dim, int) or step != 1:
        return
    if not isinstance(start, int | None) or not isinstance(end, int | None):
        return
    size = sizes[dim]
    if not start and end in (None, _END, size):
        _becomes(graph, node, new if scatters else x)
        return
    if not isinstance(size, int):
        return
    first, last, _ = slice(start, end).indices(size)
    if first >= last:
        return
    with graph.inserting_before(node):
        parts = _parts(graph, x, dim, [first, last - first, size - last])
        result = parts[1]
        if scatters:
            result = graph.call_function(torch.cat, ([each for each in (parts[0], new, parts[2]) if each], dim))
    _becomes(graph, node, result)


def _parts(graph: fx.Graph, x: Any, dim: int, sizes: list[int]) -> list[fx.Node | None]:
    """The parts of a tensor, None for those that are empty."""
    split = graph.call_function(torch.split, (x, [size for size in sizes if size], dim))
    found: list[fx.Node | None] = []
    for size in sizes:
        place = sum(each is not None for each in found)
        found.append(graph.call_function(operator.getitem, (split, place)) if size else None)
    return found


def _batch_norm(graph: fx.Graph, node: fx.Node) -> None:
    """The call as it was before: with one result."""
    x, weight, bias, mean, variance, momentum, eps = node.args
    items = list(node.users)
    if any(item.target is not operator.getitem or item.args[1] != 0 for item in items if item.users):
        return
    node.target = _ATEN.batch_norm.default
    node.args = (x, weight, bias, mean, variance, False, momentum, eps, False)
    node.meta["val"] = node.meta["val"][0]
    for item in items:
        _becomes(graph, item, node)


def _becomes(graph: fx.Graph, node: fx.Node, other: Any) -> None:
    other.meta.setdefault("val", node.meta["val"])
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def _shape(node: Any) -> tuple[Any, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None
