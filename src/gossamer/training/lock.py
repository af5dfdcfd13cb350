"""One process at a time in the folder of a run.

The same command given twice would have two processes write the same checkpoints and the same log. The lock is one of
the operating system's on a file, which it takes back from a process however that ends, so a kill leaves nothing behind;
processes that load images do not inherit it.
"""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_TAKEN = (errno.EACCES, errno.EAGAIN)


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold a file that exists; an error where another process holds it. Where files cannot be locked, do nothing."""
    if sys.platform == "win32":
        yield
        return
    with open(path, "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                raise ValueError(
                    f"another process trains the run in {path.parent} at this moment: wait for it, stop it, or choose "
                    "another folder"
                ) from None
        yield
