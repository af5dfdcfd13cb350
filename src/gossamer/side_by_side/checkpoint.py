"""A race in mid-run as one safetensors file: written whole or not at all, and gone on from by the same command."""

import json
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
    content = save(held, metadata={"race": json.dumps({"format": _FORMAT, **about})})
    write_atomically(path, lambda file: file.write(content))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and what was told about them, or None where there is no such file."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {}).get("race", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"expected the checkpoint of a race in {path}, got something else ({error}): delete it"
        ) from error
    if about.get("format") != _FORMAT:
        raise ValueError(
            f"expected the checkpoint of a race in format {_FORMAT}, got {about.get('format')!r} in {path}: "
            "go on with the version of gossamer that wrote it, or delete it to begin again"
        )
    return tensors, about


def random_state(device: torch.device) -> dict[str, Tensor]:
    """What dropout draws from."""
    states = {"random.cpu": torch.get_rng_state()}
    return {**states, "random.cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def set_random_state(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(tensors["random.cpu"])
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
