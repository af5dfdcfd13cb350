"""The folder that the records of many runs go into: held by one process, tried before the first step, and in the end
written record by record, so that one that fails takes no other with it."""

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from gossamer.lab.batched.checkpoint import remove
from gossamer.lab.training.checkpoint import remove_unfinished
from gossamer.lab.training.folder_lock import only_one
from gossamer.lab.training.result import writing

T = TypeVar("T")
_ROOM = 1 << 14  # bytes, more than a record has


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Hold a folder for records; an error where nothing can be written to it, or another process trains there."""
    with ExitStack() as lock:
        with writing(out, "records"):
            out.mkdir(parents=True, exist_ok=True)
            lock.enter_context(only_one(out))
            _try_writing(out)
        yield


def portions(missing: Collection[T], begun: Iterable[list[T]], together: int) -> list[list[T]]:
    """The runs without a record, so many at a time.

    A stack that has a checkpoint comes first, with all the runs that it was begun with: only these go on from it, also
    where some have got their records. One with more runs than are wanted at a time may not fit, and is left alone.
    """
    left, found = [*missing], []
    for stack in begun:
        if len(stack) <= together and any(run in left for run in stack):
            found.append(stack)
            left = [run for run in left if run not in stack]
    return found + [left[first : first + together] for first in range(0, len(left), together)]


class Leaving:
    """Writes what finished runs leave behind. What fails is noted, and the rest is still tried."""

    def __init__(self) -> None:
        self._failed: list[tuple[Path, OSError]] = []

    def write(self, record: Path, steps: Sequence[Callable[[], object]]) -> None:
        """Take steps of the run with this record, which is written last; none more once one has failed."""
        if record.exists() or any(record == path for path, _ in self._failed):
            return
        for path in (record, record.with_suffix(".safetensors")):
            remove_unfinished(path)
        try:
            for step in steps:
                step()
        except OSError as error:
            self._failed.append((record, error))

    def finish(self, checkpoint: Path) -> None:
        """Remove the checkpoint, which nobody needs now; or keep it, and say which records are missing."""
        if not self._failed:
            remove(checkpoint)
            return
        names = "; ".join(f"{path} ({error})" for path, error in self._failed)
        kept = f"go on from {checkpoint.name}" if checkpoint.exists() else "begin again, as there is no checkpoint"
        raise OSError(
            f"the last step is done, but there are records that cannot be written: {names}: free some space on the "
            f"disk, or change what is in the way, and run the same command again; these runs then {kept}"
        ) from self._failed[0][1]


def _try_writing(out: Path) -> None:
    with tempfile.TemporaryFile(dir=out) as file:
        file.write(bytes(_ROOM))
        file.flush()
        os.fsync(file.fileno())
