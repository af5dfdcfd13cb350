"""What is written, and how it is seen afterwards which version is there."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

import gossamer
from gossamer.lab.checkpoint import Checkpoints
from gossamer.lab.training import result


@dataclass(frozen=True)
class Writer:
    """``write`` writes a version, and returns only when it is safe; ``read`` tells which one a reader finds, None where
    there is none, and raises where there is something that is no whole version."""

    name: str
    write: Callable[[Path, int], None]
    read: Callable[[Path], int | None]


def _tensors(version: int) -> dict[str, Tensor]:
    return {"w": torch.full((8, 8), float(version)), "b": torch.arange(4.0) * (torch.arange(4) > 2) * version}


def _check(tensors: Mapping[str, Tensor], version: int) -> int:
    for name, wanted in _tensors(version).items():
        assert torch.equal(tensors[name], wanted), f"{name} is a mixture of versions"
    return version


def _write_checkpoint(folder: Path, version: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no checkpoint")  # where the disk is full, training only warns
        try:
            Checkpoints(folder).save({"step": version, **_tensors(version)}, version)
        except UserWarning as warning:
            raise OSError(str(warning)) from warning


def _read_checkpoint(folder: Path) -> int | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of those that are set aside
        state = Checkpoints(folder).load()
    return None if state is None else _check(state, state["step"])


def _write_again(folder: Path, version: int) -> None:
    """The checkpoint of a step that has one already, as after going on from the one before."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no checkpoint")
        try:
            Checkpoints(folder).save({"version": version, **_tensors(version)}, 1)
        except UserWarning as warning:
            raise OSError(str(warning)) from warning


def _read_again(folder: Path) -> int | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = Checkpoints(folder).load()
    return None if state is None else _check(state, state["version"])


def _write_model(folder: Path, version: int) -> None:
    gossamer.save(_tensors(version), folder / "model.safetensors")


def _read_model(folder: Path) -> int | None:
    path = folder / "model.safetensors"
    if not path.exists():
        return None
    tensors = gossamer.load(path)
    return _check(tensors, int(tensors["w"][0, 0]))


def _write_record(folder: Path, version: int) -> None:
    result.write_json(folder / "run.json", {"version": version, "long": [version] * 100})


def _read_record(folder: Path) -> int | None:
    path = folder / "run.json"
    if not path.exists():
        return None
    values = json.loads(path.read_bytes())
    assert values["long"] == [values["version"]] * 100
    return int(values["version"])


WRITERS: Mapping[str, Writer] = MappingProxyType(
    {
        writer.name: writer
        for writer in (
            Writer("checkpoint", _write_checkpoint, _read_checkpoint),
            Writer("checkpoint of the same step", _write_again, _read_again),
            Writer("saved model", _write_model, _read_model),
            Writer("sweep record", _write_record, _read_record),
        )
    }
)


# ---------------------------------------------------------------------------------------------- planted mistakes


def _carelessly(skip: str) -> Callable[[Path, int], None]:
    """Writes a plain safetensors file as nobody should."""

    def write(folder: Path, version: int) -> None:
        import os

        content = safetensors.torch.save(_tensors(version))
        name = "model.safetensors" if skip == "rename" else f"new-{version}"
        place = folder / name
        if skip == "rename" and place.exists():
            place.unlink()
        with open(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
            file.write(content)
            if skip != "fsync":
                os.fsync(file.fileno())
        if skip != "rename":
            os.replace(place, folder / "model.safetensors")
        if skip != "fsync folder":
            handle = os.open(folder, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

    return write


def _unordered_digest(folder: Path, version: int) -> None:
    """A checkpoint that takes its name before its digest is there, and whose predecessor is removed before that."""
    import hashlib

    from gossamer.lab.checkpoint import write_atomically

    stream = io.BytesIO()
    state: dict[str, Any] = {"step": version, **_tensors(version)}
    torch.save(state, stream)
    content = stream.getvalue()
    path = folder / f"checkpoint-{version:09d}.pt"
    for old in folder.glob("checkpoint-*"):
        old.unlink()
    write_atomically(path, lambda file: file.write(content))
    digest = hashlib.sha256(content).hexdigest().encode()
    write_atomically(path.with_suffix(".sha256"), lambda file: file.write(digest))


PLANTED: Mapping[str, Writer] = MappingProxyType(
    {
        **{
            f"without {skip}": Writer(f"without {skip}", _carelessly(skip), _read_model)
            for skip in ("fsync", "fsync folder", "rename")
        },
        "without order": Writer("without order", _unordered_digest, _read_checkpoint),
    }
)
