"""Two processes that share every batch come to the result of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

PROGRAM = Path(__file__).with_name("distributed_run.py")


def run(folder: Path, *changes: str, processes: int = 2) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), str(folder), *changes],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run(folder, processes=1)
    return folder


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_processes_equal_one(alone: Path, tmp_path: Path, sharding: str) -> None:
    run(tmp_path, f"sharding={sharding}")
    one, two = load_file(alone / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(one[name] == 0, two[name] == 0)
    results = [json.loads((folder / "result.json").read_text()) for folder in (alone, tmp_path)]
    for key in ("connections", "sparsity", "accuracy", "flops"):
        assert results[0][key] == results[1][key]
    assert results[1]["hardware"]["processes"] == 2
