"""One training step: forward, backward, clipping, the optimizer (with the hooks of the sparsifier), and the loss.

`_compute` is the whole step and never synchronizes with the host, so it can be captured as one CUDA graph and replayed.
Values that change from step to step are then read from fixed addresses on the device: the batch, the learning rate, the
hidden state of the task, the counters of the meter, and the values set by `Sparsifier.advance()`. Warm-up, mask
learning and fine-tuning launch different kernels, with or without a teacher, so each has its own graph. A batch of
another shape (the short end of a text) runs without a graph.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.lab.training.capture import Captured
from gossamer.lab.training.distributed import DistributedContext
from gossamer.lab.training.optimise import set_learning_rate
from gossamer.lab.training.run import Run
from gossamer.lab.training.task import Task
from gossamer.lab.training.teacher import Teacher
from gossamer.schedule import Phase
from gossamer.sparsifier import Sparsifier

_LOOK_EVERY = 50  # steps between two reads of the loss on an accelerator, as reading synchronizes

Batch = tuple[Tensor, Tensor]
_Kernels = tuple[Phase, bool, float]


_REMEDY = "try a smaller lr, lr_warmup=1ep, clip=1, or precision=float32, in another folder"


class LossNotFinite(ArithmeticError):
    """The loss is infinite or NaN."""


def check_last_step(tensors: Mapping[str, Tensor], test: float) -> None:
    """Raise if the last step, which no further loss checks, has ruined the network: its tensors or the `test` metric
    are not finite, or so large that the product of two layers overflows.

    Accuracy alone does not show this, and outputs on the test set can be infinite after few steps, because the
    statistics of batch norms start far from those of the data.
    """
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    ruined = [name for name, tensor in floating.items() if not tensor.square().isfinite().all()]
    if ruined or not math.isfinite(test):
        what = f"{ruined[0]} is" if ruined else "the outputs on the test set are"
        raise LossNotFinite(f"{what} not finite (infinite, NaN, or too large) after the last step: {_REMEDY}")


class Meter:
    """The mean loss and accuracy since the last read, and the first step after which the sum of the losses was not
    finite."""

    def __init__(self, context: DistributedContext, step: int) -> None:
        """`step` is the number of steps done so far."""
        self._context = context
        self._sums = torch.zeros(2, device=context.device)  # of the loss, and of the accuracy
        self._good_steps = torch.full(
            (), step, dtype=torch.int64, device=context.device
        )  # steps before a non-finite loss
        self._counts_right = False
        self._count = 0

    def add(self, loss: Tensor, right: Tensor | None = None) -> None:
        """Add a step, in place on the device. `right` is the accuracy on the batch."""
        total = self._sums[0].add_(loss.detach())
        if right is not None:
            self._sums[1].add_(right)
            self._counts_right = True
        # Once a loss is not finite, the sum stays non-finite. Uses a difference, as isfinite takes four kernels on a
        # GPU.
        self._good_steps.add_(total - total == 0)
        if self._context.device.type == "cpu" and self._context.world == 1:
            self.check()  # immediately, as it is free there

    def count(self, step: int) -> None:
        """Count a step on the host; `step` is the number of steps done."""
        self._count += 1
        if step % _LOOK_EVERY == 0:
            self.check()

    def check(self) -> None:
        """Raise if a loss was not finite. All processes have to call it, so that all of them stop."""
        none_so_far = torch.iinfo(torch.int64).max
        bad = int(self._context.minimum(torch.where(self._sums[0].isfinite(), none_so_far, self._good_steps + 1)))
        if bad < none_so_far:
            raise LossNotFinite(
                f"the loss is not finite (infinite or NaN) at step {bad}: {_REMEDY}; a checkpoint here is from before "
                "that step"
            )

    def means(self) -> tuple[float | None, float | None]:
        """The mean loss and accuracy; None if there was no step, or no accuracy."""
        if self._count == 0:
            return None, None
        self.check()  # the device is synchronized anyway
        loss, right = (total / self._count for total in self._context.mean(self._sums).tolist())
        self._sums.zero_()
        self._count = 0
        return loss, right if self._counts_right else None


class Step:
    """Calling it trains on one batch."""

    def __init__(
        self,
        run: Run,
        context: DistributedContext,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        sparsifier: Sparsifier | None,
        forward: Callable[..., Any],
        meter: Meter,
        teacher: Teacher | None = None,
    ) -> None:
        """`run` has to be resolved; `forward` is the model, perhaps compiled or wrapped."""
        self._run, self._device, self._task, self._teacher = run, context.device, task, teacher
        self._model, self._optimizer, self._sparsifier = model, optimizer, sparsifier
        self._forward, self._meter = forward, meter
        self._buffers: Batch | None = None
        self._captured: Captured | None = None
        self._captured_in: _Kernels | None = None

    def __call__(self, batch: Batch, lr: float) -> None:
        set_learning_rate(self._optimizer, lr)
        if not self._run.capture or not self._fits(batch):
            self._compute(batch)
            return
        captured = self._for_this_phase(batch)
        if captured.replays:
            if isinstance(self._sparsifier, Sparsifier):
                self._sparsifier.advance()  # an eager step advances by itself
            captured()
            return
        with warnings.catch_warnings():
            # Adam warns that the first steps are not captured.
            warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
            captured()

    def close(self) -> None:
        """Free the graph and its memory now. The graph and the step reference each other, so both would otherwise live
        until the next garbage collection, perhaps in the middle of the next run."""
        self._captured = None

    def _compute(self, batch: Batch) -> None:
        loss, right = self._task.loss(self._forward, batch, self._teacher)
        self._meter.add(loss, right)
        loss.backward()  # type: ignore[no-untyped-call]
        self._task.carry()
        if self._teacher is not None:
            self._teacher.carry()
        if self._run.clip is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._run.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _fits(self, batch: Batch) -> bool:
        """Whether a batch has the shape of the buffers."""
        if self._buffers is None:
            self._buffers = torch.empty_like(batch[0]), torch.empty_like(batch[1])
        return all(buffer.shape == part.shape for buffer, part in zip(self._buffers, batch, strict=True))

    def _for_this_phase(self, batch: Batch) -> Captured:
        assert self._buffers is not None
        buffers = self._buffers
        for buffer, part in zip(buffers, batch, strict=True):
            buffer.copy_(part)
        kernels = self._kernels_of()
        if self._captured is None or kernels != self._captured_in:
            self._captured = Captured(lambda: self._compute(buffers), self._device)
            self._captured_in = kernels
        return self._captured

    def _kernels_of(self) -> _Kernels:
        """What determines the kernels of the next step: its phase, whether a teacher is used, and the weight decay,
        which is a constant in a kernel."""
        taught = self._teacher is not None and self._teacher.teaches
        weight_decay = float(self._optimizer.param_groups[0]["weight_decay"])
        if not isinstance(self._sparsifier, Sparsifier):
            return Phase.WARMUP, taught, weight_decay
        phase = self._sparsifier.plan.at(self._sparsifier.step).phase
        return Phase.SPARSIFY if phase.masks_train else phase, taught, weight_decay
