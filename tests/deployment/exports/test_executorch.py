"""ExecuTorch programs: run on this machine, or compiled for an Ethos-U. They need an environment of their own, because
`executorch[ethos-u]` pins packages that onnx needs in newer versions (see docs/deploy.md)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer.deployment import exports

if find_spec("executorch") is None:
    pytest.skip("executorch is not installed", allow_module_level=True)
needs_vela = pytest.mark.skipif(find_spec("ethosu") is None, reason="ethos-u-vela is not installed")


def mlp(density: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand_like(parameter) < density)
    return model.eval()


def two_of_four(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                groups = parameter.view(-1, 4)
                groups.mul_(torch.zeros_like(groups).scatter_(1, groups.abs().topk(2, 1).indices, 1.0))
    return model


def compared(exported: exports.Exported) -> dict[str, exports.Comparison]:
    return {each.quantity: each for each in exported.comparisons}


def test_a_program_for_cpus_runs_and_is_not_smaller(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = mlp(0.1)
    exported = exports.to_executorch(model, torch.randn(1, 256), tmp_path / "m.pte")
    assert capfd.readouterr() == ("", "")
    assert exported.difference is not None
    assert exported.difference < 1e-5
    assert exported.zeros == sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1)
    assert exported.file_bytes == (tmp_path / "m.pte").stat().st_size
    assert compared(exported)["bytes of the file"].ratio == pytest.approx(1.0, abs=0.01)


@needs_vela
@pytest.mark.parametrize("target", ["ethos-u55-128", "ethos-u85-256"])
def test_an_npu_reads_fewer_bytes_in_fewer_cycles(
    tmp_path: Path, target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    samples = [torch.randn(1, 256) for _ in range(4)]
    exported = exports.to_executorch(
        mlp(0.1), torch.randn(1, 256), tmp_path / "m.pte", target=target, calibration=samples
    )
    assert capfd.readouterr() == ("", "")
    table = compared(exported)
    assert table["bytes of encoded weights"].ratio > 4
    assert table["bytes of the file"].ratio > 3
    assert table["cycles (estimate)"].ratio > 3
    assert table["bytes of the file"].sparse == exported.file_bytes == (tmp_path / "m.pte").stat().st_size
    assert exported.difference is not None
    assert 0 < exported.difference < 0.1
    assert not any("random" in note for note in exported.notes)


@needs_vela
def test_two_of_four_halves_the_products_of_an_ethos_u85(tmp_path: Path) -> None:
    model = two_of_four(mlp(1.0))
    for target, ratio in (("ethos-u85-128", 2.0), ("ethos-u55-128", 1.0)):
        exported = exports.to_executorch(model, torch.randn(1, 256), tmp_path / "m.pte", target=target)
        assert compared(exported)["multiplications"].ratio == pytest.approx(ratio, abs=0.01)
        assert "2 of 2 layers have 2:4 zeros" in str(exported) or target == "ethos-u55-128"
        assert "calibrated with random inputs" in str(exported)


@needs_vela
def test_a_network_that_an_npu_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a network that runs on ethos-u55-128, .*: export it for xnnpack"):
        exports.to_executorch(nn.Embedding(5, 3), torch.tensor([[1]]), tmp_path / "m.pte", target="ethos-u55-128")
    assert not (tmp_path / "m.pte").exists()


def test_unknown_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a target from xnnpack, .*ethos-u85-256.*, got 'u85'"):
        exports.to_executorch(mlp(0.1), torch.randn(1, 256), tmp_path / "m.pte", target="u85")
