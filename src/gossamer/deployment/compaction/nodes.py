"""The nodes of a graph: shapes of their tensors, and arguments of their calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import ShapeProp
from torch.utils._pytree import tree_leaves, tree_map

from gossamer.forward import arguments


def copied(values: Any) -> Any:
    """Nested values with copies of their tensors."""
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, values)


def measure(graph_module: fx.GraphModule, example_input: object) -> None:
    """Record the shape of every tensor in the graph, by one run on copies, as a model may change its inputs."""
    positional, named = copied(arguments(example_input))
    names = [node.target for node in graph_module.graph.nodes if node.op == "placeholder"][len(positional) :]
    plain = len(names) == len(named) and all(name in named for name in names)
    values = [*positional, *(named[name] for name in names)] if plain else tree_leaves((positional, named))
    with torch.no_grad():
        ShapeProp(graph_module).run(*values, enable_io_processing=False)


def shape(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of the result of a node; None if it is not a single tensor."""
    meta = node.meta.get("tensor_meta")
    found = getattr(meta, "shape", None)
    return None if found is None else tuple(found)


def constants_like(node: fx.Node, rank: int, dim: int, constant: Tensor) -> Tensor:
    """A tensor with one position and the dtype of the node, with the constants along its feature axis."""
    dtype = node.meta["tensor_meta"].dtype
    return constant.to(dtype).reshape([-1 if axis == rank + dim else 1 for axis in range(rank)])
