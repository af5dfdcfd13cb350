"""The networks by name, each with the number of its prunable weights."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from gossamer.deprecation import renamed
from gossamer.hints import did_you_mean
from gossamer.lab.models.densenet import densenet40, densenet_bc100
from gossamer.lab.models.digits_cnn import QUICK_START, DigitsNet
from gossamer.lab.models.fc_densenet import fc_densenet_mnist
from gossamer.lab.models.gru import gru
from gossamer.lab.models.imagenet import efficientnet_b0, resnet50, vgg16
from gossamer.lab.models.indrnn import indrnn
from gossamer.lab.models.lenet import lenet5, lenet300
from gossamer.lab.models.lstm_lm import lstm_lm
from gossamer.lab.models.map_fit import map_fit
from gossamer.lab.models.minilm import minilm
from gossamer.lab.models.mobilenet import mobilenet_cifar
from gossamer.lab.models.resnet import resnet20, resnet56, resnet110
from gossamer.lab.models.transformer import transformer_lm, vit
from gossamer.lab.models.vgg import vgg16_cifar, vgg19_cifar
from gossamer.lab.models.wide_resnet import wrn16_4, wrn28_10

__all__ = ["MODELS", "ModelEntry", "at_most", "create", "entry", "example_input", "names", "table"]


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """A registered network.

    `weights` is the number of prunable weights at the default number of classes: those of convolutions, linear and
    recurrent layers and embeddings, with shared weights counted once. `input_shape` is the shape of one sample. With
    `tokens`, the input is word ids with time first, (steps, batch).
    """

    name: str
    builder: Callable[..., nn.Module]
    data: str
    input_shape: tuple[int, ...]
    num_classes: int
    weights: int
    description: str
    tokens: bool = False
    sentences: bool = False  # the input is token ids, a sentence per row
    recurrent: bool = False  # has layers of torch's own for which cuDNN has no bfloat16

    connections = renamed("connections", "weights")


_GREY, _CIFAR, _IMAGENET = (1, 28, 28), (3, 32, 32), (3, 224, 224)

MODELS: tuple[ModelEntry, ...] = (
    ModelEntry(QUICK_START, DigitsNet, "digits", (1, 8, 8), 10, 58_144, "three convolutions"),
    ModelEntry(
        "fc_densenet_mnist",
        fc_densenet_mnist,
        "mnist",
        _GREY,
        10,
        117_152,
        "fully connected DenseNet, 16 layers, growth 8",
    ),
    ModelEntry("lenet300", lenet300, "mnist", _GREY, 10, 266_200, "LeNet-300-100, fully connected"),
    ModelEntry("lenet5", lenet5, "mnist", _GREY, 10, 430_500, "LeNet-5 with 20 and 50 filters"),
    ModelEntry("vgg16_cifar", vgg16_cifar, "cifar10", _CIFAR, 10, 14_977_728, "VGG-16, two-layer classifier"),
    ModelEntry("vgg19_cifar", vgg19_cifar, "cifar10", _CIFAR, 10, 20_024_000, "VGG-19, one-layer classifier"),
    ModelEntry("resnet20", resnet20, "cifar10", _CIFAR, 10, 268_336, "ResNet-20, zero-pad shortcuts"),
    ModelEntry("resnet56", resnet56, "cifar10", _CIFAR, 10, 848_944, "ResNet-56, zero-pad shortcuts"),
    ModelEntry("resnet110", resnet110, "cifar10", _CIFAR, 10, 1_719_856, "ResNet-110, zero-pad shortcuts"),
    ModelEntry("densenet40", densenet40, "cifar10", _CIFAR, 10, 1_040_568, "DenseNet-40, growth 12"),
    ModelEntry("densenet_bc100", densenet_bc100, "cifar10", _CIFAR, 10, 745_164, "DenseNet-BC-100, growth 12"),
    ModelEntry("mobilenet_cifar", mobilenet_cifar, "cifar100", _CIFAR, 100, 849_344, "MobileNet of eight blocks"),
    ModelEntry("vit", vit, "cifar10", _CIFAR, 10, 2_665_344, "vision transformer, 6 layers of 192, patches of 4 × 4"),
    ModelEntry("wrn16_4", wrn16_4, "cifar100", _CIFAR, 100, 2_768_304, "wide ResNet, depth 16, width 4"),
    ModelEntry("wrn28_10", wrn28_10, "cifar10", _CIFAR, 10, 36_461_232, "wide ResNet, depth 28, width 10"),
    ModelEntry("vgg16", vgg16, "imagefolder", _IMAGENET, 1000, 138_344_128, "VGG-16 of torchvision"),
    ModelEntry("resnet50", resnet50, "imagefolder", _IMAGENET, 1000, 25_502_912, "ResNet-50 of torchvision"),
    ModelEntry(
        "efficientnet_b0",
        efficientnet_b0,
        "imagefolder",
        _IMAGENET,
        1000,
        5_236_192,
        "EfficientNet-B0 of torchvision",
    ),
    ModelEntry(
        "lstm_lm",
        lstm_lm,
        "wikitext2",
        (35,),
        33_278,
        85_917_000,
        "word language model, 2 × LSTM 1500, tied embedding",
        tokens=True,
        recurrent=True,
    ),
    ModelEntry(
        "transformer_lm",
        transformer_lm,
        "wikitext2",
        (128,),
        33_278,
        13_237_760,
        "word language model, decoder of 6 layers of 256, tied embedding",
        tokens=True,
    ),
    ModelEntry("gru", gru, "mnist", _GREY, 10, 202_240, "a GRU of 256, images 4 pixels at a time", recurrent=True),
    ModelEntry("indrnn", indrnn, "mnist", _GREY, 10, 86_784, "six IndRNN layers of 128, images row by row"),
    ModelEntry("minilm", minilm, "sst2", (64,), 2, 22_338_048, "MiniLM-L6, encoder of 6 layers of 384", sentences=True),
    ModelEntry("map_fit", map_fit, "random", (64,), 64, 12_288, "three layers of 64, for the map-fitting test"),
)


def names() -> tuple[str, ...]:
    return tuple(model.name for model in MODELS)


def entry(name: str) -> ModelEntry:
    """The entry of a name; an unknown name is an error that suggests similar ones."""
    for model in MODELS:
        if model.name == name:
            return model
    hint = did_you_mean(name, names(), f"the models are {', '.join(names())}", most=3)
    raise ValueError(f"expected the name of a model, got {name!r}: {hint}")


def create(name: str, num_classes: int | None = None, **options: Any) -> nn.Module:
    """Build a network with fresh random weights. `num_classes` changes the last layer only.

    `options` are those of the network's builder, e.g. dropout=0.5 for `lstm_lm`.
    """
    model = entry(name)
    allowed = inspect.signature(model.builder).parameters
    if unknown := sorted(options.keys() - allowed.keys()):
        hint = did_you_mean(unknown[0], allowed, "correct or drop it")
        raise TypeError(f"{name} takes the options {', '.join(allowed)}, got {', '.join(unknown)}: {hint}")
    classes = model.num_classes if num_classes is None else num_classes
    if not hasattr(classes, "__index__") or isinstance(classes, bool):
        raise TypeError(f"expected a whole number as num_classes, got {classes!r}")
    if classes < 1:
        raise ValueError(f"expected num_classes of at least 1, got {classes}")
    return model.builder(num_classes=classes, **options)


_FEWEST_TOKENS = 1000  # every vocabulary of sentences has as many
_LARGEST_OPTION = 1 << 20  # a width or a number of layers


@contextmanager
def at_most(registrations: int, options: Mapping[str, Any], source: str) -> Iterator[None]:
    """Refuse a network with more modules and parameters than this. The `options` come from a file, `source`, and could
    request a billion layers, which would take forever to build."""
    for name, value in options.items():
        if isinstance(value, int | float) and abs(value) > _LARGEST_OPTION:
            raise ValueError(
                f"expected {name} of at most {_LARGEST_OPTION} among the options of a network in {source}, got "
                f"{value}: correct it"
            )
    count, thread = 0, threading.get_ident()

    def note(module: nn.Module, name: str, registered: object) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if count > registrations:
            raise ValueError(
                f"expected options of a network with at most {registrations} modules and parameters in {source}, got "
                f"more: correct the number of its layers"
            )

    hooks = [register_module_module_registration_hook(note), register_module_parameter_registration_hook(note)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def table() -> list[tuple[str, str, int]]:
    """One row per network for listings: (name, data set, weights)."""
    return [(model.name, model.data, model.weights) for model in MODELS]


def example_input(name: str, batch: int = 2, *, num_classes: int | None = None) -> Tensor:
    """A random batch of the kind the network takes; for a language model, word ids below `num_classes`."""
    model = entry(name)
    if model.tokens:
        words = model.num_classes if num_classes is None else num_classes
        return torch.randint(words, (*model.input_shape, batch))
    if model.sentences:
        return torch.randint(1, _FEWEST_TOKENS, (batch, *model.input_shape))
    return torch.randn(batch, *model.input_shape)
