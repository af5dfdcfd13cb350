"""Sweeps: any runs of a network trained together, as one stacked network, with one record per run.

A run that has its record is not trained again, so a wider sweep adds to the records. An interrupted sweep resumes from
its last checkpoint when it is asked for again.
"""

import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from gossamer.io.sparse_file import save
from gossamer.lab import data
from gossamer.lab.batched.folder import RecordWriter, held, portions
from gossamer.lab.batched.loop import LoopOptions, train_batched
from gossamer.lab.batched.rows import Outcome, settled
from gossamer.lab.batched.supported import batched_run, check, check_reachable, images_of, shared
from gossamer.lab.checkpoint import Checkpoints
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.results.records import read_record
from gossamer.lab.training import networks, result
from gossamer.lab.training.distributed import DistributedContext, check_one_process, join
from gossamer.lab.training.run import Run
from gossamer.lab.training.signals import Interrupted, StopSignal
from gossamer.methods import find
from gossamer.methods.base import Layout
from gossamer.methods.filters import norms_of
from gossamer.prunable import select
from gossamer.state import make_layout

Record = dict[str, Any]


def sweep(
    runs: Sequence[Run],
    out: Path | str,
    *,
    device: torch.device | str = "auto",
    together: int = 32,
    save_models: bool = False,
    progress: Callable[[str], None] = lambda line: None,
    moved: Callable[[float], None] = lambda share: None,
    further: Callable[[Run, nn.Module], Mapping[str, Any]] = lambda run, network: {},
    batch_done: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Train the runs that have no record in `out` yet, up to `together` at a time, and return all the records.

    A record is what `result.json` is for a run alone, and what `further` says of the run and its network. Runs that
    cannot share a batch (another network, data set, number of epochs, batch size …) are trained one batch after the
    other; `batch_done` is called after each. `device="auto"` takes a GPU if there is one. With `save_models` each
    network is saved beside its record, as a file for `gossamer.load`. One process trains in a folder at a time.
    """
    check_one_process()
    if together < 1:
        raise ValueError(f"expected at least 1 run at a time, got together={together}")
    out, device = Path(out), device if isinstance(device, torch.device) else join(device).device
    wanted = {run.run_id: run for run in runs}
    check([*wanted.values()])
    if missing_in(out, wanted.values()):
        options = _Options(out, device, together, save_models, progress, moved, further, batch_done)
        with held(out):
            _train_missing(wanted.values(), options)
    return [read_record_of(run, out) for run in wanted.values()]


@dataclass(frozen=True)
class _Options:
    """How the runs of a sweep are trained and recorded."""

    out: Path
    device: torch.device
    together: int
    save_models: bool
    progress: Callable[[str], None]
    moved: Callable[[float], None]
    further: Callable[[Run, nn.Module], Mapping[str, Any]]
    batch_done: Callable[[], None]


def record_path(out: Path, run: Run) -> Path:
    return out / f"{run.run_id}.json"


def checkpoints_of(runs: Sequence[Run], out: Path) -> Checkpoints:
    """Where a batch of these runs is written while it trains."""
    digest = hashlib.sha256(" ".join(run.run_id for run in runs).encode()).hexdigest()
    return Checkpoints(out, f"batch-{digest[:12]}")


def begun_batches(runs: Mapping[str, Run], out: Path) -> list[list[Run]]:
    """The batches of these runs, by their identities, that have a checkpoint in a folder."""
    found = []
    for name in sorted({path.name.rpartition("-")[0] for path in out.glob("batch-*-*.pt")}):
        stated = (Checkpoints(out, name).peek() or {}).get("runs")
        if isinstance(stated, list) and stated and all(isinstance(each, str) and each in runs for each in stated):
            batch = [runs[each] for each in stated]
            found += [batch] if checkpoints_of(batch, out).name == name else []
    return found


def missing_in(out: Path, runs: Collection[Run]) -> list[Run]:
    """The runs without a record in a folder."""
    return [run for run in runs if not record_path(out, run).exists()]


def read_record_of(run: Run, out: Path) -> Record:
    """The record of a run, which was trained with the settings that the run has now."""
    path = record_path(out, run)
    record = read_record(path)
    check_defaults(run, record, path)
    return record


def check_defaults(run: Run, record: Record, path: Path) -> None:
    """Refuse a record from before a default of its method changed."""
    now = asdict(run.options)
    then = record.setdefault("options", now)  # which records from before this key have not
    changed = [f"{name}={then[name]}" for name, value in now.items() if then.get(name, value) != value]
    if changed and run.method != "dense":
        raise ValueError(
            f"{path} was trained when {', '.join(changed)} was the default: name these settings, choose another "
            "folder, or delete it to train the run again"
        )


def train_together(
    runs: Sequence[Run],
    images: ImageSet,
    make_network: Callable[[], nn.Module],
    **options: Unpack[LoopOptions],
) -> list[tuple[Outcome, nn.Module]]:
    """Train runs as one batch, on these images, and return the outcome and the network of each, in their order."""
    check(runs)
    names = sorted({name for run in runs for name in shared(run).differences_from(shared(runs[0]))})
    if names:
        raise ValueError(f"expected runs that can share a batch, got some that differ in {', '.join(names)}")
    steps = len(images.train) // runs[0].batch_size
    if not steps:
        raise ValueError(f"expected at least one batch of {runs[0].batch_size} images, got {len(images.train)} images")
    trained: dict[int, nn.Module] = {}
    batched = [batched_run(run, steps) for run in runs]
    outcomes = train_batched(batched, images, make_network, keep=trained.__setitem__, **options)
    return [(outcome, trained[number]) for number, outcome in enumerate(outcomes)]


def precision_of(run: Run, device: torch.device) -> torch.dtype:
    """What images and weights of the forward pass are in; `auto` is what is fast on the device."""
    if run.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if run.precision == "bf16" else torch.float32


def layout_of(network: nn.Module) -> Layout:
    """Which prunable weights a network has."""
    weights = select(network)
    names = tuple(weight.name for weight in weights)
    others = [(name, each.numel()) for name, each in network.named_parameters() if name not in names]
    return make_layout(weights, any_order=False, norms=norms_of(network, names, others))


def _train_missing(wanted: Collection[Run], options: _Options) -> None:
    """Train the runs without a record, those that can share a batch in one."""
    out = options.out
    batches: dict[str, list[Run]] = {}
    for run in wanted:
        batches.setdefault(shared(run).run_id, []).append(run)
    whole = sum(run.epochs for run in missing_in(out, wanted))
    for alike in batches.values():
        missing = missing_in(out, sorted(alike, key=lambda run: run.seed))  # those of one seed share warm-ups
        if not missing:
            continue
        images = _images(missing[0])
        _check_network(missing, images)
        there = begun_batches({run.run_id: run for run in alike}, out)
        for portion in portions(missing, there, options.together):
            left = len(missing_in(out, alike))
            options.progress(f"a batch of {len(portion)} runs of {portion[0].epochs} epochs, {left} to go")
            done = whole - sum(run.epochs for run in missing_in(out, wanted))
            moved = partial(_move, options.moved, done, sum(run.epochs for run in portion), whole)
            stopping = _train_portion(portion, images, options, moved)
            options.batch_done()
            left = len(missing_in(out, wanted))
            if stopping and left:
                raise Interrupted(
                    f"stopped before the last {left} run{'s' * (left != 1)}; the others have their records in {out}: "
                    "run the same command again to resume"
                )


def _move(moved: Callable[[float], None], before: int, own: int, whole: int, share: float) -> None:
    """Report the share of all epochs, from the share of those of one batch."""
    moved((before + own * share) / whole)


def _train_portion(runs: Sequence[Run], images: ImageSet, options: _Options, moved: Callable[[float], None]) -> bool:
    """Train these runs and write their records; whether a stop was requested after their last step."""
    first, checkpoints = runs[0], checkpoints_of(runs, options.out)
    started, writer = time.perf_counter(), RecordWriter()
    with StopSignal() as stop:
        trained = train_together(
            runs,
            images,
            lambda: networks.create(first, images.num_classes),
            device=options.device,
            dtype=precision_of(first, options.device),
            progress=options.progress,
            moved=moved,
            checkpoints=checkpoints,
            checkpoint_minutes=first.checkpoint_minutes or math.inf,
            stop=lambda: stop.asked,
        )
        seconds = trained[0][0].seconds_before + time.perf_counter() - started
        for run, (outcome, network) in zip(runs, trained, strict=True):
            path = record_path(options.out, run)
            example = torch.zeros(2, *images.input_shape)
            content = _record(run, outcome, network, example, options.device, seconds, len(runs))
            content |= options.further(run, network)
            model = [partial(save, network, path.with_suffix(".safetensors"))] if options.save_models else []
            writer.write(path, [*model, partial(result.write_json, path, content)])
    writer.finish(checkpoints)
    return stop.asked


def _record(
    run: Run, outcome: Outcome, network: nn.Module, example: Tensor, device: torch.device, seconds: float, together: int
) -> Record:
    """One finished run as plain values: those of a result.json, and of its batch."""
    diverged = not math.isfinite(outcome.train_loss)
    plain = result.make_result(
        run,
        DistributedContext(device),
        mode=f"{str(precision_of(run, device)).removeprefix('torch.')}, batched",
        counted=result.count(run, network, example),
        metric="accuracy",
        test=outcome.accuracy,
        validation=outcome.validation_accuracy,
        seconds=seconds / together,
        settled=_settled(run, outcome),
        teacher=_teacher(run, outcome),
    )
    return {
        **plain,
        "train_loss": None if diverged else outcome.train_loss,
        "diverged": diverged,
        "nonzeros_by_tensor": list(outcome.nonzeros_by_tensor),
        "seconds_of_batch": seconds,
        "runs_in_batch": together,
        **_of_fixed_decay(run, outcome),
    }


def _of_fixed_decay(run: Run, outcome: Outcome) -> dict[str, Any]:
    """The sparsity after each epoch in which masks trained, and the step at which the sparsify phase was left early."""
    if run.decay is None:
        return {}
    return {"sparsity_by_epoch": list(outcome.sparsity_by_epoch), "left_sparsify_at": outcome.left}


def _teacher(run: Run, outcome: Outcome) -> dict[str, Any] | None:
    return {"from": run.teacher, "network": run.model, "steps": outcome.warmup_steps} if run.distil else None


def _settled(run: Run, outcome: Outcome) -> dict[str, float] | None:
    if run.method == "dense":
        return None
    density = None if run.decay is not None else 1.0 - outcome.sparsity
    return settled(find(run.method), run.options, mask_steps=outcome.mask_steps, density=density) or None


def _images(run: Run) -> ImageSet:
    images = data.load(run.data, run.data_root)
    if not isinstance(images, ImageSet):
        raise ValueError(f"expected a set of images that fits the device, such as cifar10, got data={run.data!r}")
    return images_of(run, images)


def _check_network(runs: Sequence[Run], images: ImageSet) -> None:
    """All that can be refused is refused before the first step."""
    network = networks.create(runs[0], images.num_classes)
    networks.check_shapes(runs[0], network, torch.zeros(2, *images.input_shape), images.num_classes)
    check_reachable(runs, layout_of(network))
