"""2:4 zeros in an ONNX file, as TensorRT looks for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gossamer.deployment import exports

pytest.importorskip("onnxscript")


class Net(nn.Module):
    """Products in all forms of ONNX: a convolution, a matrix with and without bias, and one on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.plain = nn.Linear(8, 12, bias=False)
        self.left = nn.Parameter(torch.randn(16, 12))
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(x))).mean(3).transpose(1, 2)  # samples, rows, channels
        x = (self.left @ self.plain(x).transpose(1, 2)).mean(2)
        out: Tensor = self.last(x)
        return out


def keep_two_of_four_(weight: Tensor) -> None:
    """Along the inputs, at each position of a kernel."""
    with torch.no_grad():
        inputs_last = weight.movedim(1, -1)
        groups = inputs_last.reshape(-1, 4)
        kept = torch.zeros_like(groups).scatter_(1, groups.abs().topk(2, 1).indices, 1.0)
        weight.mul_(kept.reshape(inputs_last.shape).movedim(-1, 1))


def two_of_four() -> Net:
    torch.manual_seed(0)
    model = Net()
    for weight in (model.second.weight, model.plain.weight, model.left, model.last.weight):
        keep_two_of_four_(weight)
    return model.eval()


def test_every_kind_of_product_is_recognised(tmp_path: Path) -> None:
    model = two_of_four()
    exported = exports.to_onnx(model, torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", pattern="2:4")
    (note,) = exported.notes
    assert note.startswith("4 of 5 layers have 2:4 zeros, not ")
    assert "4 does not divide its 3 inputs" in note
    (compared,) = exported.comparisons
    dense, first = sum(p.numel() for p in model.parameters() if p.ndim > 1), model.first.weight.numel()
    assert (compared.dense, compared.sparse) == (dense, first + (dense - first) // 2)
    assert "weights to multiply with 2:4" in str(exported)


def test_one_weight_too_many_is_found(tmp_path: Path) -> None:
    model, example = two_of_four(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        model.second.weight[0, :4, 1, 1] = 1.0
        model.last.weight[0, :4] = 1.0
    exported = exports.to_onnx(model, example, tmp_path / "m.onnx")
    assert exported.notes[0].startswith("2 of 5 layers")
    with pytest.raises(ValueError, match=r"at most 2 nonzeros of 4 .*, got more nonzeros in .* \(1 groups\), "):
        exports.to_onnx(model, example, tmp_path / "refused.onnx", pattern="2:4")
    assert not (tmp_path / "refused.onnx").exists()


def test_other_patterns_are_refused(tmp_path: Path) -> None:
    for pattern in ("row", "block:1x4"):
        with pytest.raises(ValueError, match=f"expected an N:M pattern .*, got '{pattern}'"):
            exports.to_onnx(two_of_four(), torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", pattern=pattern)
