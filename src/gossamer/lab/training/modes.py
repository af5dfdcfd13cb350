"""How a step is computed: precision, memory layout, compilation, and replay as a CUDA graph.

A run may set these itself. Those set to auto follow measurements: for a GPU and a network, `modes.json` has the
simplest mode that was about as fast as the fastest one (`benchmarks/throughput.py --modes`), and the number of steps
from which compilation saves more time than it takes. Other devices, and networks that were not measured, use float32,
the default layout and eager execution.
"""

import json
import os
import shutil
import sysconfig
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gossamer.budget import has_triton
from gossamer.lab.models import MODELS
from gossamer.lab.training.checks import AUTO
from gossamer.lab.training.distributed import DistributedContext
from gossamer.lab.training.run import Run

_MEASURED = Path(__file__).with_name("modes.json")
_RECURRENT = tuple(entry.name for entry in MODELS if entry.recurrent)
_CAPTURED_METHODS = ("dense", "scl")  # whose steps need no Python and can be replayed


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


@dataclass(frozen=True)
class Measured:
    """The measured choice for a network."""

    precision: str = "float32"
    channels_last: bool = False
    capture: bool = False
    compile_from: int | None = None  # minimum number of steps; None: never


def resolve(run: Run, context: DistributedContext) -> Run:
    """The run with all auto fields resolved except `compile`, which depends on the number of steps and so on the
    data."""
    obstacle = why_not_captured(run, context)
    if run.capture and obstacle is not None:
        raise ValueError(f"capture=true was requested, but {obstacle}: set capture=auto or capture=false")
    if run.precision == "bf16" and context.device.type == "cuda" and run.model in _RECURRENT:
        raise ValueError(
            f"precision=bf16 was requested, but under autocast torch computes cuDNN's layers of {run.model} in "
            "float16, whose small gradients vanish: set precision=float32"
        )
    best = measured(run.model, context.device)
    return replace(
        run,
        precision=best.precision if run.precision == AUTO else run.precision,
        channels_last=best.channels_last if run.channels_last is None else run.channels_last,
        capture=best.capture and obstacle is None if run.capture is None else run.capture,
    )


def resolve_compile(resolved: Run, context: DistributedContext, steps: int) -> Run:
    """Resolve `compile` for a run of this many steps. By default, steps are compiled only if there is a compiler, and
    only in the measured configuration."""
    if resolved.compile is not None:
        return resolved
    best = measured(resolved.model, context.device)
    pays = best.compile_from is not None and steps >= best.compile_from
    return replace(resolved, compile=pays and _is_as_measured(resolved, context, best) and _can_compile())


def _is_as_measured(resolved: Run, context: DistributedContext, best: Measured) -> bool:
    """Whether the run is as measured: one process without a teacher, and masks that do not observe the forward pass."""
    as_measured = mode_of(resolved) == Mode(best.precision, best.channels_last, capture=best.capture)
    usual = resolved.method in _CAPTURED_METHODS and not _observes_forward_pass(resolved) and not resolved.distil
    return as_measured and usual and context.world == 1


def tolerate_compiler() -> AbstractContextManager[object]:
    """Fall back to eager steps if a compiler that was not requested fails; torch gives the reason in a warning."""
    import torch._dynamo.config  # a slow import

    return torch._dynamo.config.patch(suppress_errors=True)  # type: ignore[no-any-return]


def mode_of(resolved: Run) -> Mode:
    """The mode of a fully resolved run."""
    return Mode(
        precision=resolved.precision,
        channels_last=bool(resolved.channels_last),
        compile=bool(resolved.compile),
        capture=bool(resolved.capture),
    )


def why_not_captured(run: Run, context: DistributedContext) -> str | None:
    """Why the steps of a run cannot be replayed from a graph; None if they can."""
    if context.device.type != "cuda":
        return f"there are no CUDA graphs on device={context.device.type}"
    if context.world > 1:
        return f"{context.world} processes synchronize in every step"
    if run.method not in _CAPTURED_METHODS:
        return f"only steps of {' and '.join(_CAPTURED_METHODS)} can be replayed, not of method={run.method}"
    if _observes_forward_pass(run):
        return "scale=per_sample observes the forward pass from Python"
    return None


def _observes_forward_pass(run: Run) -> bool:
    return run.method == "scl" and run.settings.get("scale") == "per_sample"


def measured(network: str, device: torch.device) -> Measured:
    """The measured mode for a network on a device; the default mode if there is none."""
    if device.type != "cuda":
        return Measured()
    return Measured(**_table().get(torch.cuda.get_device_name(device), {}).get(network, {}))


def _can_compile() -> bool:
    """Whether torch.compile can work: it writes Triton kernels, which need a C compiler and the headers of Python."""
    named = os.environ.get("CC")
    compiler = any(map(shutil.which, [named] if named else ["gcc", "clang"]))  # where Triton searches for it
    return has_triton() and compiler and Path(sysconfig.get_path("include"), "Python.h").exists()


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    table: dict[str, dict[str, dict[str, Any]]] = json.loads(_MEASURED.read_text())
    return table
