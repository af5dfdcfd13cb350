"""The nodes of a graph: shapes of their tensors, and arguments of their calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import ShapeProp
from torch.utils._pytree import tree_map

from gossamer._forward import arguments


def inputs_of(graph_module: fx.GraphModule, example_input: object) -> list[Any]:
    """What a graph is run on, one value for each of its inputs: copies, since a model may change what it is
    given."""
    positional, named = arguments(example_input)
    values: list[Any] = list(positional)
    for node in [node for node in graph_module.graph.nodes if node.op == "placeholder"][len(positional) :]:
        if node.target in named:
            values.append(named[node.target])
        elif node.args:
            values.append(node.args[0])
        else:
            raise TypeError(f"the model needs an input {node.target!r}; add it to example_input")
    return list(copied(values))


def copied(values: Any) -> Any:
    """Values, however nested, with copies of the tensors."""
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, values)


def measure(graph_module: fx.GraphModule, example_input: object) -> None:
    """Note the shape of every tensor in the graph, by one run."""
    with torch.no_grad():
        ShapeProp(graph_module).propagate(*inputs_of(graph_module, example_input))


def shape(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of the tensor that a node gives; None for anything else than one tensor."""
    meta = node.meta.get("tensor_meta")
    found = getattr(meta, "shape", None)
    return None if found is None else tuple(found)


def constants_like(node: fx.Node, dim: int, constant: Tensor) -> Tensor:
    """A tensor of one position, shaped like the node's, that has the constants along its axis of features."""
    size = shape(node)
    assert size is not None
    dtype = node.meta["tensor_meta"].dtype
    return constant.to(dtype).reshape([-1 if axis == len(size) + dim else 1 for axis in range(len(size))])


def bound(node: fx.Node, *names: str, **defaults: Any) -> dict[str, Any]:
    """The arguments of a call by name, where ``names`` is their order."""
    found = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    return found if set(found) <= {*names, *defaults} and len(node.args) <= len(names) else {}
