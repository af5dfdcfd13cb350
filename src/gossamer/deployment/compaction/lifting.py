"""The shared graph as a module of layers: calls with the tensors of a layer become calls of that layer again.

Layers keep their names and tensors, so the result is an ordinary module whose layers can be made smaller. A layer of a
class derived from a torch layer becomes the torch layer, because the graph has its computation. The same holds for
layers with hooks, whose computation is part of the graph. Other calls do not change.
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

from gossamer.deployment.compaction.nodes import copied
from gossamer.deployment.graph import Graph, aten, bound, module_path, remove_unused, shape_of
from gossamer.forward import arguments, undisturbed


@dataclass(frozen=True)
class _Kind:
    """The layer of a call: the positions of its input and of its tensors among the arguments."""

    layer: Any
    source: int
    tensors: dict[int, str]


_WEIGHT_AND_BIAS = {1: "weight", 2: "bias"}
_STATISTICS = {**_WEIGHT_AND_BIAS, 3: "running_mean", 4: "running_var"}
_KINDS: dict[object, tuple[_Kind, ...]] = {
    aten.linear.default: (_Kind(nn.Linear, 0, _WEIGHT_AND_BIAS),),
    **dict.fromkeys((aten.conv1d.default, aten.conv1d.padding), (_Kind(nn.Conv1d, 0, _WEIGHT_AND_BIAS),)),
    **dict.fromkeys((aten.conv2d.default, aten.conv2d.padding), (_Kind(nn.Conv2d, 0, _WEIGHT_AND_BIAS),)),
    **dict.fromkeys((aten.conv3d.default, aten.conv3d.padding), (_Kind(nn.Conv3d, 0, _WEIGHT_AND_BIAS),)),
    aten.conv_transpose1d.default: (_Kind(nn.ConvTranspose1d, 0, _WEIGHT_AND_BIAS),),
    aten.conv_transpose2d.input: (_Kind(nn.ConvTranspose2d, 0, _WEIGHT_AND_BIAS),),
    aten.conv_transpose3d.input: (_Kind(nn.ConvTranspose3d, 0, _WEIGHT_AND_BIAS),),
    aten.batch_norm.default: tuple(
        _Kind(layer, 0, _STATISTICS) for layer in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    ),
    aten.embedding.default: (_Kind(nn.Embedding, 1, {0: "weight"}),),
}
_RECURRENT: dict[object, Any] = {
    **{aten.lstm.input: nn.LSTM, aten.gru.input: nn.GRU},
    **{aten.rnn_tanh.input: nn.RNN, aten.rnn_relu.input: nn.RNN},
}
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_CONVOLUTION = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")


def to_layers(graph: Graph, model: nn.Module, example_input: object) -> fx.GraphModule:
    """The graph of a model as a module of layers, which shares the model's tensors; ``graph.module`` is used up.

    Inputs of other sizes than traced are refused, except for larger images for which the outputs equal those of the
    model.
    """
    module, layers = graph.module, dict(model.named_modules(remove_duplicate=False))
    calls: dict[str, list[Any]] = {}
    for node in list(module.graph.nodes):
        if node.target in _RECURRENT:
            _lift_recurrent(module, layers, node)
        elif node.target in _KINDS:
            _lift(module, layers, node, calls)
        elif node.target is aten.slice.Tensor:
            _to_parts(module.graph, node)
    _write_plainly(module.graph, graph.program)
    remove_unused(module.graph)
    module.graph._tracer_cls = None  # created by the exporter, and cannot be loaded
    # A new module: that of the exporter has no modes (train, eval).
    found = fx.GraphModule(module, module.graph, type(model).__name__)
    _insist_on_fixed_inputs(found.graph, any_sides=_takes_larger_images(found, model, example_input))
    found.recompile()
    return found.eval()


def _takes_larger_images(module: fx.GraphModule, model: nn.Module, example_input: object) -> bool:
    def larger(value: Any) -> Any:
        is_picture = isinstance(value, Tensor) and value.ndim > 3
        return value.repeat(1, 1, *[2] * (value.ndim - 2)) if is_picture else value

    positional, named = tree_map(larger, copied(arguments(example_input)))
    if not any(isinstance(each, Tensor) and each.ndim > 3 for each in tree_leaves((positional, named))):
        return False
    try:
        with undisturbed(model):
            expected, got = (each(*copied(positional), **copied(named)) for each in (model, module))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3, equal_nan=True)
    except Exception:  # any error of a model for an invalid input
        return False
    return True


def _lift(module: fx.GraphModule, layers: dict[str, nn.Module], node: fx.Node, calls: dict[str, list[Any]]) -> None:
    for path in (module_path(node), _owner(node)):
        for kind in _KINDS[node.target]:
            layer = layers.get(path) if path else None
            if not isinstance(layer, kind.layer) or not _has_these_tensors(module, layer, node, kind):
                continue
            source, rest = node.args[kind.source], [each for each in node.args if not isinstance(each, fx.Node)]
            if calls.setdefault(path, rest) == rest:  # a layer may be called twice, but only in the same way
                module.add_submodule(path, _plain(kind.layer, layer, node))
                node.op, node.target, node.args, node.kwargs = "call_module", path, (source,), {}
            return


def _owner(node: fx.Node) -> str:
    """The module that holds the weight of a call."""
    places = [each for each in node.args[:2] if isinstance(each, fx.Node) and each.op == "get_attr"]
    return str(places[-1].target).rpartition(".")[0] if places else ""


def _has_these_tensors(module: fx.GraphModule, layer: nn.Module, node: fx.Node, kind: _Kind) -> bool:
    if node.kwargs or (node.target is aten.batch_norm.default and node.args[5]):  # statistics of the batch
        return False
    given = dict(enumerate(node.args))
    return all(_value(module, given.get(place)) is getattr(layer, name) for place, name in kind.tensors.items())


def _value(module: fx.GraphModule, node: Any) -> Tensor | None:
    """The tensor of the model behind a node, or None."""
    found = attrgetter(str(node.target))(module) if isinstance(node, fx.Node) and node.op == "get_attr" else None
    return found if isinstance(found, Tensor) else None


def _plain(kind: Any, layer: nn.Module, node: fx.Node) -> nn.Module:
    """A layer of the torch class that is equivalent to the call."""
    found: nn.Module = copy.copy(layer)
    found.__class__ = kind
    found.__dict__.pop("forward", None)
    for name in [name for name in vars(found) if name.endswith("_hooks")]:
        setattr(found, name, OrderedDict())
    if isinstance(found, _ConvNd):
        names = _TRANSPOSED if found.transposed else _CONVOLUTION
        rank = found.weight.ndim - 2
        plain: dict[str, Any] = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
        for name, value in {**plain, **dict(zip(names, node.args[3:], strict=False))}.items():
            spread = (value,) * rank if isinstance(value, int) and name != "groups" else value
            setattr(found, name, tuple(spread) if isinstance(spread, list) else spread)
        found.padding_mode = "zeros"  # any other remains a call
    return found


def _lift_recurrent(module: fx.GraphModule, layers: dict[str, nn.Module], node: fx.Node) -> None:
    """Recurrent layers with zero initial states; their last states are nested differently from those of the call."""
    args: Any = node.args
    path, (x, state, weights, *_) = module_path(node), args
    layer = layers.get(path) if path else None
    states: Any = state if isinstance(state, list | tuple) else [state]
    if not isinstance(layer, _RECURRENT[node.target]) or any(each.target not in _ZEROS for each in states):
        return
    given, own = (
        [_value(module, each) for each in weights],
        [getattr(layer, name) for name in layer._flat_weights_names],
    )
    if len(given) != len(own) or any(one is not other for one, other in zip(given, own, strict=True)):
        return
    module.add_submodule(path, _plain(_RECURRENT[node.target], layer, node))
    node.op, node.target, node.args = "call_module", path, (x,)
    if len(states) > 1:
        for item in [item for item in node.users if item.args[1] != 0]:
            with module.graph.inserting_before(item):
                both = module.graph.call_function(operator.getitem, (node, 1))
            index: Any = item.args[1]
            item.args = (both, index - 1)


def _to_parts(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a slice along an axis of fixed size by a part of a split, in which each part has its own features."""
    given = bound(node)
    x, dim, start, end = (given[name] for name in ("self", "dim", "start", "end"))
    size = shape_of(x)[dim]
    if (
        given["step"] != 1
        or not all(isinstance(each, int | None) for each in (start, end))
        or not isinstance(size, int)
    ):
        return
    first, last, _ = slice(start, end).indices(size)
    sizes = [first, last - first, size - last]
    if first >= last or sizes[1] == size:
        return
    with graph.inserting_before(node):
        split = graph.call_function(aten.split_with_sizes.default, (x, [each for each in sizes if each], dim))
        part = graph.call_function(operator.getitem, (split, int(first > 0)))
        part.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(part)
    graph.erase_node(node)


def _insist_on_fixed_inputs(graph: fx.Graph, *, any_sides: bool) -> None:
    """Refuse other values than those of the example for sizes that are not dynamic, and for numbers and flags: outputs
    would be wrong, or memory corrupted."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(next(node for node in graph.nodes if node.op.startswith(("call", "output")))):
        for node in inputs:
            value = node.meta["val"]
            if isinstance(value, bool | int | float | str | None):
                _insist(graph, node, value, f"{value!r} for {node.name}, the only value")
            elif isinstance(value, Tensor):
                sizes = value.shape[:2] if any_sides and value.ndim > 3 else value.shape
                # A size is fixed if it is a number, or a symbol that was specialised to one.
                for axis, size in [each for each in enumerate(sizes) if is_concrete_int(each[1])]:
                    found = graph.call_method("size", (node, axis))
                    _insist(graph, found, int(size), f"{size} at dimension {axis} of {node.name}, the only size")


def _insist(graph: fx.Graph, found: fx.Node, wanted: Any, expected: str) -> None:
    same = graph.call_function(operator.eq, (found, wanted))
    message = f"expected {expected} that was traced; compact with an example of the one you need"
    graph.call_function(torch._assert, (same, message))


def _write_plainly(graph: fx.Graph, program: ExportedProgram) -> None:
    """Give the graph a signature with plain arguments and a plain result, if the model has one."""
    outputs = program.call_spec.out_spec
    inputs = program.call_spec.in_spec
    if inputs is None or outputs is None:
        return
    flat_inputs = all(leaf.is_leaf() for group in inputs.children() for leaf in group.children())
    flat_output = outputs.is_leaf() or (outputs.type is tuple and all(leaf.is_leaf() for leaf in outputs.children()))
    if not flat_inputs or not flat_output:
        return
    graph.set_codegen(fx.graph.CodeGen())
    if outputs.is_leaf():
        (node,) = [node for node in graph.nodes if node.op == "output"]
        node.args = (node.args[0][0],)
