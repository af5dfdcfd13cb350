"""``nn.MultiheadAttention`` expanded into layers and calls from which single heads can be removed.

The module of torch has the same number of features inside as outside, so it cannot represent fewer heads. If a head is
dead, the module becomes three linear layers for queries, keys and values (``q_proj``, ``k_proj``, ``v_proj``),
``scaled_dot_product_attention`` and its ``out_proj``. A module without dead heads keeps its tensors.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.deployment.compaction.layers import parameter_like


class ExpandedAttention(nn.Module):
    """Attention as plain layers and calls."""

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
        if need_weights:  # unused ones are omitted by the tracer
            scores = q @ k.transpose(-2, -1) * self.heads[1] ** -0.5
            weights = torch.softmax(scores if bias is None else scores + bias, -1)
            weights = weights.mean(1) if average_attn_weights else weights
        result: Tensor = self.out_proj(outputs)
        return result, weights


def write_out(model: nn.Module) -> int:
    """Replace every attention with a dead head, in place. Returns the number of constants folded into biases."""
    written: dict[nn.Module, ExpandedAttention] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if path and type(module) is nn.MultiheadAttention and _is_plain(module) and _dead_heads(module).any():
            if module not in written:
                written[module] = ExpandedAttention(module)
            model.set_submodule(path, written[module])
    return sum(each.folded for each in written.values())


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


def _orders(batch_first: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axis orders that move heads behind the batch, and back."""
    return ((0, 2, 1, 3), (0, 2, 1, 3)) if batch_first else ((1, 2, 0, 3), (2, 0, 1, 3))


def _is_plain(module: nn.MultiheadAttention) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    return module.bias_k is None and module.bias_v is None and not module.add_zero_attn and not hooks


def _projections(module: nn.MultiheadAttention) -> list[Tensor]:
    if module._qkv_same_embed_dim:
        return list(module.in_proj_weight.detach().chunk(3))
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    return [cast(Tensor, weight).detach() for weight in weights]


def _dead_heads(module: nn.MultiheadAttention) -> Tensor:
    """Heads that are unused, or whose values do not depend on the input."""
    heads = module.num_heads
    unread = (module.out_proj.weight.detach().view(-1, heads, module.head_dim) == 0).all(2).all(0)
    return unread | (_projections(module)[2].view(heads, -1) == 0).all(1)


def _layers(module: nn.MultiheadAttention) -> tuple[nn.Module, int]:
    """The linear layers of an attention. Constant values of heads are folded into the last bias."""
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
    # A plain linear layer: the class in the module differs only in quantisation.
    plain = nn.Linear(out.in_features, out.out_features, bias=out.bias is not None, device="meta")
    plain.weight = out.weight
    if out.bias is not None:
        plain.bias = out.bias
    layers.add_module("out_proj", plain)
    return layers.eval(), folded
