"""``nn.MultiheadAttention`` written out: layers and calls whose single heads can be taken out.

The module of torch has as many features inside as outside, so one with fewer heads cannot be one of its kind. Where a
head is dead, its call becomes three linear layers for queries, keys and values (``q_proj``, ``k_proj``, ``v_proj``),
``scaled_dot_product_attention`` and the ``out_proj`` that it had. One without dead heads stays as it is.
"""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from gossamer.deployment.compaction.layers import parameter_like
from gossamer.deployment.compaction.nodes import bound, shape

_ARGUMENTS = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
_REST = ("average_attn_weights", "is_causal")


def expand_attention(graph_module: fx.GraphModule) -> int:
    """Write out every attention with a dead head; gives the number of constants that moved into biases."""
    nodes, folded = list(graph_module.graph.nodes), 0
    calls = [node for node in nodes if node.op == "call_module"]
    for node in calls:
        module = graph_module.get_submodule(str(node.target))
        once = sum(other.target == node.target for other in calls) == 1
        if type(module) is nn.MultiheadAttention and once and _understood(module, node) and _dead_heads(module).any():
            folded += _expand(graph_module, node, module)
    return folded


class WrittenOut(nn.Module):
    """The same as a module, for a tracer that looks into everything and follows no calls."""

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        layers, self.folded = _layers(module)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = layers.children()
        self.heads, self.batch_first = (module.num_heads, module.head_dim), module.batch_first

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        to_heads, back = _orders(self.batch_first)
        pairs = ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        q, k, v = (layer(x).unflatten(-1, self.heads).permute(to_heads) for layer, x in pairs)
        bias = None if attn_mask is None else _additive(attn_mask, q)
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q)[:, None, None, :]
            bias = padding if bias is None else bias + padding
        outputs = functional.scaled_dot_product_attention(q, k, v, bias).permute(back).flatten(-2)
        weights = None
        if need_weights:  # where nobody uses them, the tracer leaves them out
            scores = q @ k.transpose(-2, -1) * self.heads[1] ** -0.5
            weights = torch.softmax(scores if bias is None else scores + bias, -1)
            weights = weights.mean(1) if average_attn_weights else weights
        result: Tensor = self.out_proj(outputs)
        return result, weights


def write_out(model: nn.Module) -> int:
    """Replace, in place, every attention with a dead head; gives the number of constants that moved into biases."""
    folded = 0
    for owner in list(model.modules()):
        for name, module in list(owner.named_children()):
            if type(module) is nn.MultiheadAttention and _is_plain(module) and _dead_heads(module).any():
                written = WrittenOut(module)
                setattr(owner, name, written)
                folded += written.folded
    return folded


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


def _orders(batch_first: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order of axes that puts heads behind the batch, and the one that puts them back."""
    return ((0, 2, 1, 3), (0, 2, 1, 3)) if batch_first else ((1, 2, 0, 3), (2, 0, 1, 3))


def _is_plain(module: nn.MultiheadAttention) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    return module.bias_k is None and module.bias_v is None and not module.add_zero_attn and not hooks


def _understood(module: nn.MultiheadAttention, node: fx.Node) -> bool:
    given = bound(node, *_ARGUMENTS, *_REST)
    only_outputs = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    if not given or not only_outputs or not _is_plain(module):
        return False
    sizes = [shape(given[name]) if isinstance(given.get(name), fx.Node) else None for name in _ARGUMENTS[:3]]
    if any(size is None or len(size) != 3 for size in sizes):
        return False
    return all(_is_plain_mask(given.get(name)) for name in ("key_padding_mask", "attn_mask"))


def _is_plain_mask(mask: object) -> bool:
    """None, or a matrix of truth values: the same for all heads."""
    if mask is None:
        return True
    size = shape(mask) if isinstance(mask, fx.Node) else None
    return size is not None and len(size) == 2 and cast(fx.Node, mask).meta["tensor_meta"].dtype == torch.bool


def _projections(module: nn.MultiheadAttention) -> list[Tensor]:
    if module._qkv_same_embed_dim:
        return list(module.in_proj_weight.detach().chunk(3))
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    return [cast(Tensor, weight).detach() for weight in weights]


def _dead_heads(module: nn.MultiheadAttention) -> Tensor:
    """Heads that nobody reads, or whose values do not depend on the input."""
    heads = module.num_heads
    unread = (module.out_proj.weight.detach().view(-1, heads, module.head_dim) == 0).all(2).all(0)
    return unread | (_projections(module)[2].view(heads, -1) == 0).all(1)


def _expand(graph_module: fx.GraphModule, node: fx.Node, module: nn.MultiheadAttention) -> int:
    name, graph, given = str(node.target), graph_module.graph, bound(node, *_ARGUMENTS, *_REST)
    layers, folded = _layers(module)
    owner, _, last = name.rpartition(".")
    setattr(graph_module.get_submodule(owner), last, layers)
    to_heads, back = _orders(module.batch_first)
    with graph.inserting_before(node):
        sides = []
        for argument, layer in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
            projected = graph.call_module(f"{name}.{layer}", (given[argument],))
            split = graph.call_method("unflatten", (projected, -1, (module.num_heads, module.head_dim)))
            sides.append(graph.call_method("permute", (split, to_heads)))
        mask = _mask(graph, given.get("attn_mask"), given.get("key_padding_mask"))
        heads = graph.call_function(functional.scaled_dot_product_attention, (*sides, mask))
        beside = graph.call_method("flatten", (graph.call_method("permute", (heads, back)), -2))
        result = graph.call_module(f"{name}.out_proj", (beside,))
    for user in list(node.users):
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)
    graph_module.recompile()
    return folded


def _mask(graph: fx.Graph, attention: fx.Node | None, padding: fx.Node | None) -> fx.Node | None:
    """What may be seen, where the masks of the module say what may not."""
    if padding is not None:
        padding = graph.call_method("unsqueeze", (graph.call_method("unsqueeze", (padding, 1)), 1))
    hidden = attention if padding is None else padding
    if attention is not None and padding is not None:
        hidden = graph.call_function(torch.logical_or, (attention, padding))
    return None if hidden is None else graph.call_function(torch.logical_not, (hidden,))


def _layers(module: nn.MultiheadAttention) -> tuple[nn.Module, int]:
    """The linear layers of an attention. Heads whose values are one constant give it away to the last bias."""
    layers, out = nn.Module(), module.out_proj
    bias = module.in_proj_bias
    biases = [None] * 3 if bias is None else list(bias.detach().chunk(3))
    folded = 0
    values = biases[2]
    if values is not None:
        still = (_projections(module)[2] == 0).view(module.num_heads, -1).all(1).repeat_interleave(module.head_dim)
        moved = still & (values != 0)
        folded = int(moved.sum())
        if folded:
            shift = out.weight.detach().double()[:, moved] @ values.double()[moved]
            old = 0 if out.bias is None else out.bias.detach().double()
            out.bias = parameter_like(out.weight, shift + old)
            biases[2] = values.masked_fill(moved, 0)
    template = module.in_proj_weight if module._qkv_same_embed_dim else module.q_proj_weight
    for name, weight, shift_ in zip(("q_proj", "k_proj", "v_proj"), _projections(module), biases, strict=True):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=shift_ is not None, device="meta")
        layer.weight = parameter_like(cast(Tensor, template), weight.clone())
        if shift_ is not None:
            layer.bias = parameter_like(cast(Tensor, bias), shift_.clone())
        layers.add_module(name, layer)
    # A plain linear layer: the class that the module uses only differs in how it is quantised.
    plain = nn.Linear(out.in_features, out.out_features, bias=out.bias is not None, device="meta")
    plain.weight = out.weight
    if out.bias is not None:
        plain.bias = out.bias
    layers.add_module("out_proj", plain)
    return layers.eval(), folded
