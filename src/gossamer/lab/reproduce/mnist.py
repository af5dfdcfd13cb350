"""The paper's fully connected DenseNet on MNIST: the table of λ1, the table of estimators at 95 % sparsity, and the
picture of which pixels are connected.

The paper says that masks are frozen in the first and the last 15 epochs, and not how long they train in between. With
a fixed λ1 weights are pruned as long as masks train, so the table of λ1 is trained with 2 and with 25 mask epochs, in
runs of the same length. The estimators are compared at exactly 95 %: the budget is solved for, everything else is the
paper's. Beside both stand our defaults at the paper's sparsities. All runs are one sweep.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer.lab.batched.sweeps import sweep
from gossamer.lab.recipes import find
from gossamer.lab.recipes.mnist import DECAY_TABLE, ESTIMATOR_SPARSITY, ESTIMATOR_TABLE
from gossamer.lab.reproduce.picture import draw_input_connections
from gossamer.lab.results.records import Record
from gossamer.lab.training.parsing import Scalar
from gossamer.lab.training.run import Run

EPOCHS = 55
FREE_EPOCHS = 15  # at the beginning and, at least, at the end, in which masks are frozen
MASK_EPOCHS = (2, 25)
PICTURE = "input-connectivity.png"
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
        raise ValueError(f"expected at least 1 seed and 3 epochs, one per phase, got {seeds} and {epochs}")
    return [entry for seed in range(seeds) for entry in _entries_of_seed(seed, epochs)]


def _entries_of_seed(seed: int, epochs: int) -> Iterator[Entry]:
    dense, default, paper = (
        replace(find(f"mnist-fc-densenet{kind}").run, seed=seed, epochs=epochs, settings={}, precision="float32")
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
    moved: Callable[[float], None] = lambda share: None,
) -> list[Record]:
    """Train what has no record under `out` yet, draw the picture, and return all the records."""
    wanted = {entry.run.run_id: entry for entry in entries(seeds=seeds, epochs=epochs)}

    def further(run: Run, network: nn.Module) -> dict[str, Any]:
        entry = wanted[run.run_id]
        return {
            "exhibit": "mnist",
            "part": entry.part,
            "paper_accuracy": entry.paper_accuracy,
            "paper_sparsity": entry.paper_sparsity,
            "input_nonzeros": input_nonzeros(network),
        }

    runs = [entry.run for entry in wanted.values()]
    # A GPU has room for all at once; a CPU gains nothing from it, and has a seed's records sooner.
    together = len(runs) if device.type == "cuda" else len(runs) // seeds
    records = sweep(runs, out, device=device, together=together, progress=progress, moved=moved, further=further)
    try:
        draw_input_connections(records, out / PICTURE)
    except ImportError as error:
        progress(f"no picture: {error}")
    return records


def input_nonzeros(network: nn.Module) -> list[int]:
    """The nonzero weights of each pixel, over all layers, as all of them read the pixels directly."""
    weights = [parameter.detach() for parameter in network.parameters() if parameter.dim() > 1]
    pixels = weights[0].shape[1]
    counts: list[int] = torch.stack([(weight[:, :pixels] != 0).sum(0) for weight in weights]).sum(0).tolist()
    return counts
