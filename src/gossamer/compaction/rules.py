"""Which rule holds for which call of a graph."""

from __future__ import annotations

import operator
from collections import Counter

from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from gossamer.compaction import heads, pointwise, reshapes, shapes
from gossamer.compaction.analysis import Rule
from gossamer.compaction.grouped import Grouped
from gossamer.compaction.layers import Attribute, Embedded, Normalised, Weighted
from gossamer.compaction.recurrent import Item, Recurrent

_MODULES: dict[type[nn.Module], Rule] = {
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), Weighted()),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), Weighted()),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), Normalised()),
    **dict.fromkeys(pointwise.UNARY_MODULES, pointwise.Unary()),
    **dict.fromkeys(shapes.POOL_MODULES, shapes.Pool()),
    nn.Embedding: Embedded(),
    nn.Flatten: reshapes.Reshape(),
    nn.Softmax: heads.Mixed(),
}
_CALLS: dict[object, Rule] = {
    **dict.fromkeys((*pointwise.UNARY_FUNCTIONS, *pointwise.UNARY_METHODS), pointwise.Unary()),
    **dict.fromkeys(pointwise.BINARY, pointwise.Binary()),
    **dict.fromkeys(shapes.POOL_FUNCTIONS, shapes.Pool()),
    **dict.fromkeys(shapes.REDUCTIONS, shapes.Reduction()),
    **dict.fromkeys(reshapes.RESHAPES, reshapes.Reshape()),
    **dict.fromkeys(heads.MATRIX_PRODUCTS, heads.MatrixProduct()),
    **dict.fromkeys((*heads.SOFTMAXES, *heads.FILLS), heads.Mixed()),
    **dict.fromkeys((*heads.SPLITS, *heads.UNBINDS), heads.Parts()),
    **dict.fromkeys(shapes.CONCATENATIONS, shapes.Concatenation()),
    **dict.fromkeys(shapes.MOVES, shapes.Move()),
    **dict.fromkeys(shapes.NEW_AXES, shapes.NewAxis()),
    functional.scaled_dot_product_attention: heads.Attended(),
    functional.pad: shapes.Padding(),
    operator.getitem: Item(),
}


def rules_of(graph_module: fx.GraphModule) -> dict[fx.Node, Rule]:
    """The rule of every call that is understood.

    A layer that is called twice, or shares a tensor with another, is not: what one use can do without, the
    other may need. Nor is one with hooks, of which nobody knows what they do.
    """
    nodes = list(graph_module.graph.nodes)
    called = [graph_module.get_submodule(node.target) for node in nodes if node.op == "call_module"]
    calls = Counter(id(module) for module in called)
    uses = Counter(id(tensor) for module in {id(each): each for each in called}.values() for tensor in _tensors(module))
    uses.update(id(value) for node in nodes if (value := _tensor_of(graph_module, node)) is not None)
    found: dict[fx.Node, Rule] = {}
    for node in nodes:
        rule: Rule | None = None
        if node.op == "call_module":
            module = graph_module.get_submodule(node.target)
            tensors = _tensors(module)
            once = calls[id(module)] == 1 and all(uses[id(tensor)] == 1 for tensor in tensors)
            if (once or not tensors) and not (module._forward_hooks or module._forward_pre_hooks):
                rule = _rule_of_module(module)
        elif node.op == "get_attr":
            value = _tensor_of(graph_module, node)
            rule = Attribute() if value is not None and uses[id(value)] == 1 else None
        elif node.op in ("call_function", "call_method"):
            rule = _CALLS.get(node.target)
        if rule is not None:
            found[node] = rule
    return found


def _rule_of_module(module: nn.Module) -> Rule | None:
    """By exact type: a class derived from a layer may do something else."""
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
