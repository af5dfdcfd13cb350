"""The rules for the calls of a graph."""

from __future__ import annotations

import operator
from collections import Counter

from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from gossamer.deployment.compaction import heads, reshapes, shapes
from gossamer.deployment.compaction.analysis import Rule
from gossamer.deployment.compaction.grouped import Grouped
from gossamer.deployment.compaction.layers import Attribute, Embedded, Normalised, Weighted
from gossamer.deployment.compaction.pointwise import Pointwise, is_pointwise
from gossamer.deployment.compaction.recurrent import Item, Recurrent
from gossamer.deployment.graph import aten

_MODULES: dict[type[nn.Module], Rule] = {
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), Weighted()),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), Weighted()),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), Normalised()),
    nn.Embedding: Embedded(),
}
_CALLS: dict[object, Rule] = {
    **dict.fromkeys(shapes.POOLS, shapes.Pool()),
    **dict.fromkeys(shapes.REDUCTIONS, shapes.Reduction()),
    **dict.fromkeys(shapes.CONCATENATIONS, shapes.Concatenation()),
    **dict.fromkeys(shapes.MOVES, shapes.Move()),
    **dict.fromkeys(shapes.NEW_AXES, shapes.NewAxis()),
    **dict.fromkeys(shapes.PICKS, shapes.Pick()),
    **dict.fromkeys(shapes.PADS, shapes.Padding()),
    **dict.fromkeys(reshapes.RESHAPES, reshapes.Reshape()),
    **dict.fromkeys((*heads.SPLITS, aten.unbind.int), heads.Parts()),
    aten.matmul.default: heads.MatrixProduct(),
    aten.softmax.int: heads.Softmax(),
    aten.scaled_dot_product_attention.default: heads.Attended(),
    operator.getitem: Item(),
}
_POINTWISE = Pointwise()


def rules_of(graph_module: fx.GraphModule) -> dict[fx.Node, Rule]:
    """The rule of every supported call."""
    obstacles = obstacles_of(graph_module)
    uses = _uses(graph_module)
    found: dict[fx.Node, Rule] = {}
    for node in graph_module.graph.nodes:
        rule: Rule | None = None
        if node.op == "call_module":
            rule = None if node.target in obstacles else _rule_of_module(graph_module.get_submodule(node.target))
        elif node.op == "get_attr":
            value = _tensor_of(graph_module, node)
            rule = Attribute() if value is not None and uses[id(value)] == 1 else None
        elif node.op == "call_function":
            rule = _POINTWISE if is_pointwise(node.target) else _CALLS.get(node.target)
        if rule is not None:
            found[node] = rule
    return found


def obstacles_of(graph_module: fx.GraphModule) -> dict[str, str]:
    """Layers that cannot be changed because of their uses, with reasons, by name.

    A feature that one use of a layer or tensor does not need, another may need.
    """
    called = _called(graph_module)
    calls, uses = Counter(id(module) for _, module in called), _uses(graph_module)
    found: dict[str, str] = {}
    for name, module in called:
        tensors = _tensors(module)
        if tensors and calls[id(module)] > 1:
            found[name] = "it is called more than once"
        elif any(uses[id(tensor)] > 1 for tensor in tensors):
            found[name] = "it shares a tensor with another"
    return found


def _called(graph_module: fx.GraphModule) -> list[tuple[str, nn.Module]]:
    """The called module of every module call, with its name."""
    names = [str(node.target) for node in graph_module.graph.nodes if node.op == "call_module"]
    return [(name, graph_module.get_submodule(name)) for name in names]


def _uses(graph_module: fx.GraphModule) -> Counter[int]:
    """The number of layers and calls that read a tensor."""
    modules = {id(module): module for _, module in _called(graph_module)}
    uses = Counter(id(tensor) for module in modules.values() for tensor in _tensors(module))
    values = (_tensor_of(graph_module, node) for node in graph_module.graph.nodes)
    uses.update(id(value) for value in values if value is not None)
    return uses


def _rule_of_module(module: nn.Module) -> Rule | None:
    if type(module) in (nn.LSTM, nn.GRU, nn.RNN):
        return Recurrent()
    if type(module) in _MODULES and isinstance(module, _ConvNd) and module.groups > 1:
        return Grouped()
    return _MODULES.get(type(module))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _tensor_of(graph_module: fx.GraphModule, node: fx.Node) -> Tensor | None:
    """The tensor that a get_attr node reads."""
    if node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    value = getattr(graph_module.get_submodule(owner), name)
    return value if isinstance(value, Tensor) else None
