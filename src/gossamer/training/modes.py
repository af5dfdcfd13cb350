"""How a step is computed: precision, memory layout, compiled or not, kernel by kernel or replayed as a CUDA graph.

A run may say so itself. What it leaves open is chosen by measurement: `modes.json` holds, for a GPU and a network, the
simplest mode that was about as fast as the fastest one (`benchmarks/throughput.py --modes`). On other devices, and for
networks that were not measured, everything stays off: float32, PyTorch's usual layout, eager.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gossamer.models import MODELS
from gossamer.training.checks import AUTO
from gossamer.training.place import Place
from gossamer.training.run import Run

_MEASURED = Path(__file__).with_name("modes.json")
_RECURRENT = tuple(entry.name for entry in MODELS if entry.tokens)
_CAPTURED_METHODS = ("dense", "scl")  # whose steps can be replayed without a word from Python


@dataclass(frozen=True)
class Mode:
    """One way to compute a step; the default is the plain one."""

    precision: str = "float32"
    channels_last: bool = False
    compile: bool = False
    capture: bool = False

    def __str__(self) -> str:
        named = {"channels-last": self.channels_last, "compiled": self.compile, "graph": self.capture}
        return ", ".join([self.precision, *(name for name, on in named.items() if on)])


def resolve(run: Run, place: Place) -> Run:
    """The run with everything decided that it leaves open."""
    obstacle = why_not_captured(run, place)
    if run.capture and obstacle is not None:
        raise ValueError(f"capture=true was asked for, but {obstacle}: set capture=auto or capture=false")
    if run.precision == "bf16" and place.device.type == "cuda" and run.model in _RECURRENT:
        raise ValueError(
            f"precision=bf16 was asked for, but under autocast torch computes cuDNN's LSTM of {run.model} in float16, "
            "whose small gradients vanish: set precision=float32"
        )
    best = measured(run.model, place.device)
    if obstacle is not None:
        best = replace(best, capture=False)
    said = {"channels_last": run.channels_last, "compile": run.compile, "capture": run.capture}
    decided: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    if run.precision != AUTO:
        decided["precision"] = run.precision
    return replace(run, **asdict(replace(best, **decided)))


def mode_of(resolved: Run) -> Mode:
    """The mode of a run that leaves nothing open."""
    return Mode(
        precision=resolved.precision,
        channels_last=bool(resolved.channels_last),
        compile=bool(resolved.compile),
        capture=bool(resolved.capture),
    )


def why_not_captured(run: Run, place: Place) -> str | None:
    """Why the steps of a run cannot be replayed from a graph; None where they can."""
    if place.device.type != "cuda":
        return f"there are no CUDA graphs on device={place.device.type}"
    if place.world > 1:
        return f"{place.world} processes have to meet in every step"
    if run.method not in _CAPTURED_METHODS:
        return f"only steps of {' and '.join(_CAPTURED_METHODS)} can be replayed, not of method={run.method}"
    if run.data == "imagefolder":
        return "the thread that prepares the images of a folder may call the GPU's driver while a step is captured"
    if run.leave_at is not None:
        return "with leave_at the host has to look at the sparsity to end a phase"
    if run.method == "scl" and run.mask_settings.scale == "per_sample":
        return "scale=per_sample watches the forward pass from Python"
    return None


def measured(network: str, device: torch.device) -> Mode:
    """The mode to take for a network on a device: the plain one where nothing was measured."""
    if device.type != "cuda":
        return Mode()
    return Mode(**_table().get(torch.cuda.get_device_name(device), {}).get(network, {}))


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    table: dict[str, dict[str, dict[str, Any]]] = json.loads(_MEASURED.read_text())
    return table
