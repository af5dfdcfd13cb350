"""A lock that allows one process at a time in the folder of a run.

Two processes that run the same command would write the same checkpoints and the same log. The operating system holds
the lock on a file and releases it however the process ends, so a kill leaves no stale lock; processes that load images
do not inherit it. The holder removes the file at the end. A process that opened the file before holds a lock on an
unlinked file and tries again.
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
    """Lock a folder; raise an error if another process holds it. Does nothing if the system cannot lock files."""
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
