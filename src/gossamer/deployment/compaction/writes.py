"""Writes in place: a graph of calls must show them, so that whoever reads a tensor afterwards reads what was written.

The code of a model may say ``y.relu_()`` and go on with ``y``. In the graph ``y`` is then still what the layer gave,
and nobody reads the result of the call, which looks dead. Here the graph is run once on the example to see which calls
write (tensors count their versions) and which values share memory. Later readers of the same tensor are given the
result of the call. Where they see it in another shape (a part, a view), the write stays hidden; such a graph is of no
use.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from gossamer.deployment.compaction.nodes import inputs_of

_TORCH, _HERE = (f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))


@dataclass(frozen=True)
class HiddenWrite:
    """A call that writes into memory which is read under another name, or which is the model's own."""

    call: str
    name: str
    where: str
    state: bool

    def __str__(self) -> str:
        what = f"its own tensor {self.name}" if self.state else f"a part or a view of {self.name}"
        place = f" ({self.where})" if self.where else ""
        return f"{self.call}{place} changes {what} in place, which is read afterwards"


def show_writes(graph_module: fx.GraphModule, example_input: object) -> HiddenWrite | None:
    """Change the graph so that every write is shown by who reads it; gives the first that cannot be."""
    watch = _Watch(graph_module)
    with torch.no_grad():
        watch.run(*inputs_of(graph_module, example_input))
    nodes = list(graph_module.graph.nodes)
    order = {node: place for place, node in enumerate(nodes)}
    own = {_memory(each) for each in (*graph_module.parameters(), *graph_module.buffers())}
    for node in nodes:
        for memory in watch.written.get(node, ()):
            names = [each for each in nodes if memory in map(_memory, watch.tensors[each]) and each is not node]
            if memory in own:
                if node.users or any(user is not node for each in names for user in each.users):
                    return _hidden(node, next((each for each in names if each.op == "get_attr"), node), state=True)
                continue
            for name in names:
                readers = [user for user in name.users if order[user] > order[node] > order[name]]
                if readers and not _same_view(watch.tensors[name], watch.tensors[node]):
                    return _hidden(node, name, state=False)
                for reader in readers:
                    reader.replace_input_with(name, node)
    graph_module.recompile()
    return None


class _Watch(fx.Interpreter):
    """Runs a graph, keeps all its tensors, and notes which memory each call writes into."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module, garbage_collect_values=False)  # or one tensor would get the memory of another
        self.tensors: dict[fx.Node, list[Tensor]] = {}
        self.written: dict[fx.Node, set[int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        given = [tensor for each in n.all_input_nodes for tensor in self.tensors[each]]
        versions = [tensor._version for tensor in given]
        result = super().run_node(n)
        self.written[n] = {
            _memory(tensor) for tensor, version in zip(given, versions, strict=True) if tensor._version != version
        }
        self.tensors[n] = [] if n.op == "output" else [each for each in tree_leaves(result) if _has_memory(each)]
        return result


def _has_memory(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same_view(left: list[Tensor], right: list[Tensor]) -> bool:
    if len(left) != 1 or len(right) != 1:
        return False
    views = [(each.data_ptr(), each.shape, each.stride(), each.dtype) for each in (left[0], right[0])]
    return views[0] == views[1]


def _hidden(node: fx.Node, name: fx.Node, *, state: bool) -> HiddenWrite:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    owner = str(name.target) if name.op in ("get_attr", "call_module") else name.name
    return HiddenWrite(target, owner if state else f"what {owner} gives", _place(node), state)


def _place(node: fx.Node) -> str:
    """File, line and code of the call, as far as the tracer noted them."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]+\n\s*([^\n]+)', node.stack_trace or "")
    own = [frame for frame in frames if not frame[0].startswith((_TORCH, _HERE))]
    return "{}, line {}: {}".format(*own[-1]) if own else ""
