"""Core ML packages, read back from the file by Apple's own reader."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer.deployment import exports
from gossamer.deployment.quiet import quiet

if find_spec("coremltools") is None:  # importing it here would warn
    pytest.skip("coremltools is not installed", allow_module_level=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(12, 16)
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.cells(x)[0][-1])
        return out


def sparse(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand_like(parameter) < 0.1)
    return model.eval()


def stored(path: Path) -> dict[str, Any]:
    """The values of the weights of linear layers in a package, from the file."""
    with quiet():
        import coremltools
        from coremltools.converters.mil.frontend.milproto.load import load

        package = coremltools.models.MLModel(str(path), skip_model_load=True)
        spec = package.get_spec()
        program = load(spec, specification_version=spec.specificationVersion, file_weights_dir=package.weights_dir)
        linear = [each for each in program.functions["main"].operations if each.op_type == "linear"]
        return {each.weight.name: each.weight.op.materialized_val_inference() for each in linear}


@pytest.mark.parametrize("int8", [False, True])
def test_zeros_are_exact_and_values_are_close(tmp_path: Path, int8: bool, capfd: pytest.CaptureFixture[str]) -> None:
    model = sparse(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)))
    with torch.no_grad():
        model[0].weight[3, 5] = 1e-12  # type: ignore[index, operator, union-attr]
    exported = exports.to_coreml(model, torch.randn(1, 64), tmp_path / "m.mlpackage", int8=int8)
    assert capfd.readouterr() == ("", "")  # coremltools logs and warns when it is imported
    weights = [layer.weight.detach() for layer in (model[0], model[2])]  # type: ignore[union-attr]
    assert exported.zeros == sum(int((weight == 0).sum()) for weight in weights)  # type: ignore[misc, arg-type]
    assert exported.checked.startswith("58 of 58 rows")
    assert exported.file_bytes == sum(f.stat().st_size for f in (tmp_path / "m.mlpackage").rglob("*") if f.is_file())
    assert [each.quantity for each in exported.comparisons] == [
        f"bytes with {kind} weights" for kind in (["float16", "int8"] if int8 else ["float16"])
    ]
    for weight, values in zip(weights, stored(tmp_path / "m.mlpackage").values(), strict=True):
        wanted = weight.numpy()  # type: ignore[operator]
        step = np.abs(wanted).max(1, keepdims=True) / 127 if int8 else 2**-11
        np.testing.assert_allclose(values, wanted, rtol=0, atol=float(np.max(step)) * 0.51 + 1e-4)
        assert not values[wanted == 0].any()
        if not int8:
            assert values[wanted != 0].all()


def test_a_large_layer_is_smaller_and_a_package_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.mlpackage"
    exports.to_coreml(sparse(nn.Linear(8, 8)), torch.randn(1, 8), path)
    exported = exports.to_coreml(sparse(nn.Linear(512, 512)), torch.randn(1, 512), path)
    (compared,) = exported.comparisons
    assert compared.ratio > 3
    assert compared.sparse == exported.file_bytes


def test_convolutions_and_reordered_gates_keep_their_zeros(tmp_path: Path) -> None:
    convolution = sparse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
    exported = exports.to_coreml(convolution, torch.randn(1, 3, 8, 8), tmp_path / "c.mlpackage")
    assert exported.checked.startswith("8 of 8 rows")
    exported = exports.to_coreml(sparse(Recurrent()), torch.randn(7, 1, 12), tmp_path / "r.mlpackage")
    assert exported.checked.startswith("133 of 133 rows")


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a Core ML package that ends in \.mlpackage, got "):
        exports.to_coreml(nn.Linear(2, 2), torch.randn(1, 2), tmp_path / "m.onnx")
    (tmp_path / "mine.mlpackage").mkdir()
    with pytest.raises(IsADirectoryError, match="which is a folder"):
        exports.to_coreml(nn.Linear(2, 2), torch.randn(1, 2), tmp_path / "mine.mlpackage")
