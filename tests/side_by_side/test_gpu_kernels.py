"""The GPU kernels of stacked networks give what torch gives, seen with Triton's interpreter on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_agree_with_torch() -> None:
    pytest.importorskip("triton")
    program = Path(__file__).with_name("kernels_on_cpu.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
