"""``deploy``: measure what is there, take the fastest, and say so."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.runtime.capture import capture
from gossamer.runtime.fallback import CsrModel
from gossamer.runtime.graph import UnsupportedError
from gossamer.runtime.native import NoCompilerError, load_native
from gossamer.runtime.native_model import NativeModel, Setting, possible_lanes
from gossamer.runtime.records import Line

Run = Callable[..., Any]


@dataclass(frozen=True)
class Explanation:
    """What runs a deployed model, why, and what it took on this machine at the example's batch size."""

    engine: str
    reason: str
    batch: int
    milliseconds: dict[str, float]
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in self.milliseconds.items())
        rows: list[tuple[str, ...]] = [
            ("layer", "kind", "output", "kernel", "weights", "connections", "kept", "multiplications")
        ]
        for line in self.lines:
            kept = f"{line.connections / line.weights:.1%}" if line.weights else ""
            numbers = [f"{n:,}" if n else "" for n in (line.weights, line.connections)]
            work = f"{line.multiplications:,}" if line.multiplications else ""
            rows.append((line.name, line.kind, line.shape, line.kernel, *numbers, kept, work))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        head = [f"engine: {self.engine} ({self.reason})", f"batch {self.batch}: {times or 'not timed'}"]
        return "\n".join([*head, *(table if self.lines else [])])


class Deployed:
    """A network ready to run: call it like the model."""

    def __init__(self, run: Run, explanation: Explanation, native: NativeModel | None) -> None:
        self._run = run
        self._explanation = explanation
        self.native = native

    def __call__(self, *inputs: Tensor) -> Any:
        return self._run(*inputs)

    def explain(self) -> Explanation:
        return self._explanation


def compile_plan(
    model: nn.Module,
    example_input: Tensor | Sequence[Any],
    *,
    lanes: int | None = None,
    variant: str | None = None,
) -> NativeModel:
    """The native form of a model, whether or not it is faster.

    Raises ``UnsupportedError`` for a network the kernels cannot express and ``NoCompilerError`` where they
    cannot be built. ``lanes`` fixes how many samples travel together; ``variant`` the instruction set.
    """
    graph = capture(model, _inputs(example_input))
    return NativeModel(graph, load_native(variant), None if lanes is None else Setting(lanes))


def deploy(
    model: nn.Module, example_input: Tensor | Sequence[Any], *, threads: int = 1, seconds: float = 1.0
) -> Deployed:
    """The fastest way found on this machine to run a model on inputs like the example.

    About ``seconds`` are spent on timing the candidates one after the other, round by round, at the example's
    batch size and with at most ``threads`` threads. Other batch sizes work too, at settings that were not
    timed. The weights are taken as they are now; training the model further does not change what was
    deployed.
    """
    if threads < 1 or seconds < 0:
        raise ValueError(f"expected at least one thread and no negative time, got {threads} threads, {seconds} s")
    inputs = _inputs(example_input)
    dense: Run = _Eager(model)
    try:
        native = compile_plan(model, inputs)
    except UnsupportedError as error:
        return Deployed(dense, Explanation("torch", f"no native form: {error}", 0, {}, ()), None)
    except NoCompilerError as error:
        return _without_compiler(model, inputs, dense, str(error), seconds)
    batch = native.example_batch
    candidates: dict[str, Run] = {"torch": dense}
    settings: dict[str, Setting] = {}
    for lanes in possible_lanes(native.graph, batch):
        for count in range(1, min(threads, -(-batch // lanes)) + 1):
            name = f"native, {lanes} lanes" + (f", {count} threads" if count > 1 else "")
            settings[name] = Setting(lanes, count)
            candidates[name] = NativeModel(native.graph, native.native, settings[name])
    times = race(candidates, inputs, seconds)
    fastest = min(settings, key=lambda name: times[name])
    native.choose(batch, settings[fastest])
    shown = {name: times[name] * 1e3 for name in ("torch", fastest)}
    lines = native.plan(settings[fastest].lanes).lines
    gain = times["torch"] / times[fastest]
    if gain <= 1:
        reason = f"no gain from sparsity: the native kernels take {1 / gain:.2f} times as long as torch"
        return Deployed(dense, Explanation("torch", reason, batch, shown, lines), native)
    reason = f"{gain:.2f} times as fast as torch; {native.native.variant}, {fastest.removeprefix('native, ')}"
    return Deployed(native, Explanation("native", reason, batch, shown, lines), native)


class _Eager:
    """The model as it was, for inference: a copy, so that the user's own may go on training."""

    def __init__(self, model: nn.Module) -> None:
        self._model = copy.deepcopy(model).eval()

    def __call__(self, *inputs: Tensor) -> Any:
        with torch.no_grad():
            return self._model(*inputs)


def _without_compiler(model: nn.Module, inputs: tuple[Any, ...], dense: Run, problem: str, seconds: float) -> Deployed:
    sparse = CsrModel(model, inputs)
    batch = inputs[0].shape[0]
    if not sparse.sparse:
        reason = f"no linear layer is sparse enough for torch's CSR product, and {problem}"
        return Deployed(dense, Explanation("torch", reason, batch, {}, ()), None)
    times = race({"torch": dense, "torch CSR": sparse}, inputs, seconds)
    shown = {name: t * 1e3 for name, t in times.items()}
    if times["torch CSR"] < times["torch"]:
        return Deployed(sparse, Explanation("torch CSR", problem, batch, shown, ()), None)
    return Deployed(
        dense,
        Explanation("torch", f"torch's CSR product is slower here, and {problem}", batch, shown, ()),
        None,
    )


def race(candidates: dict[str, Run], inputs: Sequence[Any], seconds: float) -> dict[str, float]:
    """Median seconds a call of each candidate, taking turns so that a busy machine is busy for all of
    them."""
    repeats: dict[str, int] = {}
    for name, run in candidates.items():
        run(*inputs)
        start = time.perf_counter()
        run(*inputs)
        repeats[name] = max(1, int(1e-3 / max(1e-7, time.perf_counter() - start)))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    end = time.perf_counter() + seconds
    while len(next(iter(samples.values()))) < 3 or time.perf_counter() < end:
        order = list(candidates) if len(next(iter(samples.values()))) % 2 else list(candidates)[::-1]
        for name in order:
            run = candidates[name]
            run(*inputs)
            start = time.perf_counter()
            for _ in range(repeats[name]):
                run(*inputs)
            samples[name].append((time.perf_counter() - start) / repeats[name])
        if seconds == 0:
            break
    return {name: median(values) for name, values in samples.items()}


def _inputs(example: Tensor | Sequence[Any]) -> tuple[Any, ...]:
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    if not inputs or not all(isinstance(x, Tensor) for x in tree_leaves(inputs)):
        raise ValueError("expected a tensor or a sequence of tensors as example input, got something else")
    return inputs
