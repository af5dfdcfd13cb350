"""Which kernel runs each layer: decided by timing them on this machine, layer by layer.

One native call can report the time of every operation in it. So each kernel is given to all layers that it
could run, these plans take turns on the example, and every layer keeps the kernel that was fastest for it.
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
#: A dense kernel that is faster by less than this is not taken: it holds every zero in memory.
WORTH_THE_MEMORY = 1.05
#: Seconds of a call after which it makes no difference what the caches held before.
SLOW = 0.02
#: Kernels that an instruction set has nothing special for.
_POINTLESS: dict[str, frozenset[Kernel]] = {
    "avx512": frozenset(),
    "avx2": frozenset({"windows"}),
    "portable": frozenset({"windows", "loads"}),
}


@dataclass(frozen=True)
class Tuned:
    """A setting, and for each layer the seconds that the kernels took that were tried on it."""

    setting: Setting
    seconds: Mapping[int, Mapping[Kernel, float]]


def tune(model: NativeModel, inputs: Sequence[Any], lanes: int, seconds: float) -> Tuned:
    """The fastest kernel of each operation for inputs like these, with a number of lanes."""
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
                candidate.profile(*inputs)  # brings its weights into the caches, as a call after a call has them
            spent = candidate.profile(*inputs)
            longest = max(longest, sum(spent.values()))
            for number, kernels in possible.items():
                if kernel in kernels:
                    samples[number].setdefault(kernel, []).append(spent[number])
        rounds += 1
    medians = {n: {kernel: median(values) for kernel, values in each.items()} for n, each in samples.items()}
    return Tuned(Setting(lanes, 1, tuple(_chosen(model.graph, medians).items())), medians)


def _without_refused(graph: Network, lanes: int, possible: dict[int, list[Kernel]]) -> None:
    """Take shifted planes from layers that the borders of their neighbours keep from them."""
    asked = {number for number, kernels in possible.items() if "shifted" in kernels}
    products = frozenset(op for op in map(graph.operations.__getitem__, asked) if isinstance(op, Product))
    granted = place(graph, lanes, products).shifted
    for number in asked:
        if graph.operations[number] not in granted:
            possible[number].remove("shifted")


def _chosen(graph: Network, seconds: Mapping[int, Mapping[Kernel, float]]) -> dict[int, Kernel]:
    """The fastest kernel of each layer. Layers on planes narrower than a vector choose shifted planes together, as one
    that needs borders puts them into the planes of its neighbours."""
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


def race(
    candidates: Mapping[str, Run], inputs: Sequence[Any], seconds: float, wanted: int = 3
) -> dict[str, list[float]]:
    """Seconds a call of each candidate, sample by sample, taking turns so that a busy machine is busy for all of
    them. A sample is the mean of as many calls as fill a millisecond or two. There are at least three, and as many as
    are ``wanted`` if that takes no more than four times the ``seconds``."""
    repeats: dict[str, int] = {}
    once: dict[str, float] = {}
    for name, run in candidates.items():
        run(*inputs)
        start = time.perf_counter()
        run(*inputs)
        once[name] = time.perf_counter() - start
        repeats[name] = max(1, int(2e-3 / max(1e-7, once[name])))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    beginning = time.perf_counter()
    rounds, spent = 0, 0.0
    while rounds < 3 or spent < (seconds if rounds >= wanted else 4 * seconds):
        for name in list(candidates) if rounds % 2 else list(candidates)[::-1]:
            run = candidates[name]
            if once[name] <= SLOW:
                run(*inputs)
            start = time.perf_counter()
            for _ in range(repeats[name]):
                run(*inputs)
            samples[name].append((time.perf_counter() - start) / repeats[name])
        rounds, spent = rounds + 1, time.perf_counter() - beginning
    return samples
