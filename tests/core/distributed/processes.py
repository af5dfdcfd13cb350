"""Run jobs in two processes that form a group, and hand back what each returned.

Starting the processes takes longer than the jobs, so all the jobs go to the same two.
"""

import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from gossamer.lab.training.distributed import end_process

WORLD = 2
Job = tuple[Callable[..., Any], tuple[Any, ...]]  # called with the rank, a folder and these arguments


def _enter(rank: int, jobs: Mapping[str, Job], folder: str, scratch: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD, timeout=timedelta(seconds=20)
    )
    results: dict[str, Any] = {}
    try:
        for name, (work, arguments) in jobs.items():
            results[name] = _result(work, rank, scratch / name, arguments)
            if isinstance(results[name], str):
                break  # the processes may be out of step now
    finally:
        torch.save(results, f"{folder}/{rank}.pt")
    end_process(0)


def _result(work: Callable[..., Any], rank: int, folder: Path, arguments: tuple[Any, ...]) -> Any:
    try:
        folder.mkdir(exist_ok=True)
        return work(rank, folder, *arguments)
    except Exception:
        return traceback.format_exc()


class Results:
    """What each job returned in each process."""

    def __init__(self, by_rank: list[dict[str, Any]]) -> None:
        self._by_rank = by_rank

    def of(self, name: str) -> list[Any]:
        """By rank. Fails with what a process had to say when the job did not end well."""
        missing = f"{name} was not reached, as a job before it failed"
        results = [results.get(name, missing) for results in self._by_rank]
        for rank, result in enumerate(results):
            if isinstance(result, str):
                raise AssertionError(f"process {rank}: {result}")
        return results


def in_two_processes(jobs: Mapping[str, Job], scratch: Path) -> Results:
    """Run `work(rank, folder, *arguments)` of each job; it returns a dict of values and plain tensors."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_enter, (jobs, folder, scratch), nprocs=WORLD)
        return Results([torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(WORLD)])
