"""The paper's argument about IndRNN: pruning W leaves the gradient over time as it is, pruning u cuts it off.

h_t = relu(W x_t + u ⊙ h_{t−1} + b), so ∂J/∂h_t contains u to the power T − t. Here one layer reads random sequences,
with nothing pruned, with a share of W pruned, and with the same share of u pruned (at random, which is enough for the
argument), and the norm of ∂J/∂h_t is measured at each step.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.lab.json_files import read_object
from gossamer.lab.models.indrnn import IndRNNCell
from gossamer.lab.results.plot import can_draw, save_figure
from gossamer.lab.training.distributed import DistributedContext
from gossamer.lab.training.result import hardware, write_json
from gossamer.provenance import commit, versions

RECORD, PICTURE = "gradient-norms.json", "gradient-norms.svg"
STEPS, HIDDEN, INPUTS, BATCH = 100, 128, 28, 64
KINDS = ("dense", "W pruned", "u pruned")


@dataclass(frozen=True)
class Norms:
    """The norm of ∂J/∂h_t by step t, mean over the batch and the seeds, and the share of neurons that it reaches."""

    pruned: str
    sparsity: float
    norms: Sequence[float]
    reached: Sequence[float]


def gradient_norms(pruned: str, sparsity: float, *, seeds: int, steps: int = STEPS) -> Norms:
    norms, reached = torch.zeros(steps, dtype=torch.float64), torch.zeros(steps, dtype=torch.float64)
    for seed in range(seeds):
        for_seed, share = _one(pruned, sparsity, seed, steps)
        norms += for_seed / seeds
        reached += share / seeds
    return Norms(pruned, sparsity, norms.tolist(), reached.tolist())


def _one(pruned: str, sparsity: float, seed: int, steps: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    cell = IndRNNCell(INPUTS, HIDDEN).double()
    bound = 2.0 ** (1 / steps)  # as in training: a state grows at most twofold over the sequence
    with torch.no_grad():
        cell.recurrent.uniform_(0.5 ** (1 / steps), bound)
        cell.input.bias.fill_(0.1)
        target = {"dense": None, "W pruned": cell.input.weight, "u pruned": cell.recurrent}[pruned]
        if target is not None:
            target.masked_fill_(torch.rand_like(target) < sparsity, 0.0)
    inputs, h = torch.randn(steps, BATCH, INPUTS, dtype=torch.float64), torch.zeros(BATCH, HIDDEN, dtype=torch.float64)
    states = []
    for x in cell.input(inputs).unbind(0):
        h = F.relu(torch.addcmul(x, cell.recurrent, h))
        states.append(h)
    gradients = torch.autograd.grad((states[-1] * torch.randn(HIDDEN, dtype=torch.float64)).sum(), states)
    stacked = torch.stack(gradients)
    return stacked.norm(dim=2).mean(1), (stacked != 0).double().mean((1, 2))


def reproduce(out: Path, *, seeds: int = 3, sparsities: Sequence[float] = (0.5, 0.9)) -> list[dict[str, Any]]:
    """The record under `out`, made if it does not exist, and its picture if matplotlib is installed."""
    path = out / RECORD
    if not path.exists():
        kinds = [("dense", 0.0), *((kind, sparsity) for kind in KINDS[1:] for sparsity in sparsities)]
        found = [asdict(gradient_norms(kind, sparsity, seeds=seeds)) for kind, sparsity in kinds]
        about = {
            "commit": commit(),
            "versions": versions(),
            "hardware": hardware(DistributedContext(torch.device("cpu"))),
        }
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, {"steps": STEPS, "seeds": seeds, **about, "curves": found})
    curves: list[dict[str, Any]] = read_object(path)["curves"]
    if can_draw():
        draw(curves, out / PICTURE)
    return curves


def draw(curves: Sequence[dict[str, Any]], path: Path) -> None:
    with save_figure(path, width=5.6, height=3.2) as figure:
        axes = figure.subplots()
        for each in curves:
            label = each["pruned"] + (f" to {each['sparsity']:.0%} zeros" if each["sparsity"] else "")
            axes.semilogy([max(norm, 1e-12) for norm in each["norms"]], label=label)
        axes.set_xlabel("step t")
        axes.set_ylabel("norm of ∂J/∂h at t")
        axes.legend(fontsize=8)
