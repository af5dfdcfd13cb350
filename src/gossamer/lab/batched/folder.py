"""The folder of the records of many runs: locked by one process, tested before the first step, and written record by
record, so that one that fails does not affect the others."""

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from gossamer.lab.checkpoint import Checkpoints, remove_unfinished
from gossamer.lab.training.folder_lock import only_one
from gossamer.lab.training.result import writing

T = TypeVar("T")
_ROOM = 1 << 14  # bytes, more than a record takes


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Lock a folder for records; an error if it cannot be written, or if another process trains there."""
    with ExitStack() as lock:
        with writing(out, "records"):
            out.mkdir(parents=True, exist_ok=True)
            lock.enter_context(only_one(out))
            _try_writing(out)
        yield


def portions(missing: Collection[T], begun: Iterable[list[T]], together: int) -> list[list[T]]:
    """The runs without a record in batches of at most `together`.

    Batches that have a checkpoint come first, with all the runs that they were begun with: only the same batch can
    resume from it, even if some of its runs have their records. One of more runs than `together` may not fit into
    memory and is skipped.
    """
    left, found = [*missing], []
    for batch in begun:
        if len(batch) <= together and any(run in left for run in batch):
            found.append(batch)
            left = [run for run in left if run not in batch]
    return found + [left[first : first + together] for first in range(0, len(left), together)]


class RecordWriter:
    """Writes the files of finished runs. A failure is noted, and the other runs are still written."""

    def __init__(self) -> None:
        self._failed: list[tuple[Path, OSError]] = []

    def write(self, record: Path, steps: Sequence[Callable[[], object]]) -> None:
        """Write the files of the run with this record, the record last; after a failure the run's other steps are
        skipped."""
        if record.exists() or any(record == path for path, _ in self._failed):
            return
        for path in (record, record.with_suffix(".safetensors")):
            remove_unfinished(path)
        try:
            for step in steps:
                step()
        except OSError as error:
            self._failed.append((record, error))

    def finish(self, checkpoints: Checkpoints) -> None:
        """Remove the checkpoints; or keep them, and name the records that are missing."""
        if not self._failed:
            checkpoints.clear()
            return
        names = "; ".join(f"{path} ({error})" for path, error in self._failed)
        there = checkpoints.paths()
        kept = f"resume from {there[0].name}" if there else "start again, as there is no checkpoint"
        raise OSError(
            f"the last step is done, but some records cannot be written: {names}: free some space on the disk, or "
            f"remove what is in the way, and run the same command again; these runs then {kept}"
        ) from self._failed[0][1]


def _try_writing(out: Path) -> None:
    with tempfile.TemporaryFile(dir=out) as file:
        file.write(bytes(_ROOM))
        file.flush()
        os.fsync(file.fileno())
