"""A race in mid-run as one safetensors file: written whole or not at all, and gone on from by the same command.

Checksums go with the tensors and with what is told about them, as a race that goes on from wrong numbers would end with
a wrong table. The file before is kept beside the newest, and taken where that one is damaged.
"""

import json
import os
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor

from gossamer.io.container import Section, read_header
from gossamer.io.reader import read_plain
from gossamer.lab.training.checkpoint import remove_unfinished, write_atomically

T = TypeVar("T")
ENDING = ".race.safetensors"
_FORMAT = 2  # 1 had the state of methods from before they shared one protocol


class Damaged(ValueError):
    """A file that is not, or is no longer, the checkpoint of a race."""


class Keeper:
    """Writes a race now and then, and knows what is lost where it stops.

    A disk that does not take a checkpoint is no reason to stop: there is a warning, and the one before stays.
    """

    def __init__(self, path: Path | None, minutes: float, done: int) -> None:
        """`done` steps are in the file already; without a path nothing is ever written."""
        self._path, self._seconds, self._kept = path, 60 * minutes, done
        self._last = time.perf_counter()

    def is_due(self) -> bool:
        return self._path is not None and time.perf_counter() - self._last >= self._seconds

    def keep(self, save: Callable[[Path], None], done: int) -> bool:
        """Let `save` write what is there after so many steps; whether that went well."""
        if self._path is None:
            return False
        self._last = time.perf_counter()
        try:
            save(self._path)
        except OSError as error:
            warnings.warn(
                f"no checkpoint after step {done}: writing {self._path} failed ({error}); {self._next_time()}; free "
                "some space on the disk",
                stacklevel=2,
            )
            return False
        self._kept = done
        return True

    def farewell(self, done: int, total: int, *, saved: bool) -> str:
        """What is said of a stop that was asked for once."""
        stopped = f"stopped after step {done} of {total}"
        if saved:
            return f"{stopped}; a checkpoint is in {self._path}: run the same command again to go on"
        why = "there is no file for a checkpoint" if self._path is None else "no checkpoint could be written"
        return f"{stopped}, but {why}: run the same command again; {self._next_time()}"

    def loss(self, done: int, total: int) -> str:
        """What is said of a stop at once."""
        lost = {0: "nothing is lost", 1: "one step is lost"}.get(
            done - self._kept, f"{done - self._kept} steps are lost"
        )
        return f"stopped at once after step {done} of {total}, {lost}: run the same command again; {self._next_time()}"

    def _next_time(self) -> str:
        if not self._kept:
            return "its runs begin again, as there is no checkpoint of them"
        return f"its runs go on from the checkpoint of step {self._kept}"


def between(left: int, out: Path) -> str:
    """What is said of a stop between two stacks of runs."""
    return (
        f"stopped before the last {left} run{'s' * (left != 1)}; the others have their records in {out}: run the same "
        "command again to go on"
    )


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a race; the file that has this name becomes the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    told = json.dumps({"format": _FORMAT, "crc32": _checksum(held), **about})
    content = save(held, metadata={"race": told, "crc32": _checksum_of_text(told)})
    write_atomically(path, lambda file: file.write(content), before=lambda path, digest: _set_aside(path))


def read_newest(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest race that is whole, or None where there is none. What is damaged is passed over, with a warning."""
    places = [each for each in (path, before(path)) if each.exists()]
    for place in places:
        try:
            found = read(place)
        except Damaged as error:
            remedy = "its runs begin again" if place == places[-1] else "going on from the one before"
            warnings.warn(f"{error}; {remedy}", stacklevel=2)
            continue
        if place != path:
            os.replace(place, path)  # or the damaged one would be the next to be kept, and push it out
        return found
    return None


def before(path: Path) -> Path:
    """Where the checkpoint before the newest is."""
    return path.with_suffix(".before.safetensors")


def remove(path: Path) -> None:
    """Remove the checkpoints of a race, and what a kill has left unfinished: its outcomes are safe."""
    for each in (path, before(path)):
        each.unlink(missing_ok=True)
    remove_unfinished(path)


def begun(out: Path, runs: Mapping[str, T], path_of: Callable[[Sequence[T]], Path]) -> list[list[T]]:
    """The stacks of these runs, by their identities, that have a checkpoint in the folder.

    Teachers come last in a stack, and its name is without them.
    """
    found = []
    # Where a kill came between the two renames of `write` there is only the one before.
    alone = [each.with_suffix("").with_suffix(".safetensors") for each in out.glob(f"*{before(Path(ENDING[1:])).name}")]
    for path in sorted({*out.glob(f"*{ENDING}"), *alone}):
        place = path if path.exists() else before(path)
        try:
            with place.open("rb") as file:
                about = _about(read_header(place, file)[1], place)
        except (OSError, ValueError):
            continue  # it is told when the runs begin
        stated = about.get("runs")
        names = [each for each in stated if isinstance(each, str)] if isinstance(stated, list) else []
        known = [runs[each] for each in takewhile(runs.__contains__, names)]
        found += [known[:end] for end in range(1, len(known) + 1) if path_of(known[:end]) == path]
    return found


def _set_aside(path: Path) -> None:
    if path.exists():
        os.replace(path, before(path))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and what was told about them, or None where there is no such file."""
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            sections, metadata = _header(path, file)
            about = _about(metadata, path)
            tensors = {name: read_plain(path, file, section) for name, section in sections.items()}
    except OSError as error:
        raise _no_race(path, str(error)) from error
    if about.get("crc32", got := _checksum(tensors)) != got:
        raise _no_race(path, "tensors that do not agree with their checksum")
    return tensors, about


def _header(path: Path, file: BinaryIO) -> tuple[dict[str, Section], dict[str, str]]:
    try:
        return read_header(path, file)
    except ValueError as error:
        raise _no_race(path, str(error)) from error


def _about(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    """What is told about a race in its file."""
    told = metadata.get("race", "")
    if metadata.get("crc32", got := _checksum_of_text(told)) != got:  # older files have none
        raise _no_race(path, "metadata that do not agree with their checksum")
    try:
        about = json.loads(told)
    except (RecursionError, ValueError) as error:
        raise _no_race(path, str(error)) from error
    if not isinstance(about, dict) or "format" not in about:
        raise _no_race(path, "other metadata")
    if about["format"] != _FORMAT:
        raise ValueError(
            f"expected the checkpoint of a race in format {_FORMAT}, got {about['format']!r} in {path}: "
            "go on with the version of gossamer that wrote it, or delete it to begin again"
        )
    return about


def fill_(wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy the tensors of a checkpoint into those that are wanted; all of them, or none."""
    wrong = [name for name, tensor in wanted.items() if name not in tensors or tensors[name].shape != tensor.shape]
    if wrong:
        raise ValueError(
            f"expected the checkpoint of a race in {path}, got one with no tensor of the right shape for "
            f"{', '.join(wrong[:4])}: delete it"
        )
    for name, tensor in wanted.items():
        tensor.copy_(tensors[name])


def _no_race(path: Path, got: str) -> Damaged:
    return Damaged(f"expected the checkpoint of a race in {path}, got something else ({got})")


def _checksum_of_text(text: str) -> str:
    return str(zlib.crc32(text.encode()))


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    running = 0
    for name, tensor in sorted(tensors.items()):
        running = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), running)
        running = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, running)
    return running


def random_state(device: torch.device) -> dict[str, Tensor]:
    """What dropout draws from."""
    states = {"random.cpu": torch.get_rng_state()}
    return {**states, "random.cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def set_random_state(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    try:
        if "random.cpu" in tensors:
            torch.set_rng_state(tensors["random.cpu"])
        if device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"expected the state of a random number generator in the checkpoint of a race, got another one ({error}): "
            "delete it"
        ) from error
