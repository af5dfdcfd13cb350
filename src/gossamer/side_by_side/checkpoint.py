"""A race in mid-run as one safetensors file: written whole or not at all, and gone on from by the same command.

A checksum of the tensors goes with them, as a race that goes on from wrong numbers would end with a wrong table.
"""

import json
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gossamer.training.checkpoint import write_atomically

_FORMAT = 1


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
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    told = {"format": _FORMAT, "crc32": _checksum(held), **about}
    content = save(held, metadata={"race": json.dumps(told)})
    write_atomically(path, lambda file: file.write(content))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and what was told about them, or None where there is no such file."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("race", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, RecursionError, ValueError) as error:
        raise _no_race(path, str(error)) from error
    if not isinstance(about, dict):
        raise _no_race(path, f"a {type(about).__name__} in its metadata")
    if about.get("format") != _FORMAT:
        raise ValueError(
            f"expected the checkpoint of a race in format {_FORMAT}, got {about.get('format')!r} in {path}: "
            "go on with the version of gossamer that wrote it, or delete it to begin again"
        )
    if about.get("crc32", got := _checksum(tensors)) != got:
        raise _no_race(path, "tensors that do not agree with their checksum")
    return tensors, about


def fill_(wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy the tensors of a checkpoint into those that are wanted; all of them, or none."""
    wrong = [name for name, tensor in wanted.items() if name not in tensors or tensors[name].shape != tensor.shape]
    if wrong:
        raise _no_race(path, f"no tensor of the right shape for {', '.join(wrong[:4])}")
    for name, tensor in wanted.items():
        tensor.copy_(tensors[name])


def _no_race(path: Path, got: str) -> ValueError:
    return ValueError(f"expected the checkpoint of a race in {path}, got something else ({got}): delete it")


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
    if "random.cpu" in tensors:
        torch.set_rng_state(tensors["random.cpu"])
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
