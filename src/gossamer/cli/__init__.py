"""The command line. Each file here has the commands of one kind: a command is a frozen dataclass whose fields are its
options, with a method that executes it.

Errors are one message on stderr and exit code 2; `--debug` shows the traceback. A run stopped by Ctrl-C exits with 130
and resumes when the same command is given again.
"""

import errno
import io
import platform
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Protocol, TextIO, runtime_checkable

import torch
from rich.console import Console

import gossamer
from gossamer.cli.arguments import nameless_folder, repeated
from gossamer.cli.commands import Executable, parse
from gossamer.cli.console import put, tell
from gossamer.cli.many import Compare, Sweep
from gossamer.cli.paper import Reproduce, TuneDecay
from gossamer.cli.train import Quickstart, Train, leads
from gossamer.cli.tune import Tune
from gossamer.lab.checkpoint import Checkpoints
from gossamer.lab.training import Interrupted
from gossamer.lab.training.distributed import end_process
from gossamer_start import answered

# Errors caused by the user's input or machine. Anything else is a bug in gossamer and keeps its traceback.
_EXPECTED = (ValueError, OSError, ImportError, ArithmeticError, RuntimeError)


@runtime_checkable
class _AnswersPrograms(Protocol):
    """A command with the option --json."""

    @property
    def json(self) -> bool: ...


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    try:
        _main(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        tell("gossamer: stopped")  # before there was a command
        sys.exit(130)


def _main(given: list[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # λ and × are missing in some encodings, which should be no error
            stream.reconfigure(errors="replace")
    if given == ["--version"]:
        print(f"gossamer {gossamer.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        sys.exit(0)
    wrong = nameless_folder(given) or repeated(given)
    if wrong:
        tell(f"gossamer: {wrong}")
        sys.exit(2)
    if (code := answered(given)) is not None:
        sys.exit(code)
    end_process(run(parse(given)))


def run(command: Executable) -> int:
    """Execute a command and return its exit code."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            for_programs = isinstance(command, _AnswersPrograms) and command.json
            # no markup: names of files and layers may contain brackets
            answer = command.carry_out(Console(markup=False, quiet=for_programs))
            if answer is not None and for_programs and leads():
                put(answer)
        return 0 if answer is None else answer.code
    except Interrupted as stopped:
        if leads():  # all processes have stopped
            tell(stopped)
        return 130
    except KeyboardInterrupt:
        tell(f"gossamer: stopped{_afterwards(command)}")
        return 130
    except _EXPECTED as error:
        if command.debug:
            traceback.print_exc()
        else:
            tell(f"gossamer: {error}{_remedy(error)}")
        return 2


_REMEDIES = {
    errno.ENOSPC: "free some space on the disk",
    errno.EDQUOT: "free some space on the disk",
    errno.EACCES: "choose another place, or change its permissions",
    errno.EPERM: "choose another place, or change its permissions",
    errno.EROFS: "choose a writable place",
    errno.ENOTDIR: "choose a folder, as a file is in the way",
    errno.EEXIST: "choose a folder, as a file is in the way",
}


def _remedy(error: Exception) -> str:
    """Advice on an error of the operating system."""
    advice = _REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    return f": {advice}, and run the command again" if advice else ""


def _afterwards(command: Executable) -> str:
    """What the same command would do after an immediate stop (a second Ctrl-C, or before the first step), in words."""
    if isinstance(command, Train):
        return f" at once; if the same command is run again, {Checkpoints(command.folder()).next_time()}"
    if isinstance(command, Quickstart | Sweep | Compare | Tune | Reproduce | TuneDecay):
        return "; finished runs are kept, and the same command resumes the rest, from a checkpoint if there is one"
    return ""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    tell(f"warning: {message}")
