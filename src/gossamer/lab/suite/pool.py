"""Runs that batched training does not support, several at a time: each in a process, all on the same device.

Each run has a folder of its own while it trains, so it resumes from its checkpoint; then its record is what is left. On
a GPU the processes share it best under NVIDIA's multi-process service, which is started where its program is found.
"""

import contextlib
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gossamer.lab.batched.folder import held
from gossamer.lab.batched.sweeps import missing_in, record_path
from gossamer.lab.training import Interrupted, LossNotFinite, modes, train
from gossamer.lab.training.distributed import DistributedContext, check_one_process, join
from gossamer.lab.training.result import MODEL, SPARSE_MODEL, write_json
from gossamer.lab.training.run import Run

_UNFINISHED = "unfinished"  # the folder of runs that have no record yet
_WATCH = 2.0  # seconds between two looks whether the parent is still there
_MPS = "nvidia-cuda-mps-control"


def train_in_processes(
    runs: Sequence[Run],
    out: Path,
    *,
    device: str = "auto",
    jobs: int = 1,
    save_models: bool = False,
    until: float = math.inf,
    progress: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Train the runs that have no record in `out` yet, `jobs` at a time; returns what went wrong, a line for each run.

    No run begins that would end after `until`, on the clock of `time.monotonic`, if it took as long as the others. The
    record of a run whose loss is not finite says that it diverged. A run that cannot be trained stops no other.
    """
    check_one_process()
    if jobs < 1:
        raise ValueError(f"expected at least 1 process, got jobs={jobs}")
    missing = missing_in(out, list({run.run_id: run for run in runs}.values()))
    if not missing:
        return []
    jobs, problems = min(jobs, len(missing)), list[str]()
    with held(out), shared_gpu(device, jobs, progress) as environment:
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)  # the workers inherit it
        pool = ProcessPoolExecutor(
            jobs,
            mp_context=multiprocessing.get_context("spawn"),  # a forked process cannot use a GPU
            initializer=_begin_worker,
            initargs=(os.getpid(), max(1, (os.cpu_count() or 1) // jobs)),
        )
        try:
            started = time.monotonic()
            for done, (run, outcome) in enumerate(_outcomes(pool, missing, jobs, until, out, device, save_models), 1):
                if outcome.startswith(_FAILED):
                    problems.append(f"run {run.run_id}, {label(run)}: {outcome.removeprefix(_FAILED)}")
                left = (time.monotonic() - started) / done * (len(missing) - done)
                progress(f"{done} of {len(missing)} runs, {label(run)}: {outcome}; {left / 60:.1f} min left")
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid or 0, signal.SIGINT)  # where it is not sent to all processes, as by a terminal
            raise Interrupted(
                f"stopped; finished runs have their records in {out}: run the same command again to resume"
            ) from None
        finally:
            pool.shutdown()
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    unfinished = out / _UNFINISHED
    if unfinished.is_dir() and not any(unfinished.iterdir()):
        unfinished.rmdir()
    return problems


def _outcomes(
    pool: ProcessPoolExecutor, runs: Sequence[Run], jobs: int, until: float, out: Path, device: str, save_models: bool
) -> Iterator[tuple[Run, str]]:
    """Each run with its result in words, in the order in which they end. A run begins when a worker is free."""
    waiting, busy, longest = list(reversed(runs)), dict["Future[str]", tuple[Run, float]](), 0.0
    while waiting or busy:
        while waiting and len(busy) < jobs and (not longest or time.monotonic() + longest < until):
            run = waiting.pop()
            busy[pool.submit(_train_one, run.to_dict(), out, device, save_models)] = run, time.monotonic()
        if not busy:
            return
        ended, _ = wait(busy, return_when=FIRST_COMPLETED)
        for future in ended:
            run, begun = busy.pop(future)
            longest = max(longest, time.monotonic() - begun)
            yield run, _outcome(future)


def label(run: Run) -> str:
    target = f" at {run.sparsity:.1%}" if run.sparsity is not None else ""
    return f"{run.method}{target}, seed {run.seed}"


_FAILED = "failed: "


def _outcome(future: "Future[str]") -> str:
    try:
        return future.result()
    except (ValueError, RuntimeError, OSError, ArithmeticError, TypeError) as error:
        return f"{_FAILED}{(str(error).splitlines() or [type(error).__name__])[0]}"


def _begin_worker(parent: int, threads: int) -> None:
    """Ignore Ctrl-C between runs, which the parent handles, and end with the parent, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _train_one(config: dict[str, Any], out: Path, device: str, save_models: bool) -> str:
    """Train one run in a worker, write its record, and return its result in words."""
    run = replace(Run.from_dict(config), device=device)
    context = join(device)
    folder, path = out / _UNFINISHED / run.run_id, record_path(out, run)
    try:
        record = {**_train_fast(run, context, folder), "diverged": False}
    except LossNotFinite as error:
        record = {"run_id": run.run_id, "config": run.to_dict(), "diverged": True, "why": str(error)}
        record |= {"method": run.method, "model": run.model, "data": run.data, "seed": run.seed}
    if save_models and (folder / MODEL).is_file():
        (folder / SPARSE_MODEL).replace(path.with_suffix(".safetensors"))
    write_json(path, record)
    shutil.rmtree(folder)
    return "diverged" if record["diverged"] else in_words(record)


def _train_fast(run: Run, context: DistributedContext, folder: Path) -> dict[str, Any]:
    """Train with captured steps where a run can, as steps of small networks are limited by their launches."""
    if run.capture is not None or modes.why_not_captured(run, context) is not None:
        return train(run, folder)
    try:
        return train(replace(run, capture=True), folder)
    except RuntimeError as error:
        if "captur" not in str(error).lower():
            raise
        return train(replace(run, capture=False), folder)  # an operation of this network cannot be captured


def in_words(record: dict[str, Any]) -> str:
    name = "perplexity" if "perplexity" in record else "accuracy"
    return f"{name} {record[name]:.4f} in {record['seconds']:.0f} s"


@contextmanager
def shared_gpu(device: str, jobs: int, progress: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """The environment of several processes on one GPU: that of NVIDIA's multi-process service, if it works here.
    Without it they take turns."""
    wanted = jobs > 1 and torch.cuda.is_available() and not device.startswith("cpu")
    if not wanted or shutil.which(_MPS) is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        works = _starts(environment)
        progress("the multi-process service shares the GPU" if works else "processes take turns on the GPU")
        try:
            yield environment if works else {}
        finally:
            _control("quit", environment)


def _starts(environment: dict[str, str]) -> bool:
    """Start the service; whether a process can use the GPU through it."""
    trial = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').item()"]
    inherited = {**os.environ, **environment}
    try:
        subprocess.run([_MPS, "-d"], env=inherited, check=True, timeout=30, capture_output=True)
        subprocess.run(trial, env=inherited, check=True, timeout=120, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _control(command: str, environment: dict[str, str]) -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        inherited = {**os.environ, **environment}
        subprocess.run([_MPS], input=command.encode(), env=inherited, check=False, timeout=60, capture_output=True)
