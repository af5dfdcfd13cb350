"""Shorter sequences than those of the example, for networks whose sequences all have its number of steps.

The network of a shorter sequence has the first pixels of every value, constant and mask. Whether that is what the model
computes for a shorter input is checked by ``deploy``, with the model.
"""

from __future__ import annotations

from dataclasses import replace

from gossamer.deployment.runtime.network import (
    Affine,
    Attention,
    Constant,
    Embed,
    Input,
    Network,
    Normalise,
    Operation,
    Pointwise,
    Pool,
    Product,
    Softmax,
    Source,
    TokenValues,
    UnsupportedError,
    Value,
)

_FORMS = ("tokens", "sequence")


def steps_of(graph: Network) -> int | None:
    """The number of steps of all sequences that are inputs, or None if there are other inputs or numbers."""
    steps = {source.shape[axis_of_steps(graph)] for source in graph.inputs if len(source.shape) > 1}
    return steps.pop() if len(steps) == 1 and all(source.form in _FORMS for source in graph.inputs) else None


def axis_of_steps(graph: Network) -> int:
    return 0 if graph.time_major else 1


def shortened(graph: Network, steps: int) -> Network:
    """The network for fewer steps. Raises ``UnsupportedError`` if it has operations that mix steps, but for attention
    and for pooling over all of them."""
    length = steps_of(graph)
    if length is None or not 0 < steps <= length:
        raise UnsupportedError(f"sequences of {steps} steps instead of {length}")
    if any(value.height > 1 or value.width not in (1, length) for value in graph.values):
        raise UnsupportedError("shorter sequences of a network with several lengths")
    values = [Value(value.channels, 1, min(value.width, steps)) for value in graph.values]
    operations = [_shortened(operation, graph, steps, length) for operation in graph.operations]
    axis = axis_of_steps(graph)
    inputs = tuple(Source(source.form, _with_steps(source.shape, axis, steps)) for source in graph.inputs)
    shapes = []
    for form, shape in zip(graph.forms, graph.shapes, strict=True):
        if form == "sequence" and len(shape) != 3:
            raise UnsupportedError("shorter sequences whose steps and samples share an axis")
        shapes.append(_with_steps(shape, axis, steps) if form == "sequence" else shape)
    return replace(graph, values=values, operations=operations, inputs=inputs, shapes=tuple(shapes))


def _with_steps(shape: tuple[int, ...], axis: int, steps: int) -> tuple[int, ...]:
    return (*shape[:axis], steps, *shape[axis + 1 :])


def _shortened(operation: Operation, graph: Network, steps: int, length: int) -> Operation:
    match operation:
        case Input() | Embed() | TokenValues() | Affine() | Pointwise() | Softmax():
            return operation
        case Normalise() if operation.each_pixel or graph.values[operation.x].pixels == 1:
            return operation
        case Constant():
            return replace(operation, planes=operation.planes[:, :steps])
        case Product() if operation.stride == (1, 1) and operation.padding == (0, 0) and not operation.taps.dy.any():
            one_step = graph.values[operation.y].pixels == 1
            if operation.taps.dx.max(initial=0) < (steps if one_step else 1):
                return operation
        case Pool() if operation.kernel == (1, length) and graph.values[operation.y].pixels == 1:
            return replace(operation, kernel=(1, steps), stride=(1, steps))
        case Attention():
            lengths = min(operation.lengths[0], steps), min(operation.lengths[1], steps)
            mask = operation.mask
            cut = None if mask is None else mask[:, : lengths[1], : lengths[0]].copy()
            return replace(operation, lengths=lengths, mask=cut)
    raise UnsupportedError(f"shorter sequences of a network with {operation.name}")
