"""The help of every command as text, which `gossamer_start` shows without importing torch.

`python -m gossamer.cli.help_texts` writes the file, and a test compares it with the commands.
"""

import contextlib
import io
import json
import os
from pathlib import Path
from unittest import mock

from gossamer.cli.commands import COMMANDS, parse
from gossamer_start import HELP


def help_texts() -> dict[str, str]:
    """The help of each command by its name, and under "" that of the program, for a terminal of 80 columns."""
    return {name: _help(name) for name in ("", *COMMANDS)}


def write(path: Path = HELP) -> None:
    path.write_text(json.dumps(help_texts(), ensure_ascii=False, indent=1) + "\n", "utf-8")


def _help(command: str) -> str:
    shown = io.StringIO()
    terminal = mock.patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"})
    with terminal, contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        parse([*filter(None, [command]), "--help"])
    return "\n".join(line.rstrip() for line in shown.getvalue().strip("\n").splitlines()) + "\n"


if __name__ == "__main__":
    write()
