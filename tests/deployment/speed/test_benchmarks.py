"""The scripts in benchmarks/ that measure speed: what they compute besides time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parents[3] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_of_four_keeps_the_largest_pairs() -> None:
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, 0.0, 4.0]])
    assert script("gpu_sparse").two_of_four(weight).tolist() == [[0.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 4.0]]


@pytest.mark.filterwarnings("ignore:.*(beta|prototype|invariant).*:UserWarning")
def test_blocks_hold_the_whole_matrix_where_sizes_are_odd() -> None:
    torch.manual_seed(0)
    weight = torch.randn(37, 50) * (torch.rand(37, 50) < 0.1)
    blocks = script("gpu_sparse").blocks_of(weight, 16)
    assert blocks.shape == (48, 64)
    assert torch.equal(blocks.to_dense()[:37, :50], weight)


@pytest.mark.filterwarnings("ignore:.*(beta|prototype|invariant).*:UserWarning")
def test_formats_are_measured_or_say_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 64) * (torch.rand(32, 64) < 0.1)
    row = script("gpu_sparse").measure("layer", weight, 8, rounds=2)
    formats = row["formats"]
    assert formats["dense float32"]["error"] < 1e-5
    assert formats["CSR float32"]["error"] < 1e-5
    assert max(each["speedup"] for name, each in formats.items() if name.startswith("dense")) == 1.0
    assert formats["2:4 bfloat16"]["remark"].startswith("not possible: ")  # without a GPU
    assert row["sparsity"] == pytest.approx(float((weight == 0).float().mean()))
    assert "not possible" in capsys.readouterr().out


def test_random_masks_are_exact_in_every_layer() -> None:
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 20))
    script("speed_table").mask_at_random_(model, 0.95)
    assert [int(torch.count_nonzero(layer.weight)) for layer in model] == [100, 50]  # type: ignore[arg-type]
