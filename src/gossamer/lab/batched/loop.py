"""Batched training from the first step to the last: progress, checkpoints, and stopping without losing a step."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Required, TypedDict

import torch
from torch import nn

from gossamer.lab.batched.checkpoint import Keeper
from gossamer.lab.batched.rows import BatchedRun, Outcome
from gossamer.lab.batched.training import BatchedTraining
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.training.signals import Interrupted, may_be_of


class LoopOptions(TypedDict, total=False):
    """What functions around `train_batched` hand on to it."""

    device: Required[torch.device]
    dtype: torch.dtype
    progress: Callable[[str], None]
    checkpoint: Path | None
    checkpoint_minutes: float
    stop: Callable[[], bool]


def train_batched(
    runs: Sequence[BatchedRun],
    data: ImageSet,
    make_network: Callable[[], nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[str], None] = lambda line: None,
    checkpoint: Path | None = None,
    checkpoint_minutes: float = 5.0,
    stop: Callable[[], bool] = lambda: False,
    keep: Callable[[int, nn.Module], None] | None = None,
) -> list[Outcome]:
    """Train all runs, and return their outcomes.

    With a `checkpoint` the training is written there every few minutes, after an epoch, and after the last step, and
    resumes from there if it is interrupted; the caller removes it once the outcomes are safe. `stop` is asked after
    every step: then a checkpoint is written, and `Interrupted` says how to resume; after a KeyboardInterrupt it says
    how many steps are lost. `keep` gets every finished network, with the number of its run.
    """
    training = BatchedTraining(runs, data, make_network, device=device, dtype=dtype, stop=stop)
    first = 0 if checkpoint is None else training.restore(checkpoint)
    if training.done:
        epoch = min(first + 1, training.epochs)
        progress(f"resumes after step {training.done} of {training.steps}, in epoch {epoch} of {training.epochs}")
    keeper = Keeper(checkpoint, checkpoint_minutes, training.done)
    try:
        _train_epochs(training, first, keeper, progress)
        outcomes = training.outcomes()
        if keep is not None:
            for number, network in training.networks():
                keep(number, network)
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(keeper.loss(training.done, training.steps)) from None
    except Exception as error:
        if not (training.stop() and may_be_of(error)):
            raise
        raise Interrupted(keeper.loss(training.done, training.steps)) from error
    return outcomes


def _train_epochs(training: BatchedTraining, first: int, keeper: Keeper, progress: Callable[[str], None]) -> None:
    started, epochs = time.perf_counter(), training.epochs
    diverged: set[str] = set()
    for epoch in range(first, epochs):
        training.train_epoch(epoch)
        if training.stop() and training.done < training.steps:
            saved = keeper.keep(training.save, training.done)
            raise Interrupted(keeper.farewell(training.done, training.steps, saved=saved))
        # After the last step too: if its outcomes cannot be written, nothing has to be trained again.
        if keeper.is_due() or training.done == training.steps:
            keeper.keep(training.save, training.done)
        if epoch % max(1, epochs // 20) == 0 or epoch == epochs - 1:
            losses = training.train_loss.tolist()
            finite = [loss for loss in losses if math.isfinite(loss)] or [math.nan]
            took = time.perf_counter() - started
            progress(
                f"epoch {epoch + 1}/{epochs} {training.phases(epoch)} {took:.1f} s, "
                f"loss {min(finite):.3f} to {max(finite):.3f}"
            )
            for each, loss in zip(training.runs, losses, strict=True):
                name = each.run.run_id
                if not math.isfinite(loss) and name not in diverged:
                    diverged.add(name)
                    progress(f"the loss of run {name} is no longer finite: lower its learning rate")
