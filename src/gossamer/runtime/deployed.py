"""``deploy``: measure what is there, take the fastest, and say so."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.runtime import memory
from gossamer.runtime.capture import capture
from gossamer.runtime.compiling import NoCompilerError
from gossamer.runtime.fallback import CsrModel
from gossamer.runtime.graph import UnsupportedError
from gossamer.runtime.native import load_native
from gossamer.runtime.native_model import NativeModel, Setting, possible_lanes
from gossamer.runtime.records import Line
from gossamer.runtime.tuning import Run, Tuned, race, tune

#: How much faster something has to be before it is called faster.
WORTH_IT = 1.03


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
            ("layer", "kind", "output", "kernel", "weights", "connections", "kept", "multiplications", "timed")
        ]
        for line in self.lines:
            kept = f"{line.connections / line.weights:.1%}" if line.weights else ""
            numbers = [f"{n:,}" if n else "" for n in (line.weights, line.connections)]
            work = f"{line.multiplications:,}" if line.multiplications else ""
            rows.append((line.name, line.kind, line.shape, line.kernel, *numbers, kept, work, line.reason))
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
    model: nn.Module,
    example_input: Tensor | Sequence[Any],
    *,
    threads: int = 1,
    seconds: float = 1.0,
    remember: bool = True,
) -> Deployed:
    """The fastest way found on this machine to run a model on inputs like the example.

    About ``seconds`` are spent on timing: kernels layer by layer, then whole networks against torch, taking
    turns, at the example's batch size and with at most ``threads`` threads. Other batch sizes work too, at
    settings that were not timed. What was found is remembered in the user's cache, so the next ``deploy`` of a
    network with the same shapes and densities takes no time; ``remember=False`` neither reads nor writes it.
    The weights are taken as they are now; training the model further does not change what was deployed.
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
    key = memory.key_of(native.graph, native.native, batch, threads)
    decision = memory.recall(key, native.graph) if remember else None
    source = "remembered"
    if decision is None:
        decision, source = _decide(native, inputs, dense, threads, seconds), "timed now"
        if remember:
            memory.remember(key, decision)
    native.choose(batch, decision.setting)
    gain = decision.seconds["torch"] / decision.seconds["native"]
    shown = {name: spent * 1e3 for name, spent in decision.seconds.items()}
    lines = tuple(_with_reason(line, decision) for line in native.plan_for(batch).lines)
    if gain < WORTH_IT:
        reason = f"no gain from sparsity: the native kernels take {1 / gain:.2f} times as long as torch; {source}"
        return Deployed(dense, Explanation("torch", reason, batch, shown, lines), native)
    how = f"{_counted(decision.setting.lanes, 'lane')}, {_counted(decision.setting.threads, 'thread')}"
    reason = f"{gain:.2f} times as fast as torch; {native.native.variant}, {how}; {source}"
    return Deployed(native, Explanation("native", reason, batch, shown, lines), native)


def _decide(native: NativeModel, inputs: tuple[Any, ...], dense: Run, threads: int, seconds: float) -> memory.Decision:
    """Kernels by layer for each way to cut the batch, then these ways, with one thread and more, against torch."""
    batch = native.example_batch
    ways = possible_lanes(native.graph, batch)
    tuned: dict[int, Tuned] = {}
    give_up = time.perf_counter() + 3 * seconds + 1  # large networks take long; the best guess came first
    for lanes in ways:
        if not tuned or time.perf_counter() < give_up:
            tuned[lanes] = tune(native, inputs, lanes, 0.5 * seconds / len(ways))
    settings: dict[str, Setting] = {}
    for lanes in tuned:
        for count in range(1, min(threads, -(-batch // lanes)) + 1):
            settings[f"{lanes}/{count}"] = replace(tuned[lanes].setting, threads=count)
    candidates: dict[str, Run] = {"torch": dense}
    candidates |= {name: NativeModel(native.graph, native.native, setting) for name, setting in settings.items()}
    with torch_threads(threads):
        samples = race(candidates, inputs, 0.5 * seconds)
    times = {name: median(values) for name, values in samples.items()}
    # A second thread has to earn its place: a machine that is busier tomorrow makes two slower than one.
    best = min(settings, key=lambda name: times[name] * (1 if settings[name].threads == 1 else WORTH_IT))
    kernels = {number: dict(each) for number, each in tuned[settings[best].lanes].seconds.items()}
    return memory.Decision(settings[best], {"torch": times["torch"], "native": times[best]}, kernels)


def _with_reason(line: Line, decision: memory.Decision) -> Line:
    tried = decision.kernels.get(line.operation, {})
    if len(tried) < 2:
        return line
    order = sorted(tried, key=lambda kernel: tried[kernel])
    return replace(line, reason=", ".join(f"{kernel} {_brief(tried[kernel])}" for kernel in order))


def _brief(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Lets torch use this many threads, for a fair race."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    samples = race({"torch": dense, "torch CSR": sparse}, inputs, seconds)
    times = {name: median(values) for name, values in samples.items()}
    shown = {name: t * 1e3 for name, t in times.items()}
    if times["torch CSR"] < times["torch"]:
        return Deployed(sparse, Explanation("torch CSR", problem, batch, shown, ()), None)
    return Deployed(
        dense,
        Explanation("torch", f"torch's CSR product is slower here, and {problem}", batch, shown, ()),
        None,
    )


def _inputs(example: Tensor | Sequence[Any]) -> tuple[Any, ...]:
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    if not inputs or not all(isinstance(x, Tensor) for x in tree_leaves(inputs)):
        raise ValueError("expected a tensor or a sequence of tensors as example input, got something else")
    return inputs
