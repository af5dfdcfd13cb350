"""Activations that are written out in a graph, as the one call that they are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.fx.subgraph_rewriter import replace_pattern_with_filters

aten = torch.ops.aten


def recognise(module: fx.GraphModule) -> None:
    """Replace GELU by tanh, as GPT-2 writes it, by ``gelu``."""
    for match in replace_pattern_with_filters(module, _written_gelu(), _gelu()):
        source: Any = match.nodes_map[next(n for n in match.nodes_map if n.op == "placeholder")]
        for node in match.replacements:
            node.meta.update(source.meta)


def _graph(make: Any) -> fx.Graph:
    graph = fx.Graph()
    graph.output(make(graph, graph.placeholder("x")))
    return graph


def _written_gelu() -> fx.Graph:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))"""

    def make(graph: fx.Graph, x: fx.Node) -> fx.Node:
        half = graph.call_function(aten.mul.Tensor, (x, 0.5))
        cube = graph.call_function(aten.pow.Tensor_Scalar, (x, 3.0))
        more = graph.call_function(aten.mul.Tensor, (cube, 0.044715))
        total = graph.call_function(aten.add.Tensor, (x, more))
        inner = graph.call_function(aten.mul.Tensor, (total, math.sqrt(2.0 / math.pi)))
        one_more = graph.call_function(aten.add.Tensor, (graph.call_function(aten.tanh.default, (inner,)), 1.0))
        return graph.call_function(aten.mul.Tensor, (half, one_more))

    return _graph(make)


def _gelu() -> fx.Graph:
    return _graph(lambda graph, x: graph.call_function(aten.gelu.default, (x,), {"approximate": "tanh"}))
