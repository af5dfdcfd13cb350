"""One process at a time in the folder of a run.

The same command given twice would have two processes write the same checkpoints and the same log. The lock is one of
the operating system's on a file, which it takes back from a process however that ends, so what a kill leaves behind is
in nobody's way; processes that load images do not inherit it. Who holds the file removes it in the end: whoever has
opened it before that holds one without a name, and tries again.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl

NAME = ".lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold a folder; an error where another process holds it. Where files cannot be locked, do nothing."""
    if sys.platform == "win32":
        yield
        return
    path = folder / NAME
    file = _locked(path)
    while not _has_its_name(file, path):
        file.close()
        file = _locked(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _locked(path: Path) -> IO[bytes]:
    file = open(path, "ab")  # noqa: SIM115  (it is held open by the caller)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            file.close()
            raise ValueError(
                f"another process trains in {path.parent} at this moment: wait for it, stop it, or choose another "
                "folder"
            ) from None
    return file


def _has_its_name(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
