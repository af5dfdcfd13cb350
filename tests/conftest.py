"""One thread a test process: the tests run side by side, and small networks gain nothing from more.

Torchvision is optional, and on a CPU-only torch its import asks for two operators that only its compiled library has.
They are defined here as stubs before anybody imports it: transformers do, where they find it.
"""

import importlib.util
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)

_HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
if _HAS_TORCHVISION and not torch.cuda.is_available():
    _OPERATORS = torch.library.Library("torchvision", "DEF")  # they live as long as it does
    for operator in ("nms", "qnms"):
        _OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture
def torchvision_or_skip() -> None:
    if not _HAS_TORCHVISION:
        pytest.skip("torchvision is not installed")
