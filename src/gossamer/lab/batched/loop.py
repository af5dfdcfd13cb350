"""Batched training from the first step to the last: progress, checkpoints, and stopping without losing a step."""

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Required, TypedDict

import torch
from torch import nn

from gossamer.lab.batched.rows import BatchedRun, Outcome
from gossamer.lab.batched.training import BatchedTraining
from gossamer.lab.checkpoint import Checkpoints
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.training.signals import Interrupted, may_be_of


class LoopOptions(TypedDict, total=False):
    """What functions around `train_batched` hand on to it."""

    device: Required[torch.device]
    dtype: torch.dtype
    progress: Callable[[str], None]
    moved: Callable[[float], None]
    checkpoints: Checkpoints | None
    checkpoint_minutes: float
    stop: Callable[[], bool]


class _Keeper:
    """Writes a checkpoint every few minutes, and knows how many steps are lost in an interruption."""

    def __init__(self, training: BatchedTraining, checkpoints: Checkpoints | None, minutes: float) -> None:
        """Without `checkpoints` nothing is written."""
        self._training, self._checkpoints, self._seconds = training, checkpoints, 60 * minutes
        self._kept, self._last = training.done, time.perf_counter()

    def is_due(self) -> bool:
        return self._checkpoints is not None and time.perf_counter() - self._last >= self._seconds

    def keep(self) -> bool:
        """Write a checkpoint; whether that succeeded."""
        self._last = time.perf_counter()
        if self._checkpoints is None or not self._training.save(self._checkpoints):
            return False
        self._kept = self._training.done
        return True

    def stop(self) -> str:
        """Write a checkpoint after a first request to stop, and say how to resume."""
        stopped = f"stopped after step {self._training.done} of {self._training.steps}"
        if self.keep():
            assert self._checkpoints is not None
            place = self._checkpoints.paths()[0]
            return f"{stopped}; a checkpoint is in {place}: run the same command again to resume"
        why = "there is no folder for a checkpoint" if self._checkpoints is None else "no checkpoint could be written"
        return f"{stopped}, but {why}: run the same command again; {self._next_time()}"

    def loss(self) -> str:
        """What is lost in a stop at once, and how to resume."""
        done, steps = self._training.done, self._training.steps
        count = done - self._kept
        lost = {0: "nothing is lost", 1: "one step is lost"}.get(count, f"{count} steps are lost")
        return f"stopped at once after step {done} of {steps}, {lost}: run the same command again; {self._next_time()}"

    def _next_time(self) -> str:
        if not self._kept:
            return "its runs start over, as there is no checkpoint of them"
        return f"its runs resume from the checkpoint of step {self._kept}"


def train_batched(
    runs: Sequence[BatchedRun],
    data: ImageSet,
    make_network: Callable[[], nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[str], None] = lambda line: None,
    moved: Callable[[float], None] = lambda share: None,
    checkpoints: Checkpoints | None = None,
    checkpoint_minutes: float = 5.0,
    stop: Callable[[], bool] = lambda: False,
    keep: Callable[[int, nn.Module], None] | None = None,
) -> list[Outcome]:
    """Train all runs, and return their outcomes.

    With `checkpoints` the training is written every few minutes, after an epoch, and after the last step, and resumes
    from there if it is interrupted; the caller removes them once the outcomes are safe. `stop` is asked after
    every step: then a checkpoint is written, and `Interrupted` says how to resume; after a KeyboardInterrupt it says
    how many steps are lost. `moved` gets the share of the steps that are done, after each of them. `keep` gets every
    finished network, with the number of its run.
    """

    def stop_after_step() -> bool:
        moved(training.done / training.steps)
        return stop()

    training = BatchedTraining(runs, data, make_network, device=device, dtype=dtype, stop=stop_after_step)
    first = 0 if checkpoints is None else training.restore(checkpoints)
    if training.done:
        epoch = min(first + 1, training.epochs)
        progress(f"resumes after step {training.done} of {training.steps}, in epoch {epoch} of {training.epochs}")
    keeper = _Keeper(training, checkpoints, checkpoint_minutes)
    try:
        _train_epochs(training, first, keeper, progress)
        outcomes = training.outcomes()
        if keep is not None:
            for number, network in training.networks():
                keep(number, network)
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(keeper.loss()) from None
    except Exception as error:
        if not (training.stop() and may_be_of(error)):
            raise
        raise Interrupted(keeper.loss()) from error
    return outcomes


def _train_epochs(training: BatchedTraining, first: int, keeper: _Keeper, progress: Callable[[str], None]) -> None:
    started, epochs = time.perf_counter(), training.epochs
    diverged: set[str] = set()
    for epoch in range(first, epochs):
        training.train_epoch(epoch)
        if training.stop() and training.done < training.steps:
            raise Interrupted(keeper.stop())
        # After the last step too: if its outcomes cannot be written, nothing has to be trained again.
        if keeper.is_due() or training.done == training.steps:
            keeper.keep()
        if epoch % max(1, epochs // 20) == 0 or epoch == epochs - 1:
            losses = training.train_loss.tolist()
            finite = [loss for loss in losses if math.isfinite(loss)] or [math.nan]
            took = time.perf_counter() - started
            left = timedelta(seconds=round(took * (epochs - epoch - 1) / (epoch + 1 - first)))
            progress(
                f"epoch {epoch + 1}/{epochs} {training.phases(epoch)} {took:.1f} s, "
                f"loss {min(finite):.3f} to {max(finite):.3f}" + (f", {left} left" if left else "")
            )
            for each, loss in zip(training.runs, losses, strict=True):
                run = each.run
                if not math.isfinite(loss) and run.run_id not in diverged:
                    diverged.add(run.run_id)
                    name = f"{run.run_id} ({run.method}, seed {run.seed})"
                    progress(f"the loss of run {name} is no longer finite: lower its learning rate")
