"""A race from its first step to its last: what is told on the way, checkpoints, and stopping where nothing is lost."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Required, TypedDict

import torch
from torch import nn

from gossamer.lab.batched.checkpoint import Keeper
from gossamer.lab.batched.rows import Common, Lane, Outcome
from gossamer.lab.batched.training import Running
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.training.signals import Interrupted, may_be_of


class How(TypedDict, total=False):
    """What functions that end in `train_side_by_side` hand on to it."""

    device: Required[torch.device]
    dtype: torch.dtype
    progress: Callable[[str], None]
    checkpoint: Path | None
    checkpoint_minutes: float
    stop: Callable[[], bool]


def train_side_by_side(
    common: Common,
    lanes: Sequence[Lane],
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
    """Train all lanes, and return what has come of each.

    With a `checkpoint` all of it is written there now and then, after an epoch, and after the last step, and goes on
    from there if it is cut short; who calls removes it once the outcomes are safe. Whether to `stop` is asked after
    every step: then all is written, and `Interrupted` says how to go on; of a KeyboardInterrupt it says what was lost.
    `keep` is handed every finished network, with the number of its lane.
    """
    run = Running(common, lanes, data, make_network, device=device, dtype=dtype, stop=stop)
    first = 0 if checkpoint is None else run.go_on_from(checkpoint)
    if run.done:
        epoch = min(first + 1, common.epochs)
        progress(f"goes on after step {run.done} of {run.steps}, in epoch {epoch} of {common.epochs}")
    keeper = Keeper(checkpoint, checkpoint_minutes, run.done)
    try:
        _train_epochs(run, first, keeper, progress)
        outcomes = run.outcomes()
        if keep is not None:
            for number, network in run.networks():
                keep(number, network)
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(keeper.loss(run.done, run.steps)) from None
    except Exception as error:
        if not (run.stop() and may_be_of(error)):
            raise
        raise Interrupted(keeper.loss(run.done, run.steps)) from error
    return outcomes


def _train_epochs(run: Running, first: int, keeper: Keeper, progress: Callable[[str], None]) -> None:
    started, common, lanes = time.perf_counter(), run.common, run.lanes
    diverged: set[str] = set()
    for epoch in range(first, common.epochs):
        run.epoch(epoch)
        if run.stop() and run.done < run.steps:
            saved = keeper.keep(run.save, run.done)
            raise Interrupted(keeper.farewell(run.done, run.steps, saved=saved))
        if keeper.is_due() or run.done == run.steps:  # whatever happens to the outcomes, nothing is trained again
            keeper.keep(run.save, run.done)
        if epoch % max(1, common.epochs // 20) == 0 or epoch == common.epochs - 1:
            losses = run.train_loss.tolist()
            finite = [loss for loss in losses if math.isfinite(loss)] or [math.nan]
            took = time.perf_counter() - started
            progress(
                f"epoch {epoch + 1}/{common.epochs} {run.phases(epoch)} {took:.1f} s, "
                f"loss {min(finite):.3f} to {max(finite):.3f}"
            )
            for lane, loss in zip(lanes, losses, strict=True):
                if not math.isfinite(loss) and lane.name not in diverged:
                    diverged.add(lane.name)
                    progress(f"the loss of run {lane.name} is no longer finite: lower its learning rate")
