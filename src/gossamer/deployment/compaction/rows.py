"""Merging of the zero rows of an embedding.

Any token may occur, so no row can simply be removed. But all rows of zeros can share one row, and an integer table maps
tokens to rows. This is done if it saves memory.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping

import torch
from torch import fx, nn

from gossamer.deployment.compaction.layers import Embedded, parameter_like


def merge_zero_rows(graph_module: fx.GraphModule, rules: Mapping[fx.Node, object]) -> int:
    """Merge the zero rows of every embedding covered by ``rules``. Returns the number of removed rows."""
    removed = 0
    for node in list(graph_module.graph.nodes):
        if isinstance(rules.get(node), Embedded):
            removed += _merge(graph_module, node)
    if removed:
        graph_module.recompile()
    return removed


def _merge(graph_module: fx.GraphModule, node: fx.Node) -> int:
    module = graph_module.get_submodule(str(node.target))
    assert isinstance(module, nn.Embedding)
    weight = module.weight.detach()
    zero = (weight == 0).all(1)
    superfluous = int(zero.sum()) - 1
    table_bytes = torch.int32.itemsize * len(zero)
    if superfluous < 1 or superfluous * weight.shape[1] * weight.element_size() <= table_bytes or module.max_norm:
        return 0
    kept = ~zero
    first = int(zero.nonzero()[0])
    kept[first] = True
    places = kept.cumsum(0) - 1
    table = torch.where(zero, places[first], places).int()
    if module.padding_idx is not None:
        module.padding_idx = int(table[module.padding_idx])
    module.weight = parameter_like(module.weight, weight[kept])
    module.num_embeddings = int(kept.sum())
    # Outside the embedding, which so remains an ordinary one that can be compacted again, for example.
    name = f"row_of_token_{re.sub(r'[^0-9a-zA-Z]', '_', str(node.target))}"
    graph_module.register_buffer(name, table)
    with graph_module.graph.inserting_before(node):
        rows = graph_module.graph.get_attr(name)
        node.args = (graph_module.graph.call_function(operator.getitem, (rows, node.args[0])),)
    return superfluous
