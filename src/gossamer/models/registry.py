"""The networks by name, each with the number of its connections."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from torch import nn

from gossamer.models.resnet import resnet20, resnet56, resnet110

__all__ = ["MODELS", "ModelEntry", "create", "entry", "names", "table"]


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """A registered network.

    `connections` counts the weights of convolutions, linear and recurrent layers and embeddings at the default
    number of classes, shared weights once: no biases, no normalisation. `input_shape` is without the batch.
    """

    name: str
    builder: Callable[..., nn.Module]
    data: str
    input_shape: tuple[int, ...]
    num_classes: int
    connections: int
    description: str


_CIFAR = (3, 32, 32)

MODELS: tuple[ModelEntry, ...] = (
    ModelEntry("resnet20", resnet20, "cifar10", _CIFAR, 10, 268_336, "ResNet-20, zero-pad shortcuts"),
    ModelEntry("resnet56", resnet56, "cifar10", _CIFAR, 10, 848_944, "ResNet-56, zero-pad shortcuts"),
    ModelEntry("resnet110", resnet110, "cifar10", _CIFAR, 10, 1_719_856, "ResNet-110, zero-pad shortcuts"),
)


def names() -> tuple[str, ...]:
    return tuple(model.name for model in MODELS)


def entry(name: str) -> ModelEntry:
    """The entry of a name; an unknown name is an error that suggests the nearest ones."""
    for model in MODELS:
        if model.name == name:
            return model
    nearest = difflib.get_close_matches(name, names(), n=3) or names()
    raise ValueError(f"expected the name of a model, got {name!r}; did you mean {', '.join(nearest)}?")


def create(name: str, num_classes: int | None = None, **options: Any) -> nn.Module:
    """Build a network with fresh random weights. `num_classes` changes the last layer only."""
    model = entry(name)
    classes = model.num_classes if num_classes is None else num_classes
    if classes < 1:
        raise ValueError(f"expected num_classes of at least 1, got {classes}")
    return model.builder(num_classes=classes, **options)


def table() -> list[tuple[str, str, int]]:
    """One row a network, (name, data set, connections), for listings."""
    return [(model.name, model.data, model.connections) for model in MODELS]
