"""Every registered network: the number of its connections, its shapes, its gradients, and its last layer."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gossamer.lab import models

FROM_TORCHVISION = {"vgg16", "resnet50", "efficientnet_b0"}
OWN = [name for name in models.names() if name not in FROM_TORCHVISION]

# The numbers the paper and the field report; on purpose not read from the registry.
CONNECTIONS = {
    "digits_cnn": 58_144,
    "fc_densenet_mnist": 117_152,
    "lenet300": 266_200,
    "lenet5": 430_500,
    "vgg16_cifar": 14_977_728,
    "vgg19_cifar": 20_024_000,
    "resnet20": 268_336,
    "resnet56": 848_944,
    "resnet110": 1_719_856,
    "densenet40": 1_040_568,
    "densenet_bc100": 745_164,
    # the first layer, then 9 + out weights per input channel of a block, and the classifier
    "mobilenet_cifar": 27 * 32
    + sum(a * (9 + b) for a, b in pairwise((32, 64, 128, 128, 256, 256, 512, 512, 512)))
    + 512 * 100,
    "vit": 48 * 192 + 6 * 12 * 192 * 192 + 192 * 10,
    "wrn16_4": 2_768_304,
    "wrn28_10": 36_461_232,
    "vgg16": 138_344_128,
    "resnet50": 25_502_912,
    "efficientnet_b0": 5_236_192,
    "lstm_lm": 85_917_000,
    "transformer_lm": 33_278 * 256 + 6 * 12 * 256 * 256,
    "gru": 3 * 256 * (4 + 256) + 256 * 10,
    "indrnn": 28 * 128 + 5 * 128 * 128 + 128 * 10,
    "minilm": 30_522 * 384 + 6 * 12 * 384 * 384 + 384 * 2,
    "map_fit": 3 * 64 * 64,
}

# Too large to train in a test at full size: the same code with smaller numbers.
SMALL = {"lstm_lm": {"num_classes": 50, "hidden": 8}, "transformer_lm": {"num_classes": 50}}


def connections(model: nn.Module) -> int:
    weights: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear, nn.Embedding)):
            weights[id(module.weight)] = module.weight.numel()
        elif isinstance(module, nn.RNNBase):
            for name, parameter in module.named_parameters():
                if name.startswith("weight"):
                    weights[id(parameter)] = parameter.numel()
    return sum(weights.values())


def build(name: str, **options: int) -> tuple[nn.Module, torch.Tensor]:
    options = SMALL.get(name, {}) | options
    return models.create(name, **options), models.example_input(name, num_classes=options.get("num_classes"))


@pytest.mark.parametrize("name", models.names())
def test_connections_are_the_papers(name: str, request: pytest.FixtureRequest) -> None:
    if name in FROM_TORCHVISION:
        request.getfixturevalue("torchvision_or_skip")
    with torch.device("meta"):
        model = models.create(name)
    assert connections(model) == CONNECTIONS[name] == models.entry(name).weights


@pytest.mark.parametrize("name", OWN)
def test_forward_shape_and_gradient_everywhere(name: str) -> None:
    torch.manual_seed(0)
    model, x = build(name)
    output = model(x)
    logits = output[0] if models.entry(name).tokens else output
    classes = SMALL.get(name, {}).get("num_classes", models.entry(name).num_classes)
    assert logits.shape == ((*x.shape, classes) if models.entry(name).tokens else (2, classes))
    logits.square().mean().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        if parameter.ndim > 1:
            assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", models.names())
def test_num_classes_changes_only_the_last_layer(name: str, request: pytest.FixtureRequest) -> None:
    if name in FROM_TORCHVISION:
        request.getfixturevalue("torchvision_or_skip")
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in models.create(name).state_dict().items()}
        other = {key: value.shape for key, value in models.create(name, num_classes=7).state_dict().items()}
    assert shapes.keys() == other.keys()
    differing = {key for key in shapes if shapes[key] != other[key]}
    if models.entry(name).tokens:
        assert differing == {"embedding.weight", "decoder.weight", "decoder.bias"}
    elif name == "map_fit":
        assert differing == {key for key in shapes if re.match(r"layers\.[67]\.(?!num)", key)}
    else:
        assert differing == set(list(shapes)[-2:]), "expected the last weight and its bias alone"
        assert all(other[key][0] == 7 for key in differing)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"got 'resnet21': did you mean .*'resnet20'"):
        models.create("resnet21")
    with pytest.raises(ValueError, match="the models are digits_cnn, fc_densenet_mnist"):
        models.create("zzzzzzzz")


def test_unknown_options_list_the_known_ones() -> None:
    with pytest.raises(TypeError, match="lstm_lm takes the options num_classes, hidden, layers, dropout, got droput"):
        models.create("lstm_lm", droput=0.1)
    with pytest.raises(TypeError, match="resnet20 takes the options num_classes, got depth"):
        models.create("resnet20", depth=8)


def test_too_few_classes_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        models.create("lenet5", num_classes=0)


def test_an_option_that_is_nearly_one_is_asked_about() -> None:
    with pytest.raises(TypeError, match=r"got num_clases: did you mean 'num_classes'\?"):
        models.create("resnet20", num_clases=3)


@pytest.mark.parametrize("classes", ["10", 2.5, True])
def test_classes_that_are_no_number_are_an_error(classes: object) -> None:
    with pytest.raises(TypeError, match=f"expected a whole number as num_classes, got {classes!r}"):
        models.create("resnet20", num_classes=classes)  # type: ignore[arg-type]


def test_table_has_a_row_for_every_name() -> None:
    rows = models.table()
    assert [row[0] for row in rows] == list(CONNECTIONS)
    assert ("resnet20", "cifar10", 268_336) in rows


@pytest.mark.parametrize("name", sorted(FROM_TORCHVISION))
def test_missing_torchvision_is_explained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}")

    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(ImportError, match=r"pip install 'gossamer\[vision\]'"):
        models.create(name)


def test_unfitting_torchvision_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(ImportError, match="built for another torch"):
        models.create("resnet50")


@pytest.mark.usefixtures("torchvision_or_skip")
def test_a_plain_torchvision_beside_a_cpu_only_torch_builds_its_networks() -> None:
    """In a process of its own, where nobody has defined its operators before."""
    program = "from gossamer.lab import models; print(models.create('resnet50', num_classes=7).fc.out_features)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "7\n", done.stderr


def test_pretrained_weights_that_cannot_be_fetched_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, weights: str) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("importlib.import_module", lambda module: SimpleNamespace(get_model=refuse))
    with pytest.raises(OSError, match=r"weights of resnet50 into .*no route to host.*model_options\.pretrained=false"):
        models.create("resnet50", pretrained=True)
