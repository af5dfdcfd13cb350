"""One graph of a model, shared by compaction, the runtime and the exporters.

``trace`` runs ``torch.export`` once, in evaluation mode. ``Graph.program`` is the result, for exporters.
``Graph.module`` is the same network in normal form, as a module of ATen calls: tensors of the model are ``get_attr``
nodes under the names they have in the model, every call knows the path of the module that made it, nothing is written
in place, and calls that do nothing in evaluation mode are removed.
"""

from __future__ import annotations

import inspect
import logging
import operator
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._decomp import decomposition_table
from torch.export import Dim, ExportedProgram, export
from torch.utils._pytree import tree_map

from gossamer.forward import arguments, undisturbed

aten = torch.ops.aten
RECURRENT_CALLS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
_END = 2**63 - 1  # of an open slice
_TORCH, _HERE = (f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))


class UntraceableError(ValueError):
    """``torch.export`` cannot trace the forward pass of a model, or the forward pass changes the model."""


class Graph:
    """The graph of a model from ``torch.export``. It shares the tensors of the model."""

    def __init__(self, program: ExportedProgram, name: str) -> None:
        self.program = program
        self._name = name

    @cached_property
    def module(self) -> fx.GraphModule:
        """The normal form. Raises ``UntraceableError`` if the forward pass reads tensors of the model that it
        changes."""
        module = _unlifted(self.program)
        _fold(module.graph)
        if not _without_writes(module.graph):
            _fold(self.program.graph)  # otherwise dropout in evaluation mode would count as a copy
            self.program.graph_module.recompile()
            try:
                with quiet_export(), _any_length():
                    module = _unlifted(self.program.run_decompositions({}))
            except Exception as error:
                raise _untraceable(self._name, error) from error
        changed = _without_updates(module.graph)
        if changed is not None:
            raise UntraceableError(
                f"expected a forward pass that leaves the model as it is, but in {self._name} {self._place(changed)}"
                f"its own tensor {changed}, which it reads, is changed. The model is left as it is; keep the forward "
                "pass from changing it in evaluation mode (if self.training: ...)"
            )
        _restore(module.graph)
        _fold(module.graph)
        remove_unused(module.graph)
        return module

    def _place(self, tensor: str) -> str:
        """File, line and code of the first call that writes to a tensor of the model, as far as the tracer recorded
        them."""
        calls = [node for node in _unlifted(self.program).graph.nodes if _writes(node)]
        trace = next((call.stack_trace or "" for call in calls if _root(call).target == tensor), "")
        frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]+\n\s*([^\n]+)', trace)
        own = [frame for frame in frames if not frame[0].startswith((_TORCH, _HERE))]
        return "at {}, line {}, by {!r}, ".format(*own[-1]) if own else ""


def trace(model: nn.Module, example_input: object, *, dynamic_shapes: Any = None) -> Graph:
    """The graph of a model, for inputs with the shapes of the example except for ``dynamic_shapes`` (as in
    ``torch.export``)."""
    try:
        return Graph(_export(model, *arguments(example_input), dynamic_shapes), type(model).__name__)
    except Exception as error:
        raise _untraceable(type(model).__name__, error) from error


def trace_any_size(model: nn.Module, example_input: object) -> Graph:
    """The graph of a model with a dynamic batch and, for sequences, as many other dynamic sizes as possible."""
    failure: Exception | None = None
    for positional, named, dims in _attempts(model, *arguments(example_input)):
        try:
            return Graph(_export(model, positional, named, dims), type(model).__name__)
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise _untraceable(type(model).__name__, failure) from failure


def remove_unused(graph: fx.Graph) -> None:
    """Remove calls with unused results, also attention, which counts as random because of its dropout."""
    graph.eliminate_dead_code(
        lambda node: node.is_impure() and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
    )


def module_path(node: fx.Node) -> str:
    """The path of the module whose forward pass made a call."""
    stack = list((node.meta.get("nn_module_stack") or {"": ("", "")}).values())
    return str(stack[-1][0]).partition("@")[0]


def _untraceable(name: str, error: Exception) -> UntraceableError:
    message = " ".join((str(error).strip() or repr(error)).split())[:200]
    return UntraceableError(
        f"expected a model that torch.export can trace, but for {name} it reports: {message}. The model is "
        "not changed. Usual causes are branches or loops that depend on the values of tensors; use the traceable "
        "parts one by one"
    )


def _export(
    model: nn.Module, positional: tuple[Any, ...], named: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    with undisturbed(model), quiet_export(), _no_fast_path(), _any_length():
        return export(model, positional, named, dynamic_shapes=dynamic_shapes, strict=False)


def _attempts(
    model: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Inputs and dynamic sizes to try. A batch of one would be treated as a fixed size."""
    twice, twice_named = tree_map(_doubled, (positional, named))
    bound = inspect.signature(model.forward).bind(*positional, **named).arguments
    if all(isinstance(value, Tensor | int | float | bool | None) for value in _leaves(bound.values())):
        dims: dict[str, Any] = {name: _open(value) for name, value in bound.items()}
        yield twice, twice_named, dims
        yield positional, named, dims
    yield positional, named, None


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """The values of arguments, one by one if a model takes any number of them (``*inputs``)."""
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def _doubled(value: Any) -> Any:
    return torch.cat((value, value)) if isinstance(value, Tensor) and value.ndim and value.shape[0] == 1 else value


def _open(value: Any) -> Any:
    """All axes; for images only the batch, because symbolic image sizes make tracing several times slower."""
    if isinstance(value, tuple):
        return tuple(map(_open, value))
    if not isinstance(value, Tensor):
        return None
    return dict.fromkeys(range(value.ndim if value.ndim < 4 else 1), Dim.AUTO)


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Disable the fused attention kernel of evaluation mode, which reads the values of its input."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silence ``torch.export``: it warns of its own handling of some layers, logs a line, and prints half a graph
    before it raises. The error alone has all the information."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = disabled


@contextmanager
def _any_length() -> Iterator[None]:
    """Allow a dynamic number of steps in recurrent layers: torch infers the shape of their result by running all steps,
    which fixes their number."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(decomposition_table, dict.fromkeys(RECURRENT_CALLS, _recurrent_shapes)))
        for call in RECURRENT_CALLS:
            stack.enter_context(patch.dict(call.py_kernels, dict.fromkeys(call.py_kernels, _recurrent_shapes)))
            stack.enter_context(patch.dict(call._dispatch_cache, clear=True))
        yield


def _recurrent_shapes(x: Tensor, state: Any, weights: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
    """Tensors with the shapes of the result of a recurrent layer."""
    states, bidirectional = state if isinstance(state, list | tuple) else [state], options[4]
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    return (x.new_empty(*x.shape[:-1], width), *(torch.empty_like(each) for each in states))


def _unlifted(program: ExportedProgram) -> fx.GraphModule:
    found = program.module(check_guards=False)
    assert isinstance(found, fx.GraphModule)
    return found


def _without_writes(graph: fx.Graph) -> bool:
    """Replace in-place calls by out-of-place ones, and update later readers. Returns False if a part, a view or a
    tensor of the model is written."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    owners: dict[fx.Node, fx.Node] = {}  # of the memory of a view
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        owner = owners.get(source, source)
        if _writes(node):
            plain = _out_of_place(node)
            views = [view for view in graph.nodes if owners.get(view) is source]
            is_seen = any(order[user] > order[node] for view in views for user in view.users)
            if plain is None or owner is not source or source.op == "get_attr" or is_seen:
                return False
            node.target = plain
            for user in [user for user in source.users if order[user] > order[node]]:
                user.replace_input_with(source, node)
        elif _is_view(node) or (node.target is operator.getitem and source in owners):
            owners[node] = owner
    return True


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    """Whether the result may share the memory of the first argument: views, and dropout in evaluation mode."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return "dropout" in schema.name or any(each.alias_info is not None for each in schema.returns)


def _out_of_place(node: fx.Node) -> Any:
    """The out-of-place form of a call, or None."""
    assert isinstance(node.target, torch._ops.OpOverload)
    name, overload = node.target._schema.name.partition("::")[2], node.target._overloadname
    plain = getattr(aten, name.removesuffix("_"), None)
    return getattr(plain, overload, None) if name.endswith("_") else None


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory a call reads or writes through views."""
    while node.args and isinstance(node.args[0], fx.Node) and (_is_view(node) or node.target is operator.getitem):
        node = node.args[0]
    return node


def _without_updates(graph: fx.Graph) -> str | None:
    """Remove writes to inputs and to tensors of the model that are not read. Returns the name of a written tensor that
    is read, if any."""
    updates = [node for node in graph.nodes if node.target is aten.copy_.default]
    written = [node.args[0] for node in updates]
    for node in updates:
        graph.erase_node(node)
    remove_unused(graph)
    changed = [each for each in written if isinstance(each, fx.Node) and each.op == "get_attr" and each.users]
    return str(changed[0].target) if changed else None


def _fold(graph: fx.Graph) -> None:
    """Remove calls whose result is their input. Outputs of an exported program have fixed names and are kept."""
    for node in list(graph.nodes):
        if _does_nothing(node) and not any(user.op == "output" for user in node.users):
            _replace(graph, node, node.args[0])


def _does_nothing(node: fx.Node) -> bool:
    if node.target in (aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default):
        given = bound(node)
        return not (given["p"] and given["train"])
    if node.target is aten.slice.Tensor:
        given = bound(node)
        return given["start"] in (0, None) and given["end"] in (None, _END) and bool(given["step"] == 1)
    return node.target in (aten.detach.default, aten.alias.default)


def _restore(graph: fx.Graph) -> None:
    """Undo the renamings and additions of functionalisation. Views become reshapes, which differ only if memory is
    written."""
    for node in list(graph.nodes):
        if node.target is aten._native_batch_norm_legit_no_training.default:
            _restore_batch_norm(graph, node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target is aten.slice_scatter.default:
            _restore_concatenation(graph, node)
        elif node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target is aten.copy.default and _same_shape(node.args[0], node.args[1]):
            _replace(graph, node, node.args[1])
        elif node.target is aten.lift_fresh_copy.default:
            _replace(graph, node, node.args[0])


def _same_shape(left: Any, right: Any) -> bool:
    """Compare by name, because comparing the values of symbols would specialise them."""
    return [str(size) for size in shape_of(left)] == [str(size) for size in shape_of(right)]


def _restore_batch_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a batch norm with three results by one with a single result."""
    items = list(node.users)
    if any(item.target is not operator.getitem or item.args[1] != 0 for item in items):
        return
    node.target = aten.batch_norm.default
    node.args = (*node.args[:5], False, *node.args[5:], False)
    node.meta["val"] = node.meta["val"][0]
    for item in items:
        _replace(graph, item, node)


def _restore_concatenation(graph: fx.Graph, node: fx.Node) -> None:
    """Replace the insertion of a part by a concatenation of what precedes it, the part, and what follows."""
    given = bound(node)
    x, new, dim, start, end = (given[name] for name in ("self", "src", "dim", "start", "end"))
    size = shape_of(x)[dim]
    if given["step"] != 1 or not all(isinstance(each, int | None) for each in (start, end, size)):
        return
    start, end, _ = slice(start, end).indices(size)
    end = max(start, end)
    with graph.inserting_before(node):
        pieces = [_slice(graph, x, dim, first, last) for first, last in ((0, start), (end, size)) if first < last]
        pieces.insert(int(start > 0), new)
        node.target, node.args, node.kwargs = aten.cat.default, (pieces, dim), {}
    if len(pieces) == 1:
        _replace(graph, node, new)


def _slice(graph: fx.Graph, x: Any, dim: Any, first: int, last: int) -> fx.Node:
    part = graph.call_function(aten.slice.Tensor, (x, dim, first, last))
    part.meta["val"] = aten.slice.Tensor(x.meta["val"], dim, first, last)
    return part


def _replace(graph: fx.Graph, node: fx.Node, other: Any) -> None:
    other.meta.setdefault("val", node.meta["val"])
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def shape_of(node: Any) -> tuple[Any, ...]:
    """The shape of the traced result of a call; dynamic sizes are symbols."""
    return tuple(node.meta["val"].shape)


def bound(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, including defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    expected = node.target._schema.arguments
    defaults = {each.name: each.default_value for each in expected if each.has_default_value()}
    return {**defaults, **dict(zip((each.name for each in expected), node.args, strict=False)), **node.kwargs}
