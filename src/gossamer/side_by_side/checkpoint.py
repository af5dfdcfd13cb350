"""A race in mid-run as one safetensors file: written whole or not at all, and gone on from by the same command.

A checksum of the tensors goes with them, as a race that goes on from wrong numbers would end with a wrong table.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gossamer.training.checkpoint import write_atomically

_FORMAT = 1


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
