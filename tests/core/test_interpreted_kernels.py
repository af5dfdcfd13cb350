"""The GPU kernels give what torch gives, seen with Triton's interpreter on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("program", ["learning_kernels_on_cpu.py", "../lab/batched/kernels_on_cpu.py"])
def test_kernels_agree_with_torch(program: str) -> None:
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / program)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
