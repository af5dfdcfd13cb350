"""Models come back as ordinary modules of smaller layers, whatever their code asks of its input."""

from __future__ import annotations

import pytest
import torch
from foreign_models import FOREIGN
from torch import Tensor, nn
from torch.nn import functional as F

from compaction.networks import Residual, prepare
from compaction.test_attention import HEADS, SIZE, WIDTH, head
from compaction.test_by_hand import assert_same, shapes, zero_
from gossamer import compact
from gossamer.deployment import graph
from gossamer.deployment.compaction.lifting import to_layers


class AsksForShapes(nn.Module):
    """A branch on the shape of the input, dropout by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.first, self.second, self.head = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2:
            raise ValueError("expected a batch")
        x = F.relu(self.first(self.embedding(tokens)))
        x = F.dropout(self.second(x), 0.1, self.training).mean(1)
        return self.head(F.gelu(x))


def test_layers_come_back_smaller_under_their_names() -> None:
    model = AsksForShapes().double().eval()
    zero_(model.second.weight, slice(None), [1, 4])
    zero_(model.head.weight, slice(None), 2)
    zero_(model.embedding.weight, slice(5, 17))
    found = compact(model, torch.randint(0, 20, (1, 7)))
    assert shapes(found.model) == {
        "embedding.weight": (9, 6),
        **{"first.weight": (7, 6), "first.bias": (7,), "second.weight": (8, 7), "second.bias": (8,)},
        **{"head.weight": (3, 8), "head.bias": (3,)},
    }
    assert type(found.model.get_submodule("first")) is nn.Linear
    assert_same(found.model, model, torch.randint(0, 20, (5, 11)), 1e-14)
    found.model.train()
    found.model(torch.randint(0, 20, (5, 11))).sum().backward()
    assert all(each.grad is not None for each in found.model.parameters())
    again = compact(found.model, torch.randint(0, 20, (2, 7)))
    assert shapes(again.model) == shapes(found.model)


class Attention(nn.Module):
    """As the models of the transformers package have it, with a branch on a shape and turned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if x.dim() == 2:
            x = x.unsqueeze(0)
        shape = (*x.shape[:-1], -1, SIZE)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.ones(1, SIZE, dtype=x.dtype)
        q, k = (side * angle.cos() + self.turned(side) * angle.sin() for side in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(*x.shape[:-1], -1)
        x = self.norm(x + self.out(y.contiguous()))
        return x, x.mean(1)

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        return torch.cat((-x[..., 1:], x[..., :1]), dim=-1)


@pytest.mark.parametrize("masked", [False, True])
def test_heads(masked: bool) -> None:
    model = Attention().double().eval()
    zero_(model.out.weight, slice(None), head(1))
    x = torch.randn(2, 7, WIDTH).double()
    inputs = (x, torch.ones(7, 7, dtype=torch.bool).tril()) if masked else (x,)
    found = compact(model, inputs)
    assert shapes(found.model)["value.weight"] == ((HEADS - 1) * SIZE, WIDTH)
    assert shapes(found.model)["out.weight"] == (WIDTH, (HEADS - 1) * SIZE)
    other = torch.randn(4, 5, WIDTH).double()
    again = (other, torch.ones(5, 5, dtype=torch.bool).tril()) if masked else (other,)
    with torch.no_grad():
        torch.testing.assert_close(found.model(*again), model(*again))


class Encoder(nn.Module):
    """Torch's encoder with a mask of what is padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.layers(x, src_key_padding_mask=padding)


def test_heads_of_torch_behind_a_mask() -> None:
    torch.manual_seed(4)
    model = Encoder().double().eval()
    attention = model.layers.layers[1].self_attn
    zero_(attention.in_proj_weight, slice(2 * WIDTH, 2 * WIDTH + SIZE))
    nn.init.normal_(attention.in_proj_bias)
    zero_(model.layers.layers[1].linear2.weight, slice(None), slice(0, 5))
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    found = compact(model, (torch.randn(2, 7, WIDTH).double(), padding))
    assert found.report.folded == SIZE
    assert shapes(found.model)["layers.layers.1.self_attn.q_proj.weight"] == ((HEADS - 1) * SIZE, WIDTH)
    assert shapes(found.model)["layers.layers.1.linear1.weight"] == (11, WIDTH)
    x, padding = torch.randn(3, 6, WIDTH).double(), torch.zeros(3, 6, dtype=torch.bool)
    padding[0, 2:] = True
    with torch.no_grad():
        torch.testing.assert_close(found.model(x, padding), model(x, padding))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_written_out_is_the_module(batch_first: bool, average: bool) -> None:
    """Outputs and weights, with a mask of each kind; a dead head stays where its weights are used."""

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)

        def forward(self, x: Tensor, hidden: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
            if x.dim() != 3:
                raise ValueError("expected a batch")
            options = {"key_padding_mask": padding, "attn_mask": hidden, "average_attn_weights": average}
            return self.attention(x, x, x, **options)

    model = Weights().double().eval()
    zero_(model.attention.out_proj.weight, slice(None), head(1))
    x = torch.randn(2, 2, WIDTH).double() if batch_first else torch.randn(2, 3, WIDTH).double()
    batch, long = (2, 2) if batch_first else (3, 2)
    hidden, padding = torch.randn(long, long).double(), torch.zeros(batch, long).double()
    found = compact(model, (x, hidden, padding))
    assert shapes(found.model)["attention.q_proj.weight"] == (WIDTH, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(found.model(x, hidden, padding), model(x, hidden, padding))


def test_tied_and_unnamed_tensors_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.mix = nn.Embedding(9, 5), nn.Linear(5, 5)
            self.matrix = nn.Parameter(torch.randn(5, 5))

        def forward(self, tokens: Tensor) -> Tensor:
            if tokens.dim() != 2:
                raise ValueError("expected a batch")
            x = F.linear(self.mix(self.embedding(tokens)), self.matrix)
            return F.linear(x, self.embedding.weight)

    model = Tied().eval()
    zero_(model.mix.weight, slice(None), 1)
    zero_(model.matrix, slice(None), 2)
    found = compact(model, torch.randint(0, 9, (2, 3)))
    assert shapes(found.model)["embedding.weight"] == (9, 5)
    assert "→ removed" not in str(found)
    assert shapes(found.model)["matrix"] == (5, 5)
    assert_same(found.model, model, torch.randint(0, 9, (4, 6)), 1e-6)


def test_results_in_a_dictionary_stay_in_one() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            if x.dim() != 2:
                raise ValueError("expected a batch")
            hidden = torch.relu(self.a(x))
            return {"logits": self.b(hidden) * scale, "size": hidden.sum(1)}

    model = Named().eval()
    zero_(model.a.weight, 1)
    zero_(model.a.bias, 1)
    found = compact(model, {"x": torch.randn(2, 4)})
    x = torch.randn(6, 4)
    with torch.no_grad():
        torch.testing.assert_close(found.model(x=x), model(x=x))


@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
def test_models_that_nobody_here_wrote(name: str) -> None:
    """All of what one attention head and three inner neurons write is zero."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    (foreign,) = [each for each in FOREIGN if each.name == name]
    model = foreign.build().eval()
    for where, parameter in model.named_parameters():
        if where.endswith(("attention.output.dense.weight", "o_proj.weight")):
            zero_(parameter, slice(None), slice(0, parameter.shape[1] // 2))
        elif where.endswith((".output.dense.weight", "fc2.weight", "down_proj.weight")):
            zero_(parameter, slice(None), slice(0, 3))
    options = {"use_cache": False} if name == "llama" else {}
    found = compact(model, {**foreign.inputs(), **options})
    changed = [layer.name for layer in found.report.layers if layer.after not in (None, layer.before)]
    assert any(each.endswith(("intermediate.dense", "fc1", "up_proj")) for each in changed)
    if name != "llama":  # there, one head for keys and values serves all queries
        assert any(each.endswith(("query", "q_proj")) for each in changed)
    inputs = {**foreign.inputs(), **options}
    with torch.no_grad():
        ours, theirs = found.model(**inputs)[0], model(**inputs)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_graph_computes_what_the_model_computes() -> None:
    model = prepare(Residual(), torch.Generator().manual_seed(1))
    x = torch.randn(1, 3, 8, 8)
    layers = to_layers(graph.trace_any_size(model, x), model, x)
    assert {type(each) for each in layers.modules()} >= {nn.Conv2d, nn.BatchNorm2d, nn.Linear}
    x = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(layers(x), model(x), rtol=0, atol=0)


class AnyNumber(nn.Module):
    """Takes any number of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gru, self.last = nn.Linear(4, 6), nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, *inputs: Tensor) -> Tensor:
        (x,) = (torch.relu(self.first(each)) for each in inputs)
        found: Tensor = self.last(self.gru(x)[0])
        return found


def test_any_number_of_inputs_leaves_the_batch_open() -> None:
    model = AnyNumber().eval()
    found = compact(model, torch.randn(2, 7, 4))
    for batch in (1, 2, 5):
        x = torch.randn(batch, 7, 4)
        torch.testing.assert_close(found.model(x), model(x), rtol=1e-6, atol=1e-6)


def test_a_size_that_could_not_be_left_open_is_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_attempts", lambda _, positional, named: iter([(positional, named, None)]))
    model = AnyNumber().eval()
    small = compact(model, torch.randn(2, 7, 4)).model
    x = torch.randn(2, 7, 4)
    torch.testing.assert_close(small(x), model(x), rtol=1e-6, atol=1e-6)
    with pytest.raises(AssertionError, match="expected 2 at dimension 0 of inputs_0, the only size"):
        small(torch.randn(3, 7, 4))


class Steps(nn.Module):
    """A loop over time, which is written out for the length of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        h = torch.zeros_like(y[:, 0])
        for step in range(x.shape[1]):
            h = torch.tanh(y[:, step] + h)
        return self.last(h)


def test_a_loop_over_time_is_for_the_length_of_the_example() -> None:
    model = Steps().double().eval()
    small = compact(model, torch.randn(2, 7, 4).double()).model
    assert_same(small, model, torch.randn(5, 7, 4).double(), 1e-14)
    with pytest.raises(AssertionError, match="expected 7 at dimension 1 of x, the only size"):
        small(torch.randn(5, 9, 4).double())


@pytest.mark.parametrize("flattens", [False, True])
def test_pictures_of_other_sizes_are_taken_where_the_model_takes_them(flattens: bool) -> None:
    pool = nn.Flatten() if flattens else nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), pool, nn.Linear(256 if flattens else 4, 2)).double().eval()
    small = compact(model, torch.randn(2, 3, 8, 8).double()).model
    larger = torch.randn(2, 3, 11, 9).double()
    if flattens:
        with pytest.raises(AssertionError, match="expected 8 at dimension 2 of input_1, the only size"):
            small(larger)
    else:
        assert_same(small, model, larger, 1e-14)


class Centred(nn.Conv2d):
    """A class of the user's own that computes what its base does, of something else, and more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 1) * 2


def test_derived_layers_and_hooks_are_part_of_the_graph() -> None:
    model = nn.Sequential(Centred(2, 6, 3), nn.Conv2d(6, 5, 1), nn.ReLU(), nn.Conv2d(5, 3, 1)).double().eval()
    model[1].register_forward_hook(lambda module, inputs, output: output + 3)
    zero_(model[1].weight, slice(None), [0, 4])
    zero_(model[3].weight, slice(None), 2)
    found = compact(model, torch.randn(2, 2, 6, 6).double())
    assert {name: size for name, size in shapes(found.model).items() if name.endswith("weight")} == {
        **{"0.weight": (4, 2, 3, 3), "1.weight": (4, 4, 1, 1), "3.weight": (3, 4, 1, 1)},
    }
    assert_same(found.model, model, torch.randn(5, 2, 6, 6).double(), 1e-13)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_that_is_no_zeros_keeps_constants(mode: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 5, 1), nn.ReLU(), nn.Conv2d(5, 3, 3, padding=1, padding_mode=mode)).double()
    zero_(model[0].weight, [1, 3])
    with torch.no_grad():
        model[0].bias.abs_()
    found = compact(model, torch.randn(2, 2, 6, 6).double())
    assert shapes(found.model)["2.weight"] == (3, 3, 3, 3)
    assert found.report.folded == 2
    assert_same(found.model, model, torch.randn(5, 2, 6, 6).double(), 1e-13)


def test_a_number_that_the_example_gives_is_the_only_one() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.layer(x) * scale

    model = Scaled().eval()
    small, x = compact(model, {"x": torch.randn(2, 4), "scale": 2.0}).model, torch.randn(5, 4)
    torch.testing.assert_close(small(x, scale=2.0), model(x, scale=2.0))
    with pytest.raises(AssertionError, match=r"expected 2.0 for scale, the only value that was traced"):
        small(x, scale=3.0)
