"""Files that get their name only when they are complete and on disk."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, *, before: Callable[[], object] = lambda: None) -> Iterator[BinaryIO]:
    """Open a temporary file, which replaces the one at `path` when the block ends, and is removed after an error.

    `before` is called just before the file is renamed. If `path` is a link, its target is replaced.
    """
    path = through_links(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        before()
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def through_links(path: Path) -> Path:
    """The target of a symbolic link, to be written instead of the link, which a rename would replace."""
    if not path.is_symlink():
        return path
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise OSError(f"expected a file to write to, got {path}, a broken link ({error})") from error


def _sync_folder(folder: Path) -> None:
    """Make the new name durable, if the system can open folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except (PermissionError, IsADirectoryError):
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
