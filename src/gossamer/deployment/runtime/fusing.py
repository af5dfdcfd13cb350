"""Fusion: operations are folded into the product before or after them.

Normalisation, scales, additions and ReLU become part of the product (or element-wise operation) that computes their
input. A scale before a product becomes part of its weights; a shift does not, because a padded window reads zeros
without the shift. Copies of copies become one. Element-wise operations are moved before an upsampling.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gossamer.deployment.runtime.network import (
    Affine,
    Floats,
    Network,
    Normalise,
    Operation,
    Product,
    Recurrent,
    Spread,
    Value,
    reads,
    writes,
)


def fuse(graph: Network) -> Network:
    """The graph after all possible fusions."""
    operations, values = list(graph.operations), list(graph.values)
    changed = True
    while changed:
        needed = set(graph.outputs).union(*(reads(operation) for operation in operations))
        operations = [op for op in operations if not needed.isdisjoint(writes(op))]
        changed = _fold_once(operations, values, graph.outputs)
    return replace(graph, operations=operations, values=values)


def _fold_once(operations: list[Operation], values: list[Value], outputs: tuple[int, ...]) -> bool:
    """Fold the first possible operation. Returns whether there was one."""
    uses = np.zeros(len(values), np.int64)
    for operation in operations:
        for x in reads(operation):
            uses[x] += 1
    for y in outputs:
        uses[y] += 1
    producer = {op.y: i for i, op in enumerate(operations) if not isinstance(op, Recurrent)}
    for place, operation in enumerate(operations):
        for candidate in _orders(operation):
            before = producer.get(candidate.x)
            if before is None or uses[candidate.x] != 1:
                continue
            first = operations[before]
            if isinstance(first, Spread):
                if isinstance(candidate, Affine) and candidate.add is None:
                    values[candidate.x] = values[first.x]
                    operations[before] = _before(first, candidate)
                    operations[place] = replace(first, x=candidate.x, y=candidate.y)
                    return True
                continue
            merged = _merge(first, candidate, values)
            if merged is not None:
                # At the later position, where its addend has been computed.
                operations[place] = merged
                del operations[before]
                return True
    return False


def _orders(operation: Operation) -> list[Affine | Product]:
    """The ways to treat an operation as a function of one earlier value."""
    if isinstance(operation, Product):
        return [operation]
    if not isinstance(operation, Affine):
        return []
    if operation.add is None or operation.scale is not None or operation.add == operation.x:
        return [operation]
    return [operation, replace(operation, x=operation.add, add=operation.x)]


def _merge(first: Operation, second: Affine | Product, values: list[Value]) -> Product | Affine | Normalise | None:
    if isinstance(second, Product):
        return _into_inputs(first, second, values)
    if not isinstance(first, Product | Affine | Normalise) or first.relu:
        return None
    if first.add is not None and (second.add is not None or second.scale is not None):
        return None
    add = first.add if second.add is None else second.add
    if isinstance(first, Product):
        taps = first.taps if second.scale is None else first.taps.scaled(second.scale)
        bias = _after(first.bias, second)
        return replace(first, y=second.y, taps=taps, bias=bias, add=add, relu=second.relu)
    scale = second.scale if first.scale is None else first.scale
    if first.scale is not None and second.scale is not None:
        scale = first.scale * second.scale
    shift = second.shift if first.shift is None else _after(first.shift, second)
    return replace(first, y=second.y, scale=scale, shift=shift, add=add, relu=second.relu)


def _after(shift: Floats, second: Affine) -> Floats:
    """The combined shift of an operation and a following scale and shift."""
    scaled = shift * (1 if second.scale is None else second.scale)
    return (scaled + (0 if second.shift is None else second.shift)).astype(np.float32)


def _into_inputs(first: Operation, second: Product, values: list[Value]) -> Product | None:
    """A product of the result of a copy or scale, as a product of the input of that copy or scale."""
    if isinstance(first, Product) and first.copies and second.copies and _inside(second, values):
        return _compose(first, second)
    if not isinstance(first, Affine) or first.scale is None or first.shift is not None:
        return None
    if first.add is not None or first.relu:
        return None
    weight = second.taps.weight * first.scale[second.taps.channel]
    return replace(second, x=first.x, taps=replace(second.taps, weight=weight))


def _inside(copy: Product, values: list[Value]) -> bool:
    """Whether a copy reads only pixels, and no padding."""
    x, y = values[copy.x], values[copy.y]
    return (y.height - 1) * copy.stride[0] < x.height and (y.width - 1) * copy.stride[1] < x.width


def _compose(first: Product, second: Product) -> Product:
    """Two successive copies of channels or pixels as one: for example a shortcut that subsamples, then pads."""
    source = np.full(first.taps.rows, -1)
    source[first.taps.row] = first.taps.channel
    channel = source[second.taps.channel]
    taps = replace(second.taps, channel=channel).chosen(channel >= 0)
    stride = first.stride[0] * second.stride[0], first.stride[1] * second.stride[1]
    return replace(second, x=first.x, taps=taps, stride=stride)


def _before(spread: Spread, affine: Affine) -> Affine:
    """An element-wise operation before an upsampling instead of after it."""
    repeats = 1 if spread.copies else spread.factor[0] * spread.factor[1]
    scale = None if affine.scale is None else affine.scale.repeat(repeats)
    shift = None if affine.shift is None else affine.shift.repeat(repeats)
    return replace(affine, x=spread.x, y=affine.x, scale=scale, shift=shift)
