"""What the counts do not show: initial scales, shortcuts, recurrences, export and compilation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from gossamer.lab import models
from gossamer.lab.models.densenet import DenseNet
from gossamer.lab.models.fc_densenet import FullyConnectedDenseNet
from gossamer.lab.models.imagenet import _replace_last_linear
from gossamer.lab.models.indrnn import IndRNN, IndRNNCell, IndRNNLayer, limit_recurrence_
from gossamer.lab.models.lstm_lm import LSTMLanguageModel, detach_state
from gossamer.lab.models.map_fit import MapFit
from gossamer.lab.models.resnet import ResNet, ZeroPadShortcut
from gossamer.lab.models.vgg import VGG
from gossamer.lab.models.wide_resnet import WideResNet

EXPORTED = ["fc_densenet_mnist", "lenet300", "lenet5", "vgg16_cifar", "resnet20", "densenet40", "indrnn"]


def test_convolutions_start_at_he_scale_of_fan_out_and_linears_of_fan_in() -> None:
    torch.manual_seed(0)
    model = models.create("vgg16_cifar")
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 10_000:
            expected = math.sqrt(2 / (layer.out_channels * 9))
            assert layer.weight.std().item() == pytest.approx(expected, rel=0.03)
        elif isinstance(layer, nn.Linear):
            assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / layer.in_features), rel=0.05)


def test_zero_pad_shortcut_averages_pads_and_lets_the_gradient_through() -> None:
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    y = ZeroPadShortcut(2)(x)
    expected = x.detach().view(2, 3, 2, 2, 2, 2).mean(dim=(3, 5))
    torch.testing.assert_close(y[:, :3].detach(), expected)
    assert torch.equal(y[:, 3:], torch.zeros(2, 2, 2, 2))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 0.25))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ResNet(21), "6n \\+ 2"),
        (lambda: WideResNet(27, 10), "6n \\+ 4"),
        (lambda: VGG((1, 2)), "5 stages"),
        (lambda: LSTMLanguageModel(5, 4, dropout=1.0), "below 1, got 1.0"),
        (lambda: IndRNN(layers=0), "at least one layer"),
        (lambda: limit_recurrence_(IndRNN(), steps=0), "steps of at least 1"),
    ],
)
def test_impossible_shapes_are_errors(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_dense_layers_pass_their_input_on_unchanged() -> None:
    model = models.create("fc_densenet_mnist").eval()
    x = torch.randn(3, 1, 28, 28)
    features = model.get_submodule("features")(x.flatten(1))
    assert features.shape == (3, 912)
    assert torch.equal(features[:, :784], x.flatten(1))
    assert (features[:, 784:] >= 0).all()


def test_language_model_ties_its_weights_and_carries_its_state() -> None:
    torch.manual_seed(0)
    model = LSTMLanguageModel(20, 6, dropout=0.5).eval()
    assert model.decoder.weight is model.embedding.weight
    assert model.embedding.weight.abs().max() <= 0.1
    assert not model.decoder.bias.any()
    tokens = torch.randint(20, (8, 3))
    whole, (h, c) = model(tokens)
    first, state = model(tokens[:5])
    second, (h2, c2) = model(tokens[5:], detach_state(state))
    torch.testing.assert_close(torch.cat((first, second)), whole)
    torch.testing.assert_close((h2, c2), (h, c))
    assert state[0].requires_grad
    assert not detach_state(state)[0].requires_grad


def test_language_model_drops_only_while_training() -> None:
    torch.manual_seed(0)
    model = LSTMLanguageModel(20, 6, dropout=0.5)
    tokens = torch.randint(20, (8, 3))
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])


def test_indrnn_layer_is_its_recurrence_step_by_step() -> None:
    torch.manual_seed(0)
    layer = IndRNNLayer(4, 5).double()
    x, h = torch.randn(7, 3, 4, dtype=torch.double), torch.randn(3, 5, dtype=torch.double)
    states, last = layer(x, h)
    weight, bias, u = layer.cell.input.weight, layer.cell.input.bias, layer.cell.recurrent
    assert u.ndim == 1
    for t in range(7):
        h = (x[t] @ weight.T + u * h + bias).clamp(min=0)
        torch.testing.assert_close(states[t], h)
        if t == 0:
            torch.testing.assert_close(layer.cell(x[0], torch.zeros_like(h)), layer(x[:1])[1])
    torch.testing.assert_close(last, h)


def test_indrnn_gradient_is_the_product_of_its_own_weight() -> None:
    cell = IndRNNCell(1, 2)
    with torch.no_grad():
        cell.input.weight.zero_()
        cell.recurrent.copy_(torch.tensor([0.5, 2.0]))
    h = start = torch.ones(1, 2, requires_grad=True)
    for _ in range(3):
        h = cell(torch.zeros(1, 1), h - cell.input.bias.detach())
    gradient = torch.autograd.grad(h.sum(), start)[0]
    torch.testing.assert_close(gradient, torch.tensor([[0.5**3, 2.0**3]]))


def test_indrnn_reads_images_as_rows_or_pixels() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 1, 28, 28)
    model = IndRNN(hidden_size=4, layers=2).eval()
    torch.testing.assert_close(model(images), model(images[:, 0]))
    by_pixel = IndRNN(input_size=1, hidden_size=4, layers=1).eval()
    torch.testing.assert_close(by_pixel(images), by_pixel(images.view(2, 784, 1)))


def test_limit_recurrence_bounds_growth() -> None:
    model = IndRNN(hidden_size=4, layers=2)
    with torch.no_grad():
        for layer in model.layers:
            layer.cell.recurrent.copy_(torch.tensor([-3.0, -0.5, 0.5, 3.0]))
    limit_recurrence_(model, steps=28)
    bound = 2 ** (1 / 28)
    for layer in model.layers:
        torch.testing.assert_close(layer.cell.recurrent.detach(), torch.tensor([-bound, -0.5, 0.5, bound]))


def test_replacing_the_last_linear_keeps_the_rest() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1000)))
    first = network[0].weight.detach().clone()
    _replace_last_linear(network, 6)
    assert network(torch.randn(2, 4)).shape == (2, 6)
    assert torch.equal(network[0].weight, first)


@pytest.mark.parametrize("name", EXPORTED)
def test_export_gives_the_same_outputs(name: str) -> None:
    torch.manual_seed(0)
    model = models.create(name).eval()
    x = models.example_input(name)
    exported = torch.export.export(model, (x,)).module()
    with torch.no_grad():
        torch.testing.assert_close(exported(x), model(x))


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: FullyConnectedDenseNet(784, layers=4), (1, 28, 28)),
        (lambda: ResNet(8), (3, 32, 32)),
        (lambda: DenseNet(2, bottleneck=True, compression=0.5), (3, 32, 32)),
        (lambda: WideResNet(10, 1), (3, 32, 32)),
        (lambda: VGG((1, 1, 1, 1, 1), (512,)), (3, 32, 32)),
        (lambda: IndRNN(layers=2, hidden_size=8), (1, 28, 28)),
        (MapFit, (64,)),
    ],
)
def test_training_graph_has_no_break(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = build()
    x = torch.randn(4, *shape)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(x).square().mean(), list(model.parameters()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet20", "densenet40"])
def test_channels_last_stays_channels_last(name: str) -> None:
    torch.manual_seed(0)
    model = models.create(name).eval()
    x = models.example_input(name)
    expected = model(x)
    formats: list[bool] = []
    model = model.to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(
                lambda _module, _inputs, output: formats.append(output.is_contiguous(memory_format=torch.channels_last))
            )
    torch.testing.assert_close(model(x.contiguous(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-4)
    assert formats
    assert all(formats)


def test_a_few_steps_of_training_lower_the_loss() -> None:
    torch.manual_seed(0)
    for name in ("resnet20", "fc_densenet_mnist", "indrnn", "lenet5"):
        model = models.create(name)
        x, y = models.example_input(name, 16), torch.arange(16) % 10
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0], (name, losses)


def test_attention_hides_the_future_of_a_decoder_and_the_padding_of_a_sentence() -> None:
    torch.manual_seed(0)
    decoder = models.create("transformer_lm", num_classes=50, width=16, layers=2).eval()
    words = torch.randint(50, (7, 2))
    changed = words.clone()
    changed[4:] = (changed[4:] + 1) % 50
    with torch.no_grad():
        torch.testing.assert_close(decoder(words)[0][:4], decoder(changed)[0][:4])
        assert not torch.allclose(decoder(words)[0][4:], decoder(changed)[0][4:])
        encoder = models.create("minilm", layers=1).eval()
        sentence = torch.randint(1, 50, (2, 6))
        padded = torch.cat([sentence, torch.zeros(2, 3, dtype=torch.int64)], dim=1)
        torch.testing.assert_close(encoder(sentence), encoder(padded))


def test_pretrained_weights_of_an_encoder_find_their_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In half precision, under the names of BERT, with the projections of queries, keys and values apart."""
    torch.manual_seed(0)
    network = models.create("minilm")
    state = {name: tensor.half() for name, tensor in network.state_dict().items() if "classifier" not in name}
    stored = {"embeddings.word_embeddings.weight": state["embedding.weight"]}
    stored["embeddings.position_embeddings.weight"] = state["positions"][0].clone()
    stored["embeddings.token_type_embeddings.weight"] = torch.zeros(2, 384).half()
    names = {
        "attention.output": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "mlp.0": "intermediate.dense",
        "mlp.2": "output.dense",
        "norm2": "output.LayerNorm",
    }
    for kind in ("weight", "bias"):
        stored[f"embeddings.LayerNorm.{kind}"] = state[f"norm.{kind}"]
        for layer in range(6):
            for ours, theirs in names.items():
                stored[f"encoder.layer.{layer}.{theirs}.{kind}"] = state[f"blocks.{layer}.{ours}.{kind}"]
            parts = state[f"blocks.{layer}.attention.inputs.{kind}"].chunk(3)
            for name, part in zip(("query", "key", "value"), parts, strict=True):
                stored[f"encoder.layer.{layer}.attention.self.{name}.{kind}"] = part.clone()
    save_file(stored, tmp_path / "model.safetensors")
    monkeypatch.setattr("gossamer.lab.models.minilm.minilm_folder", lambda: tmp_path)
    loaded = models.create("minilm", pretrained=True).state_dict()
    for name, tensor in state.items():
        torch.testing.assert_close(loaded[name], tensor.float(), rtol=0, atol=0)
