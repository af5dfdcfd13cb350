"""Selection of the kernel of each layer, by timing on this machine.

A native call can report the time of each of its operations. So each kernel is assigned to all layers that it supports,
these plans are run in turns on the example, and every layer gets its fastest kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gossamer.deployment.runtime.layout import CHUNK, place
from gossamer.deployment.runtime.native_model import NativeModel, Setting
from gossamer.deployment.runtime.network import Network, Product
from gossamer.deployment.runtime.plan import choices
from gossamer.deployment.runtime.weights import KERNELS, Kernel

Run = Callable[..., Any]
#: A dense kernel must be faster by this factor, because it stores every zero.
WORTH_THE_MEMORY = 1.05
#: In calls longer than this many seconds, the initial content of the caches does not matter.
SLOW = 0.02
#: Kernels that do not benefit from an instruction set.
_POINTLESS: dict[str, frozenset[Kernel]] = {
    "vnni": frozenset(),
    "avx512": frozenset(),
    "avx2": frozenset({"windows"}),
    "dotprod": frozenset({"windows"}),
    "portable": frozenset({"windows", "loads"}),
}


@dataclass(frozen=True)
class Tuned:
    """A setting, and for each layer the seconds of the tried kernels."""

    setting: Setting
    seconds: Mapping[int, Mapping[Kernel, float]]


def tune(model: NativeModel, inputs: Sequence[Any], lanes: int, seconds: float) -> Tuned:
    """The fastest kernel of each operation for these inputs and a number of lanes."""
    pointless = _POINTLESS[model.native.variant]
    possible = {
        number: [kernel for kernel in kernels if kernel not in pointless]
        for number, kernels in choices(model.graph, lanes).items()
    }
    _without_refused(model.graph, lanes, possible)
    candidates: dict[Kernel, NativeModel] = {}
    for kernel in KERNELS:
        given = tuple((number, kernel) for number, kernels in possible.items() if kernel in kernels)
        if given:
            candidates[kernel] = NativeModel(model.graph, model.native, Setting(lanes, 1, given))
    samples: dict[int, dict[Kernel, list[float]]] = {number: {} for number in possible}
    end = time.perf_counter() + seconds
    rounds, longest = 0, 0.0
    while rounds < (1 if longest > SLOW else 3) or time.perf_counter() < end:
        for kernel, candidate in candidates.items():
            if longest <= SLOW:
                candidate.profile(*inputs)  # brings its weights into the caches, as in repeated calls
            spent = candidate.profile(*inputs)
            longest = max(longest, sum(spent.values()))
            for number, kernels in possible.items():
                if kernel in kernels:
                    samples[number].setdefault(kernel, []).append(spent[number])
        rounds += 1
    medians = {n: {kernel: median(values) for kernel, values in each.items()} for n, each in samples.items()}
    return Tuned(Setting(lanes, 1, tuple(_chosen(model.graph, medians).items())), medians)


def _without_refused(graph: Network, lanes: int, possible: dict[int, list[Kernel]]) -> None:
    """Remove shifted planes from layers where borders of neighbouring layers prevent them."""
    asked = {number for number, kernels in possible.items() if "shifted" in kernels}
    products = frozenset(op for op in map(graph.operations.__getitem__, asked) if isinstance(op, Product))
    granted = place(graph, lanes, products).shifted
    for number in asked:
        if graph.operations[number] not in granted:
            possible[number].remove("shifted")


def _chosen(graph: Network, seconds: Mapping[int, Mapping[Kernel, float]]) -> dict[int, Kernel]:
    """The fastest kernel of each layer. Layers on planes narrower than a vector choose shifted planes together, because
    borders of one layer affect the planes of its neighbours."""
    chosen = {number: _fastest(each) for number, each in seconds.items() if each}
    stages: dict[tuple[int, int], list[int]] = {}
    for number, each in seconds.items():
        value = graph.values[graph.operations[number].y]
        if "shifted" in each and value.width % CHUNK:
            stages.setdefault((value.height, value.width), []).append(number)
    for stage in stages.values():
        others = {n: _fastest({kernel: s for kernel, s in seconds[n].items() if kernel != "shifted"}) for n in stage}
        shifted = sum(seconds[n]["shifted"] for n in stage) < sum(seconds[n][others[n]] for n in stage)
        chosen |= dict.fromkeys(stage, "shifted") if shifted else others
    return chosen


def _fastest(seconds: Mapping[Kernel, float]) -> Kernel:
    return min(seconds, key=lambda kernel: seconds[kernel] * (WORTH_THE_MEMORY if kernel == "dense" else 1))


def time_in_turns(
    candidates: Mapping[str, Run],
    inputs: Sequence[Any],
    seconds: float,
    wanted: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of each candidate by the ``clock``, in samples. Candidates take turns, so that other load
    affects them equally. A sample is the mean over calls of a millisecond or two in total. There are at least three
    samples, and ``wanted`` if that takes at most four times the ``seconds``."""
    repeats: dict[str, int] = {}
    once: dict[str, float] = {}
    for name, run in candidates.items():
        run(*inputs)
        start = clock()
        run(*inputs)
        once[name] = clock() - start
        repeats[name] = max(1, int(2e-3 / max(1e-7, once[name])))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    beginning = time.perf_counter()
    rounds, spent = 0, 0.0
    while rounds < 3 or spent < (seconds if rounds >= wanted else 4 * seconds):
        for name in list(candidates) if rounds % 2 else list(candidates)[::-1]:
            run = candidates[name]
            if once[name] <= SLOW:
                run(*inputs)
            start = clock()
            for _ in range(repeats[name]):
                run(*inputs)
            samples[name].append((clock() - start) / repeats[name])
        rounds, spent = rounds + 1, time.perf_counter() - beginning
    return samples
