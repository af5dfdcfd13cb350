"""Attention heads that go: in torch's own module and transformer layers, and in attention written by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compaction.test_by_hand import assert_same, shapes, zero_
from gossamer import compact

HEADS, SIZE, WIDTH = 4, 3, 12


def head(index: int) -> slice:
    return slice(index * SIZE, (index + 1) * SIZE)


class SelfAttention(nn.Module):
    """Torch's attention, with and without a batch in front, and the masks it is given."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.before, self.attention = nn.Linear(5, WIDTH), nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.after = nn.Linear(WIDTH, 2)
        for each in self.parameters():
            nn.init.normal_(each, std=0.5)

    def forward(self, x: Tensor, hidden: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        x = self.before(x)
        outputs, _ = self.attention(x, x, x, attn_mask=hidden, key_padding_mask=padding)
        return self.after(outputs)


def attention_of(**options: Any) -> SelfAttention:
    torch.manual_seed(1)
    return SelfAttention(**options).double().eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_head_that_nobody_reads_goes(batch_first: bool, bias: bool) -> None:
    model = attention_of(batch_first=batch_first, bias=bias)
    zero_(model.attention.out_proj.weight, slice(None), head(1))
    zero_(model.attention.out_proj.weight, slice(None), head(3))
    found = compact(model, torch.randn(2, 7, 5).double())
    small = shapes(found.model)
    assert small["attention.q_proj.weight"] == small["attention.v_proj.weight"] == (2 * SIZE, WIDTH)
    assert small["attention.out_proj.weight"] == (WIDTH, 2 * SIZE)
    assert found.report.folded == 0
    assert_same(found.model, model, torch.randn(3, 6, 5).double(), 1e-14)
    assert "attention           MultiheadAttention           36 × 12 → 18 × 12" in str(found)


def test_a_head_without_values_goes_and_its_bias_stays() -> None:
    """The weights of attention sum to one, so values that are all the bias come out as the bias."""
    model = attention_of(batch_first=True)
    zero_(model.attention.in_proj_weight, slice(2 * WIDTH + SIZE, 2 * WIDTH + 2 * SIZE))
    found = compact(model, torch.randn(2, 7, 5).double())
    assert shapes(found.model)["attention.out_proj.weight"] == (WIDTH, 3 * SIZE)
    assert found.report.folded == SIZE
    assert_same(found.model, model, torch.randn(3, 6, 5).double(), 1e-13)
    assert_same(compact(model.float(), torch.randn(2, 7, 5)).model, model, torch.randn(3, 6, 5), 1e-6)


def test_what_only_dead_heads_read_goes_too() -> None:
    model = attention_of(batch_first=True)
    zero_(model.attention.out_proj.weight, slice(None), head(0))
    projections = model.attention.in_proj_weight.view(3, HEADS, SIZE, WIDTH)
    with torch.no_grad():
        projections[:, 1:, :, 4] = 0
    found = compact(model, torch.randn(2, 7, 5).double())
    assert shapes(found.model)["before.weight"] == (WIDTH - 1, 5)
    assert shapes(found.model)["attention.k_proj.weight"] == (3 * SIZE, WIDTH - 1)
    assert_same(found.model, model, torch.randn(3, 6, 5).double(), 1e-14)


@pytest.mark.parametrize("masks", ["attention", "padding", "both", "numbers"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_masks(batch_first: bool, masks: str) -> None:
    model = attention_of(batch_first=batch_first)
    zero_(model.attention.out_proj.weight, slice(None), head(2))
    x, long = torch.randn(3, 6, 5).double(), 6 if batch_first else 3
    hidden = torch.ones(long, long).triu(1).bool() if masks != "padding" else None
    if masks == "numbers":
        hidden = torch.randn(long, long).double()
    padding = None
    if masks in ("padding", "both"):
        padding = torch.zeros(3 if batch_first else 6, long, dtype=torch.bool)
        padding[1, -1] = True
    given = {name: mask for name, mask in (("hidden", hidden), ("padding", padding)) if mask is not None}
    found = compact(model, {"x": x, **given})
    assert shapes(found.model)["attention.out_proj.weight"] == (WIDTH, 3 * SIZE)
    with torch.no_grad():
        torch.testing.assert_close(found.model(x, **given), model(x, **given))


def test_cross_attention_with_other_widths() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, kdim=5, vdim=7, batch_first=True)

        def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return self.attention(x, keys, values, need_weights=False)[0]

    model = Cross().double().eval()
    zero_(model.attention.v_proj_weight, head(0))
    zero_(model.attention.out_proj.weight, slice(None), head(2))
    inputs = torch.randn(2, 4, WIDTH).double(), torch.randn(2, 6, 5).double(), torch.randn(2, 6, 7).double()
    found = compact(model, inputs)
    assert shapes(found.model)["attention.v_proj.weight"] == (2 * SIZE, 7)
    assert shapes(found.model)["attention.out_proj.weight"] == (WIDTH, 2 * SIZE)
    with torch.no_grad():
        torch.testing.assert_close(found.model(*inputs), model(*inputs))


@pytest.mark.parametrize("what", ["extra token", "no dead head"])
def test_attention_that_stays(what: str) -> None:
    model = attention_of(batch_first=True, add_bias_kv=what == "extra token")
    if what != "no dead head":
        zero_(model.attention.out_proj.weight, slice(None), head(1))
    found = compact(model, torch.randn(2, 6, 5).double())
    assert shapes(found.model) == shapes(model)
    assert_same(found.model, model, torch.randn(3, 7, 5).double(), 1e-14)


def test_heads_stay_where_their_weights_are_used() -> None:
    class Weights(SelfAttention):
        def forward(self, x: Tensor, hidden: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
            x = self.before(x)
            outputs, weights = self.attention(x, x, x)
            return self.after(outputs) + weights.sum((1, 2))[:, None, None]

    model = attention_of(batch_first=True)
    model.__class__ = Weights
    zero_(model.attention.out_proj.weight, slice(None), head(1))
    found = compact(model, torch.randn(2, 6, 5).double())
    assert shapes(found.model)["attention.q_proj.weight"] == (WIDTH, WIDTH)
    assert_same(found.model, model, torch.randn(3, 7, 5).double(), 1e-14)


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_layers(norm_first: bool) -> None:
    """Heads, the neurons between, and a whole attention branch of torch's own encoder."""
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, norm_first=norm_first, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Linear(WIDTH, 2)).double().eval()
    first, second, third = encoder.layers
    zero_(first.self_attn.out_proj.weight, slice(None), head(3))
    zero_(second.linear2.weight, slice(None), slice(0, 10))
    zero_(third.self_attn.out_proj.weight)
    nn.init.normal_(third.self_attn.out_proj.bias)
    found = compact(model, torch.randn(2, 6, WIDTH).double())
    small = shapes(found.model)
    assert small["0.layers.0.self_attn.out_proj.weight"] == (WIDTH, 3 * SIZE)
    assert small["0.layers.1.linear1.weight"] == (6, WIDTH)
    assert not any(name.startswith("0.layers.2.self_attn") for name in small)
    assert len(found.report.branches) == 1
    assert_same(found.model, model, torch.randn(5, 9, WIDTH).double(), 1e-12)


def test_transformer_decoder() -> None:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, batch_first=True)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.TransformerDecoder(layer, 2)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.stack(x, memory)

    model = Decoder().double().eval()
    zero_(model.stack.layers[1].multihead_attn.out_proj.weight, slice(None), head(0))
    inputs = torch.randn(2, 5, WIDTH).double(), torch.randn(2, 8, WIDTH).double()
    found = compact(model, inputs)
    assert shapes(found.model)["stack.layers.1.multihead_attn.k_proj.weight"] == (3 * SIZE, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(found.model(*inputs), model(*inputs))


class ByHand(nn.Module):
    """Attention as it is often written: one layer for queries, keys and values, taken apart in several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.qkv, self.out, self.last = nn.Linear(5, 3 * WIDTH), nn.Linear(WIDTH, 6), nn.Linear(6, 2)
        self.softmax, self.drop = nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.register_buffer("seen", torch.ones(1, 1, 16, 16).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, long, _ = x.shape
        if self.way == "stacked":
            q, k, v = self.qkv(x).reshape(batch, long, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = self.qkv(x).split(WIDTH, dim=2) if self.way != "chunk" else self.qkv(x).chunk(3, dim=-1)
            q, k, v = (part.view(batch, long, HEADS, SIZE).transpose(1, 2) for part in (q, k, v))
        if self.way in ("stacked", "chunk"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * SIZE**-0.5
            scores = scores.masked_fill(self.seen[:, :, :long, :long] == 0, float("-inf"))
            scores = F.softmax(scores, dim=-1) if self.way == "split" else self.softmax(scores)
            y = torch.matmul(self.drop(scores), v)
        y = y.transpose(1, 2).contiguous().view(batch, long, HEADS * SIZE)
        return self.last(self.out(y))


@pytest.mark.parametrize("way", ["stacked", "chunk", "split", "softmax"])
def test_attention_by_hand(way: str) -> None:
    torch.manual_seed(3)
    model = ByHand(way).double().eval()
    zero_(model.out.weight, slice(None), head(1))
    if way != "stacked":
        values = slice(2 * WIDTH, 2 * WIDTH + SIZE)
        zero_(model.qkv.weight, values)
        zero_(model.qkv.bias, values)
    left = 3 if way == "stacked" else 2
    found = compact(model, torch.randn(2, 7, 5).double())
    assert shapes(found.model)["qkv.weight"] == (3 * left * SIZE, 5)
    assert shapes(found.model)["out.weight"] == (6, left * SIZE)
    assert_same(found.model, model, torch.randn(3, 9, 5).double(), 1e-14)
    again = compact(found.model, torch.randn(2, 7, 5).double())
    assert shapes(again.model) == shapes(found.model)


def test_sizes_written_as_products_and_left_open() -> None:
    """A width that is asked of the input, and heads that are left to be counted."""

    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            batch, long, width = x.size()
            q, k, v = (each(x).view(batch, long, -1, SIZE).transpose(1, 2) for each in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, long, width)
            return self.out(y)

    model = Open().double().eval()
    zero_(model.out.weight, slice(None), head(2))
    found = compact(model, torch.randn(2, 7, WIDTH).double())
    assert shapes(found.model)["v.weight"] == (3 * SIZE, WIDTH)
    assert_same(found.model, model, torch.randn(3, 5, WIDTH).double(), 1e-14)


def test_dead_channels_of_a_split_go() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.out = nn.Linear(4, 10), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.wide(x).chunk(2, dim=-1)
            return self.out(value * torch.sigmoid(gate))

    model = Gated().double().eval()
    zero_(model.out.weight, slice(None), [0, 3])
    zero_(model.wide.weight, 1)
    zero_(model.wide.bias, 1)
    found = compact(model, torch.randn(2, 4).double())
    assert shapes(found.model) == {
        **{"wide.weight": (4, 4), "wide.bias": (4,)},
        **{"out.weight": (2, 2), "out.bias": (2,)},
    }
    assert_same(found.model, model, torch.randn(6, 4).double(), 1e-14)


def test_the_fast_path_is_as_it_was() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    compact(copy.deepcopy(attention_of(batch_first=True)), torch.randn(2, 7, 5).double())
    assert torch.backends.mha.get_fastpath_enabled() == before
