"""Torchvision is optional, and the build for CPU-only torch lacks two operators that its import asks for."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

_OPERATORS: list[torch.library.Library] = []


@pytest.fixture(scope="session")
def torchvision_or_skip() -> None:
    """Make torchvision importable: define the operators that only its compiled library brings, as stubs."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    if "torchvision" in sys.modules:
        return
    if not torch.cuda.is_available() and not _OPERATORS:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _OPERATORS.append(library)  # the definitions live as long as the library object
