"""The paper's fully connected DenseNet on MNIST: the table of λ1, the table of estimators at 95 % sparsity, and the
picture of which pixels are connected.

The paper says that masks are frozen in the first and the last 15 epochs, and not how long they train in between. With
a fixed λ1 connections go as long as masks train, so the table of λ1 is trained with 2 and with 25 mask epochs, in runs
of the same length. The estimators are compared at exactly 95 %: the budget is solved for, everything else is the
paper's. Beside both stand our defaults at the paper's sparsities.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gossamer.lab import data, models
from gossamer.lab.batched.checkpoint import between, remove
from gossamer.lab.batched.rows import Outcome
from gossamer.lab.batched.sweeps import checkpoint_path, train_together
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.models.fc_densenet import FullyConnectedDenseNet
from gossamer.lab.recipes import find
from gossamer.lab.recipes.mnist import DECAY_TABLE
from gossamer.lab.reproduce.picture import draw_input_connections
from gossamer.lab.reproduce.record import write_record
from gossamer.lab.results.records import defaults_of, make_folder, read_record
from gossamer.lab.training.distributed import DistributedContext
from gossamer.lab.training.parsing import Scalar
from gossamer.lab.training.result import hardware
from gossamer.lab.training.run import Run
from gossamer.lab.training.signals import Interrupted, StopSignal
from gossamer.methods.scl import SCLOptions
from gossamer.provenance import commit, versions

EPOCHS = 55
FREE_EPOCHS = 15  # at the beginning and, at least, at the end, in which masks are frozen
MASK_EPOCHS = (2, 25)
PICTURE = "input-connectivity.png"
# What tables and picture take from a record.
_NEEDED = (
    *("part", "config", "decay", "asked_sparsity", "sparsity", "accuracy", "paper_accuracy", "paper_sparsity"),
    "input_connections",
)


# (estimator, normalised): accuracy at 95 % sparsity.
ESTIMATOR_SPARSITY = 0.95
ESTIMATOR_TABLE = {
    ("leaky_relu", False): 0.9826,
    ("softplus", False): 0.9831,
    ("identity", False): 0.9837,
    ("leaky_relu", True): 0.9833,
    ("softplus", True): 0.9835,
    ("identity", True): 0.9839,
}
# Raw mask gradients are tiny: at the rate that suits normalised ones masks hardly move, so a second one is tried.
RATES = {"batch": (0.1,), "none": (0.1, 30.0)}


@dataclass(frozen=True)
class Entry:
    """A run, the part of the exhibit it belongs to, and what the paper has for it."""

    part: str  # dense, decay, estimator or default
    run: Run
    paper_accuracy: float
    paper_sparsity: float


def entries(*, seeds: int, epochs: int = EPOCHS) -> list[Entry]:
    """All runs of the exhibit."""
    if seeds < 1 or epochs < 3:
        raise ValueError(f"expected at least 1 seed and 3 epochs, one a phase, got {seeds} and {epochs}")
    return [entry for seed in range(seeds) for entry in _entries_of_seed(seed, epochs)]


def _entries_of_seed(seed: int, epochs: int) -> Iterator[Entry]:
    dense, default, paper = (
        replace(find(f"mnist-fc-densenet{kind}").run, seed=seed, epochs=epochs, settings={})
        for kind in ("-dense", "", "-paper")
    )
    published = {row.decay: row for row in find("mnist-fc-densenet-paper").published if row.table == DECAY_TABLE}
    by_decay = [(decay, row.value, row.sparsity or 0.0) for decay, row in published.items() if decay is not None]
    yield Entry("dense", dense, published[None].value, 0.0)
    free = max(1, round(FREE_EPOCHS * epochs / EPOCHS))
    for mask_epochs in sorted({min(length, epochs - 2 * free) for length in MASK_EPOCHS}):
        phases = {"warmup": f"{free}ep", "sparsify": f"{mask_epochs}ep", "stabilise": "0ep"}
        for decay, accuracy, sparsity in by_decay:
            yield Entry("decay", replace(paper, decay=decay, settings=phases), accuracy, sparsity)
    phases["sparsify"] = f"{epochs - 2 * free}ep"
    for (estimator, normalised), accuracy in ESTIMATOR_TABLE.items():
        scale = "batch" if normalised else "none"
        for rate in RATES[scale]:
            settings: dict[str, Scalar] = {**phases, "estimator": estimator, "scale": scale, "mask_lr": rate}
            run = replace(paper, decay=None, sparsity=ESTIMATOR_SPARSITY, settings=settings)
            yield Entry("estimator", run, accuracy, ESTIMATOR_SPARSITY)
    yield Entry("default", default, ESTIMATOR_TABLE["identity", True], ESTIMATOR_SPARSITY)
    for _, accuracy, sparsity in by_decay:
        yield Entry("default", replace(default, sparsity=sparsity), accuracy, sparsity)


def reproduce(
    out: Path,
    *,
    seeds: int = 3,
    epochs: int = EPOCHS,
    device: torch.device,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Train what has no record under `out` yet, draw the picture, and return all the records."""
    if seeds < 1:
        raise ValueError(f"expected at least 1 seed, got {seeds}")
    wanted = entries(seeds=seeds, epochs=epochs)
    missing = [entry for entry in wanted if not _is_there(_path(out, entry), entry)]
    images = _images() if missing else None
    make_folder(out)
    # A GPU has room for all at once; a CPU gains nothing from it, and has a seed's records sooner.
    for portion in _portions(missing, by_seed=device.type == "cpu"):
        assert images is not None
        progress(f"{len(portion)} runs of {epochs} epochs together")
        stopping = _train_portion(portion, images, out, device, progress)
        left = sum(not _is_there(_path(out, entry), entry) for entry in wanted)
        if stopping and left:
            raise Interrupted(between(left, out))
    records = [read_record(_path(out, entry), _NEEDED) for entry in wanted]
    try:
        draw_input_connections(records, out / PICTURE)
    except ImportError as error:
        progress(f"no picture: {error}")
    return records


def _train_portion(
    portion: Sequence[Entry], images: ImageSet, out: Path, device: torch.device, progress: Callable[[str], None]
) -> bool:
    """Train these runs and write their records; whether somebody has asked to stop after their last step."""
    runs, started = [entry.run for entry in portion], time.perf_counter()
    checkpoint = checkpoint_path(out, runs)
    with StopSignal() as stop:
        trained = train_together(
            runs,
            images,
            _network,
            device=device,
            dtype=torch.float32,
            progress=progress,
            checkpoint=checkpoint,
            stop=lambda: stop.asked,
        )
        seconds = time.perf_counter() - started
        for entry, (outcome, network) in zip(portion, trained, strict=True):
            assert isinstance(network, FullyConnectedDenseNet)
            write_record(_path(out, entry), record(entry, outcome, network, device, seconds, len(portion)))
    remove(checkpoint)
    return stop.asked


def _is_there(path: Path, entry: Entry) -> bool:
    """Whether a run has its record, and not one from before a default changed; the paper's settings never do."""
    if not path.exists() or entry.part != "default":
        return path.exists()
    asked = entry.run.options
    return all(value == getattr(asked, name) for name, value in defaults_of(read_record(path, _NEEDED)).items())


def record(
    entry: Entry,
    outcome: Outcome,
    network: FullyConnectedDenseNet,
    device: torch.device,
    seconds: float,
    together: int,
) -> dict[str, Any]:
    """One finished run as plain values; accuracies in percent, as in the races."""
    run, weights, options = entry.run, _weights(network), entry.run.options
    assert isinstance(options, SCLOptions)  # also of a dense run, which has those of the run it is compared with
    if not math.isfinite(outcome.train_loss):
        raise ArithmeticError(f"the loss of run {run.run_id} is not finite: lower its lr")
    connections = {name: int(weight.count_nonzero()) for name, weight in weights.items()}
    total = sum(weight.numel() for weight in weights.values())
    return {
        "exhibit": "mnist",
        "part": entry.part,
        "run_id": run.run_id,
        "method": run.method,
        "preset": run.preset,
        "mask_lr": options.mask_lr,
        "mask_decay": options.mask_decay,
        "mask_decay_cap": options.mask_decay_cap,
        "pruned_grad_scale": options.pruned_grad_scale,
        "net": run.model,
        "data": run.data,
        "decay": run.decay,
        "asked_sparsity": run.sparsity,
        "sparsity": 1.0 - sum(connections.values()) / total,
        "connections": sum(connections.values()),
        "accuracy": outcome.accuracy,
        "train_loss": outcome.train_loss,
        "paper_accuracy": 100.0 * entry.paper_accuracy,
        "paper_sparsity": entry.paper_sparsity,
        "seed": run.seed,
        "epochs": run.epochs,
        "connections_by_tensor": connections,
        "input_connections": input_connections(network),
        "config": run.to_dict(),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(DistributedContext(device)),
        "seconds_of_all_runs_together": seconds,
        "runs_together": together,
    }


def input_connections(network: FullyConnectedDenseNet) -> list[int]:
    """How many connections each pixel has, over all layers, as all of them read the pixels directly."""
    weights = list(_weights(network).values())
    pixels = weights[0].shape[1]
    counts: list[int] = sum((weight[:, :pixels] != 0).sum(0) for weight in weights).tolist()  # type: ignore[union-attr]
    return counts


def _weights(network: FullyConnectedDenseNet) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in network.named_parameters() if parameter.dim() > 1}


def _network() -> FullyConnectedDenseNet:
    network = models.create("fc_densenet_mnist")
    assert isinstance(network, FullyConnectedDenseNet)
    return network


def _images() -> ImageSet:
    images = data.load("mnist")
    assert isinstance(images, ImageSet)
    return images


def _portions(missing: Sequence[Entry], *, by_seed: bool) -> list[list[Entry]]:
    seeds = sorted({entry.run.seed for entry in missing})
    portions = [[entry for entry in missing if entry.run.seed == seed] for seed in seeds] if by_seed else [[*missing]]
    return [portion for portion in portions if portion]


def _path(out: Path, entry: Entry) -> Path:
    return out / f"{entry.part}-{entry.run.run_id}.json"
