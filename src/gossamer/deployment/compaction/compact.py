"""``compact``: a copy of a sparse model without the features that zero weights have disconnected.

Two kinds of features can be removed: unused ones, whose outgoing weights are all zero, and constant ones, whose
incoming weights are all zero. A constant is folded into the biases that it reaches. The graph of the model is analysed
as a whole, so that additions, concatenations and depth-wise convolutions remain consistent. The analysis is repeated
until nothing changes.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import fx, nn

from gossamer.deployment.compaction.analysis import Analysis
from gossamer.deployment.compaction.expand import write_out
from gossamer.deployment.compaction.lifting import to_layers
from gossamer.deployment.compaction.nodes import copied, measure, shape
from gossamer.deployment.compaction.rows import merge_zero_rows
from gossamer.deployment.compaction.rules import obstacles_of, rules_of
from gossamer.deployment.compaction.summary import (
    Compaction,
    CompactionReport,
    compare,
    kept_features,
    sizes,
    tied_layers,
)
from gossamer.deployment.graph import aten, remove_unused, trace_any_size
from gossamer.forward import check_example
from gossamer.verify import verify


class CompactionError(RuntimeError):
    """The smaller model does not compute the same outputs as the model."""


def compact(model: nn.Module, example_input: object, *, tolerance: float | None = None) -> Compaction:
    """A smaller model with the same outputs, in evaluation mode, and a report of the removed features.

    ``example_input`` is a tensor, a tuple of inputs or a mapping of keyword inputs; the smaller model also
    accepts other batch sizes. The model is not changed. Raises ``UntraceableError`` if ``torch.export`` cannot trace
    it, and ``CompactionError`` if the outputs for the example differ by more than ``tolerance`` times the largest
    output, as they do for a nondeterministic model. None means 1e-4, or more for half precision.
    """
    check_example(model, copied(example_input))
    before, parameters_before = sizes(model), _parameters(model)
    private = copy.deepcopy(model).eval()
    written_out = write_out(private)
    smaller = to_layers(trace_any_size(private, example_input), private, example_input)
    analysis, folded, branches = shrink(smaller, example_input)
    rows = merge_zero_rows(smaller, rules_of(smaller))

    def run(*inputs: Any, **named: Any) -> Any:
        return smaller(*inputs, **named)

    allowed = _rounding(model) if tolerance is None else tolerance
    verification = verify(model, run, example_input=example_input, tolerance=allowed)
    if not verification:
        raise CompactionError(
            f"expected the smaller model of {type(model).__name__} to have the same outputs, got {verification}. "
            "The model is not changed; is its forward pass deterministic?"
        )
    report = CompactionReport(
        layers=compare(before, smaller, tied_layers(model)),
        stayed=kept_features(analysis, obstacles_of(smaller)),
        folded=folded + written_out,
        branches=tuple(branches),
        rows=rows,
        parameters_before=parameters_before,
        parameters_after=_parameters(smaller),
        difference=verification.max_relative,
    )
    return Compaction(smaller, report)


def shrink(graph_module: fx.GraphModule, example_input: object) -> tuple[Analysis, int, list[str]]:
    """Remove dead features from a module of layers, in place. Returns the analysis of the kept features, the number of
    constants folded into biases, and the additions with a constant side."""
    folded, branches = 0, list[str]()
    while True:
        _tidy(graph_module)
        measure(graph_module, example_input)
        analysis = Analysis(graph_module, rules_of(graph_module))
        cut = _cut_constant_branches(graph_module, analysis)
        branches += cut
        if cut:
            continue
        if all(bool(analysis.groups.kept(features.ids).all()) for features in analysis.features.values()):
            return analysis, folded, branches
        analysis.rewrite()
        folded += sum(analysis.folded.values())


def _cut_constant_branches(graph_module: fx.GraphModule, analysis: Analysis) -> list[str]:
    """Replace sides of additions that are entirely constant. Returns the names of these additions."""
    found = []
    for node in list(graph_module.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        for side, other in (node.args, node.args[::-1]):
            features = analysis.of(side)
            constant = features is not None and bool(features.is_constant.all())
            if constant and side.op != "get_attr" and isinstance(other, fx.Node) and shape(other) == shape(node):
                _replace(graph_module, analysis, node, side, other)
                found.append(node.name)
                break
    return found


def _replace(graph_module: fx.GraphModule, analysis: Analysis, node: fx.Node, side: fx.Node, other: fx.Node) -> None:
    features = analysis.features[side]
    if not features.constant.any():
        node.replace_all_uses_with(other)
        graph_module.graph.erase_node(node)
        return
    meta = side.meta["tensor_meta"]
    device = next((each.device for each in graph_module.parameters()), torch.device("cpu"))
    values = features.constant.to(device, meta.dtype).reshape(-1, *(1,) * (-features.dim - 1))
    name = f"constant_{re.sub(r'[^0-9a-zA-Z]', '_', node.name)}"
    graph_module.register_buffer(name, values)
    with graph_module.graph.inserting_before(node):
        node.args = (other, graph_module.graph.get_attr(name))


def _tidy(graph_module: fx.GraphModule) -> None:
    remove_unused(graph_module.graph)
    graph_module.delete_all_unused_submodules()
    called = tuple(f"{node.target}." for node in graph_module.graph.nodes if node.op == "call_module")
    read = {node.target for node in graph_module.graph.nodes if node.op == "get_attr"}
    for name, _ in [*graph_module.named_parameters(), *graph_module.named_buffers()]:
        if name not in read and not name.startswith(called):
            owner, _, last = name.rpartition(".")
            delattr(graph_module.get_submodule(owner), last)
    graph_module.recompile()


def _rounding(model: nn.Module) -> float:
    """A generous bound on the effect of summing in another order."""
    floats = [each.dtype for each in model.parameters() if each.is_floating_point()]
    return max([1e-4, *(16 * torch.finfo(dtype).eps for dtype in floats)])


def _parameters(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())
