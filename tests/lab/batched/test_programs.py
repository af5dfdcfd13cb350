"""Sweeps, comparisons and runs without the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.lab.batched.__main__ import main

SMALL = ["epochs=3", "model_options.width=3", "batch_size=64", "validation=0", "device=cpu"]


def test_a_sweep_a_comparison_and_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["sweep", "digits", "--out", str(tmp_path / "sweep"), "--grid", "seed=0,1", "--set", *SMALL]
    assert main(sweep) == 0
    records = [json.loads(path.read_text()) for path in (tmp_path / "sweep").glob("*.json")]
    assert {record["seed"] for record in records} == {0, 1}
    compare = ["compare", "--net", "digits_cnn", "--data", "digits", "--methods", "dpf", "--sparsity", "0.5"]
    assert main([*compare, "--seeds", "1", "--epochs", "4", "--device", "cpu", "--out", str(tmp_path / "compare")]) == 0
    assert len(list((tmp_path / "compare").glob("*.json"))) == 2  # with the dense one
    assert main(["train", "digits", "--out", str(tmp_path / "run"), "--set", *SMALL]) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["sparsity"] == pytest.approx(0.95, abs=1e-3)
    assert "at 95.0% zeros" in capsys.readouterr().out


def test_they_need_no_command_line_tools() -> None:
    code = (
        "import sys; sys.modules['tyro'] = None; from gossamer.lab.batched.__main__ import main; main(['sweep', '-h'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--grid" in done.stdout
