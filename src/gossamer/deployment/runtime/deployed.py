"""``deploy``: time the available implementations on this machine and use the fastest."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from gossamer.deployment.runtime import memory
from gossamer.deployment.runtime.capture import capture
from gossamer.deployment.runtime.compiling import NoCompilerError
from gossamer.deployment.runtime.decoding import Decoder
from gossamer.deployment.runtime.fallback import SparseLinears, by_csr, by_native
from gossamer.deployment.runtime.lengths import axis_of_steps, shortened, steps_of
from gossamer.deployment.runtime.native import Native, load_native
from gossamer.deployment.runtime.native_model import NativeModel, Setting, possible_lanes
from gossamer.deployment.runtime.network import UnsupportedError
from gossamer.deployment.runtime.quantise import calibrated
from gossamer.deployment.runtime.records import Line
from gossamer.deployment.runtime.tuning import Run, Tuned, time_in_turns, tune
from gossamer.forward import batch_size_of, check_example

#: The minimum speed-up that counts as faster.
WORTH_IT = 1.03
Precision = Literal["float32", "int8"]
#: Well above rounding errors, which are below 1e-5: larger differences mean that the outputs are wrong.
AGREES = 1e-3


@dataclass(frozen=True)
class Explanation:
    """The engine of a deployed model, the reason, and times on this machine at the example's batch size."""

    engine: str
    reason: str
    batch: int
    milliseconds: dict[str, float]
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in self.milliseconds.items())
        rows: list[tuple[str, ...]] = [
            ("layer", "kind", "output", "kernel", "weights", "nonzeros", "kept", "multiplications", "timed")
        ]
        for line in self.lines:
            kept = f"{line.nonzeros / line.weights:.1%}" if line.weights else ""
            numbers = [f"{n:,}" if n else "" for n in (line.weights, line.nonzeros)]
            work = f"{line.multiplications:,}" if line.multiplications else ""
            rows.append((line.name, line.kind, line.shape, line.kernel, *numbers, kept, work, line.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        head = [f"engine: {self.engine} ({self.reason})", *([f"batch {self.batch}: {times}"] if times else [])]
        return "\n".join([*head, *(table if self.lines else [])])


class Deployed:
    """A deployed network: call it like the model."""

    def __init__(self, run: Run, explanation: Explanation, native: NativeModel | None) -> None:
        self._run = run
        self._run_one: Run = run.call_one if isinstance(run, NativeModel) else run
        self._explanation = explanation
        self.native = native

    def __call__(self, *inputs: Tensor) -> Any:
        return self._run_one(inputs[0]) if len(inputs) == 1 else self._run(*inputs)

    def explain(self) -> Explanation:
        return self._explanation

    def decoder(self, *, batch: int = 1, seconds: float = 0.5) -> Decoder:
        """Generates text with a causal language model, token by token, with a cache of keys and values.

        The example of ``deploy`` determines the maximum number of tokens. Kernels are timed for about ``seconds``.
        Raises ``UnsupportedError`` for other networks.
        """
        if self.native is None:
            raise UnsupportedError(f"expected a network that runs natively, but {self._explanation.reason}")
        return Decoder(self.native, batch=batch, seconds=seconds)


def compile_plan(
    model: nn.Module,
    example_input: Tensor | Sequence[Any],
    *,
    lanes: int | None = None,
    variant: str | None = None,
) -> NativeModel:
    """The native form of a model, whether or not it is faster.

    Raises ``UnsupportedError`` for a network that the kernels do not support, and ``NoCompilerError`` if they cannot be
    built. ``lanes`` is the number of samples per group; ``variant`` is the instruction set.
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
    precision: Precision = "float32",
    calibration: Tensor | Sequence[Any] | None = None,
) -> Deployed:
    """The fastest implementation of a model on this machine, for inputs like the example.

    Timing takes about ``seconds``: first kernels layer by layer, then whole networks interleaved with torch, at the
    example's batch size and with at most ``threads`` threads. Other batch sizes work, too, with settings that were not
    timed. The choice is stored in the user's cache, so the next ``deploy`` of a network with the same shapes and
    densities takes no time; ``remember=False`` neither reads nor writes the cache. The weights are copied, so further
    training of the model does not change the deployed one.

    With ``precision="int8"``, linear layers and convolutions may also run in int8, where that is faster: weights with a
    scale per output channel, inputs with the range that they have for the ``calibration`` data (inputs like the
    example, with real samples). ``explain()`` has the change of the outputs for these data.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"expected a precision from {', '.join(get_args(Precision))}, got {precision!r}")
    if (precision == "int8") != (calibration is not None):
        got = "none" if calibration is None else f"some for {precision}"
        raise ValueError(
            f"expected calibration data for int8 and only for that, got {got}; pass inputs like the example"
        )
    if threads < 1 or seconds < 0:
        raise ValueError(f"expected at least one thread and no negative time, got {threads} threads, {seconds} s")
    inputs = _inputs(example_input)
    check_example(model, inputs)
    dense: Run = _Eager(model)
    try:
        native = compile_plan(model, inputs)
    except UnsupportedError as error:
        return _by_layers(model, inputs, dense, f"no native form of the whole: {error}", threads, seconds)
    except NoCompilerError as error:
        return _by_layers(model, inputs, dense, str(error), threads, seconds)
    if (problem := _disagreement(native, dense, inputs)) is not None:
        return _by_layers(model, inputs, dense, problem, threads, seconds)
    if calibration is not None:
        native = NativeModel(calibrated(native, _inputs(calibration)), native.native)
    if _agrees_on_shorter(native, dense, inputs):
        native.shorter = {}
    batch = native.example_batch
    key = memory.key_of(native.graph, native.native, batch, threads)
    decision = memory.recall(key, native.graph, batch, threads) if remember else None
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
    if calibration is not None:
        reason += f"; {_rounding(native, dense, decision.setting, _inputs(calibration))}"
    return Deployed(native, Explanation("native", reason, batch, shown, lines), native)


def _decide(native: NativeModel, inputs: tuple[Any, ...], dense: Run, threads: int, seconds: float) -> memory.Decision:
    """Choose kernels per layer for each number of lanes, then lanes and threads, compared with torch."""
    batch = native.example_batch
    ways = possible_lanes(native.graph, batch)
    tuned: dict[int, Tuned] = {}
    give_up = time.perf_counter() + 3 * seconds + 1  # large networks take long; the best guess comes first
    for lanes in ways:
        if not tuned or time.perf_counter() < give_up:
            tuned[lanes] = tune(native, inputs, lanes, 0.5 * seconds / len(ways))
    settings: dict[str, Setting] = {}
    for lanes in tuned:
        for count in range(1, min(threads, -(-batch // lanes)) + 1):
            settings[f"{lanes}/{count}"] = replace(tuned[lanes].setting, threads=count)
    candidates: dict[str, Run] = {
        name: NativeModel(native.graph, native.native, setting) for name, setting in settings.items()
    }
    # Numbers of lanes often differ by a tenth, torch by a factor: so they are compared separately, in more rounds.
    samples = time_in_turns(candidates, inputs, 0.3 * seconds, wanted=7) if len(candidates) > 1 else {}
    times = {name: median(values) for name, values in samples.items()}
    # A second thread must gain enough: on a busy machine, two threads can be slower than one.
    best = min(settings, key=lambda name: times.get(name, 0.0) * (1 if settings[name].threads == 1 else WORTH_IT))
    with torch_threads(threads):
        against = time_in_turns({"torch": dense, best: candidates[best]}, inputs, 0.2 * seconds)
    kernels = {number: dict(each) for number, each in tuned[settings[best].lanes].seconds.items()}
    found = {"torch": median(against["torch"]), "native": median(against[best])}
    return memory.Decision(settings[best], found, kernels)


def _disagreement(native: Run, dense: Run, inputs: tuple[Any, ...]) -> str | None:
    """The problem with the native outputs for the example, or None.

    Non-finite outputs of torch are not compared, because kernels that skip zeros may give finite ones there.
    """
    expected, structure = tree_flatten(dense(*tree_map(torch.clone, inputs)))
    got, found = tree_flatten(native(*inputs))
    if structure != found or [y.shape for y in expected] != [y.shape for y in got]:
        return "the native form gives outputs of other shapes than the model"
    for want, have in zip(expected, got, strict=True):
        finite = want.isfinite()
        largest = float(want[finite].abs().max()) if finite.any() else 0.0
        difference = float((have - want)[finite].abs().max()) if finite.any() else 0.0
        if not difference <= AGREES * max(largest, AGREES):
            return f"the native outputs differ from the model's by {difference:.1e} where the largest is {largest:.1e}"
    return None


def _agrees_on_shorter(native: NativeModel, dense: Run, inputs: tuple[Any, ...]) -> bool:
    """Whether the network also gives the outputs of the model for sequences of half of the steps."""
    steps = steps_of(native.graph)
    if steps is None or steps < 2:
        return False
    half = tree_map(lambda x: x.narrow(axis_of_steps(native.graph), 0, steps // 2).contiguous(), inputs)
    try:
        shorter = NativeModel(shortened(native.graph, steps // 2), native.native)
        return _disagreement(shorter, dense, half) is None
    except Exception:  # the network cannot be shortened, or the model takes no shorter sequences
        return False


def _rounding(native: NativeModel, dense: Run, setting: Setting, inputs: tuple[Any, ...]) -> str:
    """What int8 changes for these inputs."""
    layers = sum(kernel == "int8" for _, kernel in setting.kernels)
    if not layers:
        return "no layer is faster in int8"
    fast = NativeModel(native.graph, native.native, setting)
    pairs = list(zip(tree_leaves(dense(*inputs)), tree_leaves(fast(*inputs)), strict=True))
    error = sum(float((have - want).square().sum()) for want, have in pairs)
    size = sum(float(want.square().sum()) for want, _ in pairs)
    change = (error / max(size, 1e-30)) ** 0.5
    text = f"int8 in {_counted(layers, 'layer')}: outputs change by {change:.1%} in root mean square"
    want, have = pairs[0]
    if len(pairs) == 1 and want.dim() == 2 and want.shape[1] > 1:
        same = float((want.argmax(1) == have.argmax(1)).double().mean())
        text += f", the largest stays the same for {same:.1%} of samples"
    return f"{text} (calibration data)"


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
    """Make torch use this many threads, for a fair comparison."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Eager:
    """A copy of the model for inference, so that the original can be trained further."""

    def __init__(self, model: nn.Module) -> None:
        self._model = copy.deepcopy(model).eval()

    def __call__(self, *inputs: Tensor) -> Any:
        with torch.no_grad():
            return self._model(*inputs)


def _by_layers(
    model: nn.Module, inputs: tuple[Any, ...], dense: Run, problem: str, threads: int, seconds: float
) -> Deployed:
    """Run the network in torch, with its sparse linear layers replaced if that is faster."""
    native = _native_or_none()
    name = "torch CSR" if native is None else "torch, sparse linear layers native"
    sparse = SparseLinears(model, by_csr if native is None else by_native(native))
    batch = batch_size_of(tree_leaves(inputs)[0])
    if not sparse.sparse:
        return Deployed(
            dense, Explanation("torch", f"no linear layer is sparse enough, and {problem}", 0, {}, ()), None
        )
    with torch_threads(threads):
        samples = time_in_turns({"torch": dense, name: sparse}, inputs, seconds)
    times = {each: median(values) for each, values in samples.items()}
    shown = {each: spent * 1e3 for each, spent in times.items()}
    gain = times["torch"] / times[name]
    if gain < WORTH_IT:
        reason = f"sparse linear layers alone are not faster here, and {problem}"
        return Deployed(dense, Explanation("torch", reason, batch, shown, ()), None)
    layers = "1 layer" if len(sparse.sparse) == 1 else f"{len(sparse.sparse)} layers"
    reason = f"{gain:.2f} times as fast as torch by {layers} ({', '.join(sparse.sparse[:4])}{_more(sparse.sparse)})"
    return Deployed(sparse, Explanation(name, f"{reason}; {problem}", batch, shown, ()), None)


def _more(names: Sequence[str]) -> str:
    return ", …" if len(names) > 4 else ""


def _native_or_none() -> Native | None:
    try:
        return load_native()
    except NoCompilerError:
        return None


def _inputs(example: Tensor | Sequence[Any]) -> tuple[Any, ...]:
    inputs = tuple(example) if isinstance(example, tuple | list) else (example,)
    if not inputs or not all(isinstance(x, Tensor) for x in tree_leaves(inputs)):
        raise ValueError(f"expected a tensor or a tuple of tensors as example input, got {type(example).__name__}")
    return inputs
