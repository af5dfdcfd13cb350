"""The measurement: all engines take turns in one process, so that other load affects them equally."""

from __future__ import annotations

import copy
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.deployment.exports.plain import to_dense
from gossamer.deployment.filled import filled
from gossamer.deployment.runtime import torch_threads
from gossamer.deployment.runtime.memory import processor
from gossamer.deployment.runtime.tuning import time_in_turns
from gossamer.deployment.speed.engines import ENGINES, OURS, Job, Ready, Unavailable, outputs
from gossamer.deployment.speed.report import Case, Row, SpeedReport
from gossamer.io.sparse_file import save
from gossamer.provenance import commit
from gossamer.report import report as count

HALF = "half"
Progress = Callable[[str, float], None]


def measure(
    model: nn.Module,
    example: Callable[[int], Tensor],
    *,
    name: str,
    batches: Sequence[int] = (1, 64),
    threads: Sequence[int] = (1,),
    engines: Sequence[str] = tuple(ENGINES),
    seconds: float = 5.0,
    rounds: int = 7,
    break_even: bool = True,
    remember: bool = True,
    progress: Progress | None = None,
    cpu_time: bool = False,
) -> SpeedReport:
    """Time a network at every batch size and number of threads.

    ``example(batch)`` returns an input. Each case takes at least ``rounds`` rounds and ``seconds`` seconds, plus the
    time to prepare the engines. ``cpu_time`` counts the seconds that this process computes, in all its threads, instead
    of those that pass: for one thread on a machine that others use as well. ``progress`` is called with a description
    and the completed fraction.
    """
    unknown = sorted(set(engines) - set(ENGINES))
    if unknown or not engines:
        raise ValueError(f"expected engines from {', '.join(ENGINES)}, got {', '.join(unknown) or 'none'}")
    if min((*batches, *threads), default=0) < 1:
        raise ValueError(f"expected batch sizes and threads of at least 1, got {list(batches)} and {list(threads)}")
    if not seconds >= 0:
        raise ValueError(f"expected seconds of at least 0, got {seconds}")
    model = copy.deepcopy(model).eval()
    counted = count(model, example(1)).total
    dense, sparse = counted.flops_dense or 0, counted.flops_sparse or 0
    tell = progress or (lambda what, share: None)
    cases: list[Case] = []
    clock = time.process_time if cpu_time else time.perf_counter
    total = len(batches) * len(threads) * (len(engines) + 2)
    with tempfile.TemporaryDirectory() as scratch:
        small = save(model, Path(scratch) / "sparse", negative_zeros="drop")
        sizes = to_dense(model, Path(scratch) / "dense").file_bytes, small.file_bytes
        for batch in batches:
            torch.manual_seed(0)
            x = example(batch)
            for each in threads:
                first = len(cases) * (len(engines) + 2)

                def step(what: str, number: int, first: int = first, batch: int = batch, each: int = each) -> None:
                    tell(f"batch {batch}, threads {each}: {what}", (first + number) / total)

                job = Job(model, (x,), each, Path(scratch), min(2.0, seconds), remember)
                with torch_threads(each):
                    cases.append(
                        _case(job, batch, engines, seconds, rounds, break_even, sparse / max(1, dense), step, clock)
                    )
    tell("done", 1.0)
    settings = {"clock": "process time"} if cpu_time else {}
    return SpeedReport(
        name, counted.weights, counted.nonzeros, dense, sparse, *sizes, tuple(cases), about(seconds=seconds, **settings)
    )


def _case(
    job: Job,
    batch: int,
    engines: Sequence[str],
    seconds: float,
    rounds: int,
    break_even: bool,
    density: float,
    step: Callable[[str, int], None],
    clock: Callable[[], float],
) -> Case:
    ready: dict[str, Ready] = {}
    missing: dict[str, str] = {}
    differences: dict[str, float] = {}
    with torch.no_grad():
        expected = outputs(job.model(*job.inputs))
    for number, name in enumerate(engines):
        step(f"preparing {name}", number)
        try:
            ready[name] = ENGINES[name].prepare(job)
            differences[name] = _difference(outputs(ready[name].run(*job.inputs)), expected)
        except Unavailable as error:
            missing[name] = str(error)
        except Exception as error:  # any error of an engine goes to its row and does not end the report
            missing[name] = f"failed: {str(error).strip().splitlines()[0] if str(error).strip() else repr(error)}"
            ready.pop(name, None)
    candidates = {name: each.run for name, each in ready.items()}
    if break_even and OURS in ready and density < 0.5:
        step("half of the nonzeros", len(engines))
        half = Job(filled(job.model, 0.5), job.inputs, job.threads, job.folder, job.seconds, job.remember)
        candidates[HALF] = ENGINES[OURS].prepare(half).run
    step("timing", len(engines) + 1)
    samples = time_in_turns(candidates, job.inputs, seconds, rounds, clock)
    rows = [
        _row(name, samples.get(name), ready.get(name), differences.get(name), missing.get(name)) for name in engines
    ]
    return Case(
        batch, job.threads, tuple(rows), 1e3 * statistics.median(samples[HALF]) if HALF in samples else None, density
    )


def _row(
    name: str, samples: list[float] | None, ready: Ready | None, difference: float | None, problem: str | None
) -> Row:
    kind = ENGINES[name].kind
    if samples is None or ready is None:
        return Row(name, kind, None, None, None, None, None, problem or "did not run")
    lower, middle, upper = (1e3 * value for value in statistics.quantiles(samples, n=4, method="inclusive"))
    return Row(name, kind, middle, lower, upper, ready.memory, difference, ready.note, ready.layers)


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    worst = 0.0
    for out, wanted in zip(found, expected, strict=True):
        scale = max(float(wanted.abs().max()), 1e-30)
        worst = max(worst, float((out.reshape(wanted.shape) - wanted).abs().max()) / scale)
    return worst


def about(packages: Sequence[str] = (), **settings: Any) -> dict[str, Any]:
    """The provenance of a measurement, with the versions of further ``packages``."""
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "onnx", "onnxruntime", "openvino", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    hardware = f"{processor()}, {os.cpu_count()} cores"
    return {"settings": settings, "versions": found, "hardware": hardware, "commit": commit()}
