"""Sweeps: any runs of a network trained together, as one stacked network, with one record a run.

A run that has its record is not trained again, so a wider sweep adds to the records; and one that is cut short goes on
from its last checkpoint when it is asked for again.
"""

import hashlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from gossamer.io.sparse_file import save
from gossamer.lab import data
from gossamer.lab.batched.checkpoint import ENDING, begun, between
from gossamer.lab.batched.course import How, train_side_by_side
from gossamer.lab.batched.folder import Leaving, held, portions
from gossamer.lab.batched.lanes import Outcome, settled
from gossamer.lab.batched.stackable import check, check_reachable, common_of, images_of, lane_of, shared
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.json_files import read_object
from gossamer.lab.training import networks, result
from gossamer.lab.training.distributed import DistributedContext, check_one_process, join
from gossamer.lab.training.run import Run
from gossamer.lab.training.signals import Interrupted, StopSignal
from gossamer.methods import find
from gossamer.methods.base import Layout
from gossamer.prunable import select


def sweep(
    runs: Sequence[Run],
    out: Path | str,
    *,
    device: torch.device | str = "auto",
    together: int = 32,
    save_models: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Train the runs that have no record in `out` yet, up to `together` at a time, and return all the records.

    A record is what `result.json` is for a run alone. Runs that cannot share a stack (another network, data set, number
    of epochs, batch size …) are trained one stack after the other. `device="auto"` takes a GPU where there is one. With
    `save_models` each network is left beside its record, as a file for `gossamer.load`. One process trains in a folder
    at a time.
    """
    check_one_process()
    if together < 1:
        raise ValueError(f"expected at least 1 run at a time, got together={together}")
    out, device = Path(out), device if isinstance(device, torch.device) else join(device).device
    wanted = {run.run_id: run for run in runs}
    check([*wanted.values()])
    if _missing(wanted.values(), out):
        with held(out):
            _train_missing(wanted.values(), out, device, together, save_models=save_models, progress=progress)
    return [_read_record(record_path(out, run)) for run in wanted.values()]


def _read_record(path: Path) -> dict[str, Any]:
    """The record of a run, with all that the table of a sweep shows."""
    found = read_object(path, "the record of a run", ": delete it to train the run again")
    needed = ("config", "diverged", "accuracy", "sparsity", "train_loss", "validation_accuracy")
    if lacking := [name for name in needed if name not in found]:
        raise ValueError(
            f"expected the record of a run in {path}, got one without {', '.join(lacking)}: delete it to train the run "
            "again"
        )
    result.check_result(found, path)
    return found


def record_path(out: Path, run: Run) -> Path:
    return out / f"{run.run_id}.json"


def checkpoint_path(out: Path, runs: Sequence[Run]) -> Path:
    """Where a stack of these runs is written while it trains."""
    name = hashlib.sha256(" ".join(run.run_id for run in runs).encode()).hexdigest()[:12]
    return out / f"{name}{ENDING}"


def train_together(
    runs: Sequence[Run],
    images: ImageSet,
    make_network: Callable[[], nn.Module],
    **how: Unpack[How],
) -> list[tuple[Outcome, nn.Module]]:
    """Train runs as one stack, on these images, and return what has come of each, with its network, in their order."""
    check([*runs])
    names = sorted({name for run in runs for name in shared(run).differences_from(shared(runs[0]))})
    if names:
        raise ValueError(f"expected runs that can share a stack, got some that differ in {', '.join(names)}")
    steps = len(images.train) // runs[0].batch_size
    if not steps:
        raise ValueError(f"expected at least one batch of {runs[0].batch_size} images, got {len(images.train)} images")
    trained: dict[int, nn.Module] = {}
    lanes = [lane_of(run, steps) for run in runs]
    outcomes = train_side_by_side(common_of(runs[0]), lanes, images, make_network, keep=trained.__setitem__, **how)
    return [(outcome, trained[number]) for number, outcome in enumerate(outcomes)]


def precision_of(run: Run, device: torch.device) -> torch.dtype:
    """What images and weights of the forward pass are in; `auto` is what is fast on the device."""
    if run.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if run.precision == "bf16" else torch.float32


def _missing(runs: Collection[Run], out: Path) -> list[Run]:
    return [run for run in runs if not record_path(out, run).exists()]


def _train_missing(
    wanted: Collection[Run],
    out: Path,
    device: torch.device,
    together: int,
    *,
    save_models: bool,
    progress: Callable[[str], None],
) -> None:
    """Train the runs without a record, those that can share a stack in one."""
    stacks: dict[str, list[Run]] = {}
    for run in wanted:
        stacks.setdefault(shared(run).run_id, []).append(run)
    for alike in stacks.values():
        missing = _missing(sorted(alike, key=lambda run: run.seed), out)  # those of one seed share trunks
        if not missing:
            continue
        images = _images(missing[0])
        _check_network(missing, images)
        there = begun(out, {run.run_id: run for run in alike}, partial(checkpoint_path, out))
        for portion in portions(missing, there, together):
            to_go = len(_missing(alike, out))
            progress(f"{len(portion)} runs of {portion[0].epochs} epochs side by side, {to_go} to go")
            stopping = _train_portion(portion, images, out, device, save_models=save_models, progress=progress)
            left = len(_missing(wanted, out))
            if stopping and left:
                raise Interrupted(between(left, out))


def _train_portion(
    runs: Sequence[Run],
    images: ImageSet,
    out: Path,
    device: torch.device,
    *,
    save_models: bool,
    progress: Callable[[str], None],
) -> bool:
    """Train these runs and write their records; whether somebody has asked to stop after their last step."""
    first, checkpoint = runs[0], checkpoint_path(out, runs)
    started, leaving = time.perf_counter(), Leaving()
    with StopSignal() as stop:
        trained = train_together(
            runs,
            images,
            lambda: networks.create(first, images.num_classes),
            device=device,
            dtype=precision_of(first, device),
            progress=progress,
            checkpoint=checkpoint,
            checkpoint_minutes=first.checkpoint_minutes or math.inf,
            stop=lambda: stop.asked,
        )
        seconds = trained[0][0].seconds_before + time.perf_counter() - started
        for run, (outcome, network) in zip(runs, trained, strict=True):
            path = record_path(out, run)
            content = _record(run, outcome, network, images, device, seconds, len(runs))
            model = [partial(save, network, path.with_suffix(".safetensors"))] if save_models else []
            leaving.write(path, [*model, partial(result.write_json, path, content)])
    leaving.finish(checkpoint)
    return stop.asked


def _record(
    run: Run,
    outcome: Outcome,
    network: nn.Module,
    images: ImageSet,
    device: torch.device,
    seconds: float,
    together: int,
) -> dict[str, Any]:
    """One finished run as plain values: those of a result.json, and of how it was trained."""
    held_out = outcome.validation_accuracy
    diverged = not math.isfinite(outcome.train_loss)
    plain = result.make_result(
        run,
        DistributedContext(device),
        mode=f"{str(precision_of(run, device)).removeprefix('torch.')}, side by side",
        counted=result.count(run, network, torch.zeros(2, *images.input_shape)),
        metric="accuracy",
        test=outcome.accuracy / 100.0,
        validation=None if held_out is None else held_out / 100.0,
        seconds=seconds / together,
        settled=_settled(run, outcome),
    )
    return {
        **plain,
        "train_loss": None if diverged else outcome.train_loss,
        "diverged": diverged,
        "connections_by_tensor": list(outcome.connections_by_tensor),
        "seconds_of_all_runs_together": seconds,
        "runs_together": together,
    }


def _settled(run: Run, outcome: Outcome) -> dict[str, float] | None:
    if run.method == "dense":
        return None
    left = None if run.decay is not None else 1.0 - outcome.sparsity
    return settled(find(run.method), run.options, mask_steps=outcome.mask_steps, density=left) or None


def _images(run: Run) -> ImageSet:
    images = data.load(run.data, run.data_root)
    if not isinstance(images, ImageSet):
        raise ValueError(f"expected a set of images that fits the device, such as cifar10, got data={run.data!r}")
    return images_of(run, images)


def _check_network(runs: Sequence[Run], images: ImageSet) -> None:
    """All that can be refused is refused before the first step."""
    network = networks.create(runs[0], images.num_classes)
    networks.check_shapes(runs[0], network, torch.zeros(2, *images.input_shape), images.num_classes)
    weights = select(network)
    shapes = tuple(tuple(weight.parameter.shape) for weight in weights)
    check_reachable([*runs], Layout(tuple(weight.name for weight in weights), shapes))
