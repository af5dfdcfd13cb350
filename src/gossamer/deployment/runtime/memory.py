"""A cache of timing decisions, in one small JSON file in the user's cache.

The key of a decision is a hash of everything it depends on: processor, kernels, shapes and densities of the layers,
batch size, threads. The file is optional: if it cannot be written, nothing is stored; if it is unreadable or invalid,
it is ignored with a warning.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gossamer.deployment.runtime.native import Native, cache_directory
from gossamer.deployment.runtime.native_model import Setting, possible_lanes
from gossamer.deployment.runtime.network import Attention, Network, Normalise, Pointwise, Product, Recurrent
from gossamer.deployment.runtime.plan import choices
from gossamer.deployment.runtime.weights import Kernel
from gossamer.io.atomic import replacing

FILE = "timings.json"
LIMIT = 500  # maximum number of decisions; the oldest are dropped first


@dataclass(frozen=True)
class Decision:
    """How to run a network, and the measured seconds behind it."""

    setting: Setting
    seconds: dict[str, float]
    kernels: dict[int, dict[Kernel, float]]


@cache
def processor() -> str:
    """The name of the processor, as far as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def key_of(graph: Network, native: Native, batch: int, threads: int) -> str:
    """Hash of what a decision depends on. Densities are rounded to percents, and the possible kernels are included."""
    layers = []
    kernels = [list(choices(graph, lanes).items()) for lanes in possible_lanes(graph, batch)]
    for operation in graph.operations:
        layer: list[Any] = [type(operation).__name__, repr(graph.values[operation.y])]
        if isinstance(operation, Product):
            fill = operation.taps.count / max(1, operation.dense_size)
            layer += [repr(graph.values[operation.x]), operation.stride, operation.padding, round(fill, 2)]
        elif isinstance(operation, Normalise):
            layer += [operation.groups, operation.each_pixel, operation.centred]
        elif isinstance(operation, Pointwise):
            layer.append(operation.function)
        elif isinstance(operation, Attention):
            layer += [repr(operation.heads), operation.lengths, operation.causal, operation.mask is None]
        elif isinstance(operation, Recurrent):
            nonzeros = operation.input_taps.count + operation.hidden_taps.count
            layer += [operation.kind, operation.units, round(nonzeros / max(1, operation.dense_size), 2)]
        layers.append(layer)
    parts = [processor(), native.variant, native.digest, torch.__version__, batch, threads, layers, kernels]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def recall(key: str, graph: Network, batch: int, threads_allowed: int) -> Decision | None:
    """A stored decision, if it still fits the network."""
    entry = _read().get(key)
    if entry is None:
        return None
    try:
        lanes, threads = entry["lanes"], entry["threads"]
        kernels = {int(number): kernel for number, kernel in entry["chosen"].items()}
        if lanes not in possible_lanes(graph, batch) or threads not in range(1, threads_allowed + 1):
            raise ValueError(f"{lanes} lanes and {threads} threads")
        possible = choices(graph, lanes)
        if not all(kernel in possible[number] for number, kernel in kernels.items()):
            raise ValueError("a kernel that the layer cannot have")
        seconds = {name: float(entry["seconds"][name]) for name in ("torch", "native")}
        if not all(0 < each < math.inf for each in seconds.values()):
            raise ValueError("times that no call takes")
        timed = {int(n): {k: float(v) for k, v in each.items()} for n, each in entry["kernels"].items()}
        return Decision(Setting(lanes, threads, tuple(kernels.items())), seconds, timed)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _complain(f"an invalid entry ({error})")
        return None


def remember(key: str, decision: Decision) -> None:
    """Add a decision to the file atomically."""
    setting = decision.setting
    entries = _read()
    entries.pop(key, None)
    entries[key] = {
        "lanes": setting.lanes,
        "threads": setting.threads,
        "chosen": {str(number): kernel for number, kernel in setting.kernels},
        "seconds": decision.seconds,
        "kernels": {str(number): each for number, each in decision.kernels.items()},
    }
    kept = dict(list(entries.items())[-LIMIT:])
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with replacing(directory / FILE) as file:
            file.write(json.dumps(kept).encode())
    except OSError:
        pass  # a read-only home is no error; the next process times again


def _read() -> dict[str, Any]:
    path = cache_directory() / FILE
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _complain(str(error)[:100])
        return {}
    if not isinstance(found, dict):
        _complain(f"a {type(found).__name__}")
        return {}
    return found


def _complain(got: str) -> None:
    path = cache_directory() / FILE
    warnings.warn(
        f"expected remembered timings in {path}, got {got}; they are ignored and measured again", stacklevel=3
    )
