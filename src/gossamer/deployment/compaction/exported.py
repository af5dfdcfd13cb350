"""The graph of a model by ``torch.export``, for models whose own code ``torch.fx`` cannot follow.

What comes back has no layers, only calls of ATen operations with tensors of the model. Here they become layers again,
under the names they had, and the calls that compaction understands, so that the result is an ordinary module of
ordinary layers. Other operations stay what they are. Sizes that the exporter could leave open are open; it says which
ones by its own rules, and a loop over time, say, is written out for the length of the example.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.nn import functional
from torch.utils._pytree import tree_map

from gossamer._forward import arguments, quiet_export
from gossamer.deployment.compaction.expand import write_out
from gossamer.deployment.compaction.functional import simplify, without_writes
from gossamer.deployment.compaction.writes import show_writes

_ATEN = torch.ops.aten

# The same arguments in the same order.
_RENAMED: dict[object, Any] = {
    **{_ATEN.relu.default: torch.relu, _ATEN.gelu.default: functional.gelu, _ATEN.silu.default: functional.silu},
    **{_ATEN.sigmoid.default: torch.sigmoid, _ATEN.tanh.default: torch.tanh, _ATEN.abs.default: torch.abs},
    **{_ATEN.leaky_relu.default: functional.leaky_relu, _ATEN.elu.default: functional.elu},
    **{_ATEN.relu_.default: torch.relu_, _ATEN.relu6.default: functional.relu6, _ATEN.add_.Tensor: operator.iadd},
    **{_ATEN.hardtanh.default: functional.hardtanh, _ATEN.hardswish.default: functional.hardswish},
    **{_ATEN.hardsigmoid.default: functional.hardsigmoid, _ATEN.mish.default: functional.mish},
    **{_ATEN.softplus.default: functional.softplus, _ATEN.neg.default: torch.neg, _ATEN.clamp.default: torch.clamp},
    **{_ATEN.add.Tensor: operator.add, _ATEN.sub.Tensor: operator.sub, _ATEN.mul.Tensor: operator.mul},
    **{_ATEN.cat.default: torch.cat, _ATEN.matmul.default: torch.matmul, _ATEN.softmax.int: torch.softmax},
    **{_ATEN.view.default: torch.reshape, _ATEN.reshape.default: torch.reshape},
    **{_ATEN.flatten.using_ints: torch.flatten, _ATEN.unflatten.int: torch.unflatten},
    **{_ATEN.permute.default: torch.permute, _ATEN.transpose.int: torch.transpose},
    **{_ATEN.unsqueeze.default: torch.unsqueeze, _ATEN.squeeze.dim: torch.squeeze},
    **{_ATEN.mean.dim: torch.mean, _ATEN.amax.default: torch.amax, _ATEN.masked_fill.Scalar: torch.masked_fill},
    **{_ATEN.split.Tensor: torch.split, _ATEN.split_with_sizes.default: torch.split},
    **{_ATEN.chunk.default: torch.chunk, _ATEN.unbind.int: torch.unbind},
    **{_ATEN.max_pool1d.default: functional.max_pool1d, _ATEN.max_pool2d.default: functional.max_pool2d},
    **{_ATEN.avg_pool2d.default: functional.avg_pool2d, _ATEN.pad.default: functional.pad},
    _ATEN.adaptive_avg_pool2d.default: functional.adaptive_avg_pool2d,
    _ATEN.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
}
_METHODS: dict[object, str] = {
    **{_ATEN.contiguous.default: "contiguous", _ATEN.clone.default: "clone", _ATEN.sym_size.int: "size"},
}
_CONVOLUTIONS: dict[object, type[nn.Conv1d | nn.Conv2d | nn.Conv3d]] = {
    **{_ATEN.conv1d.default: nn.Conv1d, _ATEN.conv2d.default: nn.Conv2d, _ATEN.conv3d.default: nn.Conv3d},
    **{_ATEN.conv1d.padding: nn.Conv1d, _ATEN.conv2d.padding: nn.Conv2d, _ATEN.conv3d.padding: nn.Conv3d},
}
_TRANSPOSED: dict[object, type[nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d]] = {
    **{_ATEN.conv_transpose1d.default: nn.ConvTranspose1d, _ATEN.conv_transpose2d.input: nn.ConvTranspose2d},
    _ATEN.conv_transpose3d.input: nn.ConvTranspose3d,
}
_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


class StateChangedError(ValueError):
    """The forward pass changes tensors of the model."""


def trace_by_export(model: nn.Module, example_input: object) -> fx.GraphModule:
    """The graph of a model in evaluation mode, of layers where there were layers. Raises what the exporter raises.

    Attention with dead heads is written out first; ``meta["folded"]`` says how many constants moved then.
    """
    written = copy.deepcopy(model)
    folded = write_out(written)
    program = _export(written, example_input)
    exported = _plain_module(program)
    hidden = show_writes(exported, example_input)
    if hidden is not None and hidden.state:
        raise StateChangedError(str(hidden))
    if hidden is not None:
        program = without_writes(program)
        exported = _plain_module(program)
        simplify(exported.graph)
    graph = exported.graph
    for node in list(graph.nodes):
        if node.op == "call_function":
            _translate(exported, node)
    graph.eliminate_dead_code()
    _insist_on_fixed_sizes(graph)
    # A new one: the exporter's own has no modes (train, eval).
    result = fx.GraphModule(exported, graph, type(model).__name__)
    result.meta["folded"] = folded
    return result


def _plain_module(program: ExportedProgram) -> fx.GraphModule:
    found = program.module(check_guards=False)
    assert isinstance(found, fx.GraphModule)
    _insist_on_fixed_sizes(found.graph)
    _write_plainly(found.graph, program)
    return found


def _export(model: nn.Module, example_input: object) -> ExportedProgram:
    """With sizes left open if that is possible; a batch of one would be taken for a fixed size."""
    failure: Exception | None = None
    for positional, named, dims in _attempts(model, *arguments(example_input)):
        try:
            with quiet_export():
                return export(model, positional, named, dynamic_shapes=dims, strict=False)
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _attempts(
    model: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    twice, twice_named = tree_map(_doubled, (positional, named))
    bound = inspect.signature(model.forward).bind(*positional, **named).arguments
    if all(isinstance(value, Tensor | int | float | bool | None) for value in _leaves(bound.values())):
        dims: dict[str, Any] = {name: _open_all(value) for name, value in bound.items()}
        yield twice, twice_named, dims
        yield positional, named, dims
    yield positional, named, None


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """The values of arguments, one by one where a model takes any number of them (``*inputs``)."""
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def _doubled(value: Any) -> Any:
    return torch.cat((value, value)) if isinstance(value, Tensor) and value.ndim and value.shape[0] == 1 else value


def _open_all(value: Any) -> Any:
    return tuple(map(_open, value)) if isinstance(value, tuple) else _open(value)


def _open(value: Any) -> dict[int, Any] | None:
    """The batch and, of sequences, their length. Not the sides of pictures: to reason about them takes minutes."""
    if not isinstance(value, Tensor):
        return None
    return dict.fromkeys(range(min(value.ndim, 2 if value.ndim < 4 else 1)), Dim.AUTO)


def _insist_on_fixed_sizes(graph: fx.Graph) -> None:
    """Where batch or length could not be left open, another one is refused: outputs would be wrong, or memory torn."""
    inputs = [node for node in graph.nodes if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)]
    fixed = [(node, axis, node.meta["val"].shape[axis]) for node in inputs for axis in _open(node.meta["val"]) or ()]
    with graph.inserting_before(next(node for node in graph.nodes if node.op.startswith(("call", "output")))):
        for node, axis, size in fixed:
            if is_concrete_int(size):  # a number, or a symbol that turned out to be one
                same = graph.call_function(operator.eq, (graph.call_method("size", (node, axis)), int(size)))
                told = f"expected {size} at dimension {axis} of {node.name}, the only size that could be traced"
                graph.call_function(torch._assert, (same, f"{told}; compact with an example of the size you need"))


def _write_plainly(graph: fx.Graph, program: ExportedProgram) -> None:
    """A signature of plain arguments and a plain result, where the model has these."""
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


def _translate(module: fx.GraphModule, node: fx.Node) -> None:
    if node.target is _ATEN.dropout.default and node.args[2] is False:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        module.graph.erase_node(node)
    elif node.target in _METHODS:
        node.op, node.target = "call_method", _METHODS[node.target]
    elif node.target in _RENAMED and not (node.target in (_ATEN.add.Tensor, _ATEN.sub.Tensor) and node.kwargs):
        node.target = _RENAMED[node.target]
    elif node.target is _ATEN.select.int and isinstance(node.args[1], int) and node.args[1] >= 0:
        x, dim, index = node.args
        node.target, node.args = operator.getitem, (x, (*[slice(None)] * dim, index))  # type: ignore[operator]
    elif node.target is _ATEN.slice.Tensor and isinstance(node.args[1], int) and node.args[1] >= 0 and not node.kwargs:
        x, dim, start, end, step = (*node.args, None, None, None)[:5]
        place = slice(start, end, step)
        node.target, node.args = operator.getitem, (x, (*[slice(None)] * dim, place))  # type: ignore[operator]
    else:
        _to_layer(module, node)


def _to_layer(module: fx.GraphModule, node: fx.Node) -> None:
    """Make a call with tensors of one layer a call of that layer, under its name."""
    call = _layer_call(node)
    owner = None if call is None or node.kwargs else _owner(call.tensors)
    if call is None or owner is None or not isinstance(call.source, fx.Node):
        return
    found = {name: _value(module, str(each.target)) for name, each in call.tensors.items() if isinstance(each, fx.Node)}
    path, _, last = owner.rpartition(".")
    setattr(module.get_submodule(path), last, call.build(found).eval())
    node.op, node.target, node.args = "call_module", owner, (call.source,)


@dataclass(frozen=True)
class _LayerCall:
    """What a layer is applied to, its tensors by name, and how it is built from them."""

    source: Any
    tensors: dict[str, Any]
    build: Callable[[dict[str, Tensor]], nn.Module]


def _layer_call(node: fx.Node) -> _LayerCall | None:
    args: list[Any] = [*node.args, None, None]
    if node.target is _ATEN.linear.default:
        return _LayerCall(args[0], {"weight": args[1], "bias": args[2]}, _linear)
    if node.target in _CONVOLUTIONS or node.target in _TRANSPOSED:
        build = partial(_convolution, node.target, list(node.args[3:]))
        return _LayerCall(args[0], {"weight": args[1], "bias": args[2]}, build)
    if node.target is _ATEN.batch_norm.default and args[5] is False and args[3] is not None:
        names = ("weight", "bias", "running_mean", "running_var")
        build = partial(_norm, _NORMS[len(node.meta["val"].shape)], args[6], args[7])
        return _LayerCall(args[0], dict(zip(names, args[1:5], strict=True)), build)
    if node.target is _ATEN.embedding.default:
        return _LayerCall(args[1], {"weight": args[0]}, partial(_embedding, -1 if args[2] is None else args[2]))
    return None


def _owner(given: dict[str, Any]) -> str | None:
    """The layer that all these tensors belong to, under these very names, and that nothing else uses."""
    owners = set()
    for name, each in given.items():
        if each is None:
            continue
        if not isinstance(each, fx.Node) or each.op != "get_attr" or len(each.users) != 1:
            return None
        path, _, last = str(each.target).rpartition(".")
        if last != name or not path:
            return None
        owners.add(path)
    return owners.pop() if len(owners) == 1 else None


def _value(module: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    value = getattr(module.get_submodule(path), last)
    assert isinstance(value, Tensor)
    return value


def _filled(layer: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    for name, tensor in tensors.items():
        setattr(layer, name, tensor)
    return layer


def _linear(tensors: dict[str, Tensor]) -> nn.Module:
    outputs, inputs = tensors["weight"].shape
    return _filled(nn.Linear(inputs, outputs, bias="bias" in tensors, device="meta"), tensors)


def _convolution(target: object, options: list[Any], tensors: dict[str, Tensor]) -> nn.Module:
    weight = tensors["weight"]
    transposed = target in _TRANSPOSED
    order = "stride padding output_padding groups dilation" if transposed else "stride padding dilation groups"
    given = dict(zip(order.split(), options, strict=False))
    shaped = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    groups = given.get("groups", 1)
    inputs, outputs = weight.shape[1] * groups, weight.shape[0]
    if transposed:
        inputs, outputs = weight.shape[0], weight.shape[1] * groups
    kind: Any = _TRANSPOSED[target] if transposed else _CONVOLUTIONS[target]
    layer: nn.Module = kind(inputs, outputs, tuple(weight.shape[2:]), bias="bias" in tensors, device="meta", **shaped)
    return _filled(layer, tensors)


def _norm(kind: type[Any], momentum: Any, eps: Any, tensors: dict[str, Tensor]) -> nn.Module:
    count = len(tensors["running_mean"])
    layer: nn.Module = kind(count, eps=eps, momentum=momentum, affine="weight" in tensors)
    return _filled(layer, tensors)


def _embedding(padding: Any, tensors: dict[str, Tensor]) -> nn.Module:
    rows, width = tensors["weight"].shape
    return _filled(nn.Embedding(rows, width, None if padding == -1 else padding, device="meta"), tensors)
