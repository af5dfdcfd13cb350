"""Two processes that want the same folder at the same moment: one gets it, however they come and go."""

import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.lab.training.folder_lock import NAME, only_one

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="files are not locked there")

# Takes the folder again and again; while it has it nobody else may be inside.
COMES_AND_GOES = """
import os, sys, time
from pathlib import Path
from gossamer.lab.training.folder_lock import only_one

folder, taken, until = Path(sys.argv[1]), 0, time.monotonic() + 1.5
while time.monotonic() < until:
    try:
        with only_one(folder):
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
            os.unlink(folder / "inside")
            taken += 1
    except ValueError:
        pass
print(taken)
"""


def test_never_two_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMES_AND_GOES, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        taken, problem = process.communicate(timeout=60)
        assert process.returncode == 0, problem
        assert int(taken) > 10
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_leaves_behind_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    with only_one(tmp_path):
        assert (tmp_path / NAME).exists()
    assert list(tmp_path.iterdir()) == []
