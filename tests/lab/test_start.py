"""The command before the package is there, and with streams that nobody listens to."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from rich.console import Console

from gossamer import cli
from gossamer.cli.console import lines_to

SOURCE = Path(__file__).parents[2] / "src"
TINY = ["--set", "epochs=1", "model_options.width=2", "device=cpu"]
# Stands for torch, whose import is cut short; here in a part that swallows whatever is raised in it.
TORCH = """
import os, signal, sys, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
except BaseException:
    pass
sys.exit("torch was imported")
"""


def start(folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Start the command with a torch of our own, as its script does; from the package it is the same function."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(TORCH)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}"}
    command = [sys.executable, "-c", "from gossamer_start import main; main()", "list"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
def test_an_interrupt_while_it_starts_is_one_line(tmp_path: Path) -> None:
    found = start(tmp_path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert (found.returncode, found.stdout) == (130, "")
    assert found.stderr == "gossamer: stopped while it was starting\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
def test_interrupts_that_are_ignored_stay_so(tmp_path: Path) -> None:
    found = start(tmp_path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (found.returncode, found.stderr) == (1, "torch was imported\n")


def test_an_interrupt_before_there_is_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tyro, "cli", stop)
    with pytest.raises(SystemExit, match="130"):
        cli.main(["list"])
    assert capsys.readouterr().err == "gossamer: stopped\n"


@pytest.mark.skipif(sys.platform == "win32", reason="streams are closed in another way there")
def test_a_run_whose_streams_are_closed(tmp_path: Path) -> None:
    """2>&- : the lock, the log or a checkpoint would have been file number 2."""
    shell = f'exec "{sys.executable}" -m gossamer train digits --out "{tmp_path}" {" ".join(TINY)} 2>&- >&-'
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert subprocess.run(["sh", "-c", shell], env=environment, timeout=120).returncode == 0
    assert {"result.json", "model.safetensors", "log.jsonl"} <= {path.name for path in tmp_path.iterdir()}


def test_closed_streams_lead_nowhere() -> None:
    code = """
import os, sys
for number in (1, 2): os.close(number)
sys.stdout = sys.stderr = None
from gossamer_start import open_closed_streams
open_closed_streams()
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
    os.write(2, b"of a library in C")
    print("of Python", file=sys.stderr)
    print("of Python")
"""
    path = os.devnull if sys.platform == "win32" else "/dev/null"
    command = [sys.executable, "-c", code, path]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SOURCE)}, timeout=60).returncode == 0


class Gone(io.StringIO):
    """A stream that nobody reads."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.filterwarnings("always:the output of PlainLines could not be written")
@pytest.mark.parametrize("number", [errno.EBADF, errno.EPIPE, errno.EIO])
def test_a_run_goes_on_where_its_progress_cannot_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Gone(number))
        with pytest.raises(SystemExit) as stop:
            cli.main(["train", "digits", "--out", str(tmp_path), *TINY])
        assert not stop.value.code
        with pytest.raises(SystemExit, match="2"):  # and an error that nobody hears is still one
            cli.main(["train", "digitz", "--out", str(tmp_path)])
    assert (tmp_path / "result.json").is_file()


def test_a_sweep_goes_on_where_nobody_reads_its_lines(capfd: pytest.CaptureFixture[str]) -> None:
    """At a broken pipe rich redirects stdout and asks for the end of the program."""
    kept = os.dup(1)
    try:
        show = lines_to(Console(file=Gone(errno.EPIPE)))
        show("first")
        show("second")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    shown = Console(file=io.StringIO())
    lines_to(shown)("third")
    assert shown.file.getvalue() == "third\n"  # type: ignore[attr-defined]
