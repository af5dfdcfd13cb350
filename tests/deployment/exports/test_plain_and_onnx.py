"""Exports: every zero and every output survives, by readers that are not ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gossamer.deployment import exports
from gossamer.deployment.exports import checks, plain
from gossamer.lab import models


def sparse(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand_like(parameter) < 0.1)
    return model.eval()


def language_model() -> tuple[nn.Module, Tensor, int]:
    model = sparse(models.create("lstm_lm", num_classes=50, hidden=12))
    return model, torch.randint(0, 50, (5, 2)), 1


def image_model() -> tuple[nn.Module, Tensor, int]:
    return sparse(models.create("resnet20")), torch.randn(2, 3, 32, 32), 0


def zeros(model: nn.Module) -> int:
    return sum(int((parameter == 0).sum()) for parameter in model.parameters() if parameter.ndim > 1)


@pytest.mark.parametrize("make", [language_model, image_model])
def test_onnx_runs_elsewhere_at_any_batch_size(make: Callable[[], Any], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, example, axis = make()
    exported = exports.to_onnx(model, example, tmp_path / "model.onnx", batch_axis=axis)
    assert exported.zeros == zeros(model) > 0
    assert exported.difference is not None
    assert exported.file_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    x = torch.cat([example] * 3, axis)
    out = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    with torch.no_grad():
        expected = model(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [language_model, image_model])
def test_torch_export_is_read_back(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example, axis = make()
    model.train()
    exported = exports.to_torch(model, example, tmp_path / "model.pt2", batch_axis=axis)
    assert model.training
    assert exported.zeros == zeros(model)
    again = torch.export.load(tmp_path / "model.pt2").module()
    x = torch.cat([example] * 3, axis)
    with torch.no_grad():
        torch.testing.assert_close(again(x), model.eval()(x))


def test_plain_safetensors_have_every_name(tmp_path: Path) -> None:
    model, _, _ = language_model()
    exports.to_dense(model, tmp_path / "model.safetensors")
    again = load_file(tmp_path / "model.safetensors")
    assert again.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor)


def test_an_exporter_that_loses_zeros_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example, axis = image_model()
    counts = iter([10, 9])
    monkeypatch.setattr(plain, "zeros", lambda tensors: next(counts))
    with pytest.raises(RuntimeError, match=r"expected 10 zeros in .*, got 9"):
        exports.to_torch(model, example, tmp_path / "model.pt2", batch_axis=axis)


def test_a_folder_that_is_not_there_is_told_before_the_work(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for write in (exports.to_onnx, exports.to_torch):
        with pytest.raises(
            FileNotFoundError, match=r"expected a folder to write model to, got .*nowhere: create it first"
        ):
            write(model, torch.zeros(2, 2), tmp_path / "nowhere" / "model")
    with pytest.raises(FileNotFoundError, match="create it first"):
        exports.to_dense(model, tmp_path / "nowhere" / "model")
    with pytest.raises(IsADirectoryError, match="which is a folder"):
        exports.to_dense(model, tmp_path)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("export", [exports.to_onnx, exports.to_torch])
def test_a_model_that_cannot_be_traced_is_told_in_a_sentence(
    export: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(ValueError, match=r"but for Branches it reports: Could not guard on data-dependent.*one by one"):
        export(Branches(), torch.randn(2, 3), tmp_path / "model")
    assert capfd.readouterr().err == ""


def test_outputs_that_differ_are_found_out() -> None:
    with pytest.raises(RuntimeError, match=r"within 0.0001 of the model's, got 5.0e-01"):
        checks.difference(Path("x"), [torch.ones(2)], torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="got nan"):
        checks.difference(Path("x"), [torch.full((2,), torch.nan)], torch.ones(2))
    with pytest.raises(RuntimeError, match="other shapes"):
        checks.difference(Path("x"), [torch.ones(3)], torch.ones(2))


def test_missing_packages_are_named_together() -> None:
    with pytest.raises(ImportError, match=r"got no nonesuch and no nonesuch2: pip install nonesuch nonesuch2"):
        checks.require("numpy", "nonesuch", "nonesuch2")


def test_conjugate_and_negative_views_are_written_with_their_values(tmp_path: Path) -> None:
    values = torch.randn(3, 4, dtype=torch.complex64)
    exports.to_dense({"a": values, "conj": values.conj(), "imag": values.conj().imag}, tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["conj"], values.conj().resolve_conj())
    assert torch.equal(found["imag"], -values.imag)
