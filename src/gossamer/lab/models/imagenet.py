"""VGG-16, ResNet-50 and EfficientNet-B0 for ImageNet, as torchvision builds them.

Torchvision is optional (`pip install 'gossamer[vision]'`) and imported only when one of these networks is
built. Pretrained weights come through torchvision's own loader, which downloads and checks them.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch
from torch import nn

__all__ = ["efficientnet_b0", "resnet50", "vgg16"]

_IMAGENET_CLASSES = 1000
_DEFINED: list[torch.library.Library] = []  # the names exist as long as it does


def _torchvision_models() -> ModuleType:
    try:
        return importlib.import_module("torchvision.models")
    except ImportError as error:
        raise ImportError(
            "this network is built by torchvision, which is not installed; run pip install 'gossamer[vision]'"
        ) from error
    except RuntimeError:
        return _without_its_operators()


def _without_its_operators() -> ModuleType:
    """Import a torchvision whose compiled library does not fit this torch (a plain install next to a CPU-only torch,
    say).

    The import fails at two operators of detection networks. With their names defined, the networks here can be built.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    try:
        names = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            names.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
        _DEFINED.append(names)
        return importlib.import_module("torchvision.models")
    except RuntimeError as error:
        raise ImportError(
            f"torchvision is installed but was built for another torch ({error}); install the "
            "torchvision release, and the build of it (CPU or CUDA), that belong to your torch"
        ) from error


def _build(name: str, num_classes: int, pretrained: bool) -> nn.Module:
    models = _torchvision_models()
    if not pretrained:
        network: nn.Module = models.get_model(name, num_classes=num_classes)
        return network
    try:
        network = models.get_model(name, weights="DEFAULT")
    except OSError as error:  # no connection, or a full disk
        raise OSError(
            f"expected torchvision to fetch the pretrained weights of {name} into {torch.hub.get_dir()}, got {error}: "
            "put its file into checkpoints there, or start from random weights with model_options.pretrained=false"
        ) from error
    if num_classes != _IMAGENET_CLASSES:
        _replace_last_linear(network, num_classes)
    return network


def _replace_last_linear(network: nn.Module, num_classes: int) -> None:
    """Put a fresh linear layer with `num_classes` outputs where the network's last one is."""
    path, last = [(path, part) for path, part in network.named_modules() if isinstance(part, nn.Linear)][-1]
    fresh = nn.Linear(last.in_features, num_classes, bias=last.bias is not None)
    nn.init.kaiming_normal_(fresh.weight, mode="fan_in", nonlinearity="relu")
    if fresh.bias is not None:
        nn.init.zeros_(fresh.bias)
    parent, _, name = path.rpartition(".")
    network.get_submodule(parent).register_module(name, fresh)


def vgg16(num_classes: int = _IMAGENET_CLASSES, pretrained: bool = False) -> nn.Module:
    return _build("vgg16", num_classes, pretrained)


def resnet50(num_classes: int = _IMAGENET_CLASSES, pretrained: bool = False) -> nn.Module:
    return _build("resnet50", num_classes, pretrained)


def efficientnet_b0(num_classes: int = _IMAGENET_CLASSES, pretrained: bool = False) -> nn.Module:
    return _build("efficientnet_b0", num_classes, pretrained)
