"""Runs of a fully connected DenseNet that differ in seed and method, trained at the same time as one stacked network.

Each gives what `gossamer train` gives for it alone, up to the rounding of sums. On a GPU every step is one captured
graph; on a CPU the products of all runs are done together.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.data.sets import ImageSet, Labelled
from gossamer.models.fc_densenet import FullyConnectedDenseNet
from gossamer.reproduce.stacked_densenet import DenseNetStack
from gossamer.reproduce.stacked_rules import Block, by_rule
from gossamer.schedule import Phase
from gossamer.side_by_side.capture import Captured
from gossamer.side_by_side.feed import Feed
from gossamer.training.run import Run

# Fields of a run that may have other values than the defaults here.
_UNDERSTOOD = {"model", "data", "method", "sparsity", "decay", "preset", "settings", "epochs", "batch_size", "seed"}
_UNDERSTOOD |= {"lr", "momentum", "weight_decay", "schedule", "lr_warmup", "lr_drops", "lr_factor"}


@dataclass(frozen=True, eq=False)
class Trained:
    """One finished run."""

    run: Run
    accuracy: float  # share of the test images, at the last epoch
    train_loss: float  # mean over the last epoch
    network: FullyConnectedDenseNet  # on the CPU


def train_together(
    runs: Sequence[Run],
    images: ImageSet,
    make_network: Callable[[], FullyConnectedDenseNet],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Trained]:
    """Train all runs, in the same number of epochs and with the same batch size, and return them in their order."""
    _check(runs)
    groups = by_rule(runs)
    ordered = [run for group in groups for run in group]
    seeds = sorted({run.seed for run in runs})
    feed = Feed(images, seeds, runs[0].batch_size, device=device, dtype=dtype)
    stack = DenseNetStack([_network(run, make_network).to(dtype) for run in ordered], device)
    blocks, first = [], 0
    for group in groups:
        blocks.append(Block(stack, slice(first, first + len(group)), group, feed.steps))
        first += len(group)
    which = torch.tensor([seeds.index(run.seed) for run in ordered], device=device)
    losses = torch.zeros(len(ordered), device=device)
    number = torch.zeros(1, dtype=torch.int64, device=device)
    captured: Captured | None = None
    phases: list[Phase] = []
    mean: list[float] = []
    epochs, started = runs[0].epochs, time.perf_counter()
    for epoch in range(epochs):
        feed.begin_epoch(epoch)
        losses.zero_()
        for step in range(epoch * feed.steps, (epoch + 1) * feed.steps):
            for block in blocks:
                block.prepare(step)
            now = [block.phase(step) for block in blocks]
            if captured is None or now != phases:
                captured, phases = Captured(_step(stack, blocks, now, feed, which, losses, number), device), now
            captured()
        mean = (losses / feed.steps).tolist()
        took = time.perf_counter() - started
        progress(
            f"epoch {epoch + 1}/{epochs} of {len(runs)} runs, {took:.0f} s, loss {min(mean):.3f} to {max(mean):.3f}"
        )
        _check_losses(ordered, mean, epoch)
    accuracy = evaluate(stack, feed, images.test)
    rows = {id(run): row for row, run in enumerate(ordered)}
    return [
        Trained(run, accuracy[rows[id(run)]], mean[rows[id(run)]], stack.fill_(make_network(), rows[id(run)]))
        for run in runs
    ]


def evaluate(stack: DenseNetStack, feed: Feed, part: Labelled) -> list[float]:
    """The share of the images that each network gets right."""
    right = torch.zeros(len(stack), device=stack.variables.device)
    with torch.no_grad():
        for images, labels in feed.evaluation(part):
            right += (stack(images[None], training=False).argmax(-1) == labels).sum(1)
    return (right / len(part)).tolist()


def _step(
    stack: DenseNetStack,
    blocks: Sequence[Block],
    phases: Sequence[Phase],
    feed: Feed,
    which: Tensor,
    losses: Tensor,
    number: Tensor,
) -> Callable[[], None]:
    def step() -> None:
        images, labels = feed.take()
        images, labels = images.index_select(0, which), labels.index_select(0, which)
        logits = stack(images, training=True)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)
        (gradient,) = torch.autograd.grad(loss.sum(), stack.shown)
        with torch.no_grad():
            losses.add_(loss.detach())
            for block, phase in zip(blocks, phases, strict=True):
                block.learn(gradient, number, phase)
            number.add_(1)

    return step


def _network(run: Run, make_network: Callable[[], FullyConnectedDenseNet]) -> FullyConnectedDenseNet:
    torch.manual_seed(run.seed)
    return make_network()


def _check(runs: Sequence[Run]) -> None:
    if len({(run.epochs, run.batch_size, run.model, run.data) for run in runs}) != 1:
        raise ValueError("expected runs of one network on one data set, with the same epochs and batch size")
    for run in runs:
        strange = sorted(run.differences().keys() - _UNDERSTOOD)
        if strange or run.method not in ("dense", "scl") or run.mask_settings.mask_momentum:
            what = ", ".join(strange) or "method or mask_momentum"
            raise ValueError(f"a stack of runs cannot change {what}: train such a run by itself (gossamer train)")
        if run.mask_settings.scale == "per_sample":
            raise ValueError("a stack of runs has no scale='per_sample': train such a run by itself (gossamer train)")


def _check_losses(runs: Sequence[Run], losses: Sequence[float], epoch: int) -> None:
    bad = [run.run_id for run, loss in zip(runs, losses, strict=True) if not math.isfinite(loss)]
    if bad:
        raise ArithmeticError(f"the loss of run {', '.join(bad)} is not finite in epoch {epoch + 1}: lower its lr")
