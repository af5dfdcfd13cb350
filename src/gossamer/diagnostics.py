"""Diagnostics of mask learning: flips, margins, dead features and layers, λ1 over time, gradient sizes per layer.

The log is a few small tensors on the device, written in every step without synchronization. `Health` is computed from
it on request.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gossamer.budget import has_triton
from gossamer.deprecation import renamed
from gossamer.prunable import Weight, by_feature

SLOTS = 1000  # points of the traces over the mask phases
_LOGGED = ("trace", "flips", "gradient_squares", "gradient_weight", "skipped")
_MEMORY = 0.99  # of the running mean of the gradient sizes


@dataclass(frozen=True)
class LayerHealth:
    """The masks of one tensor."""

    name: str
    nonzeros: int
    weights: int
    features: int
    dead_features: int  # output features whose weights are all pruned
    gradient_scale: float  # root mean square of the mask gradient, a running mean
    margin: float | None  # median distance of the mask variables from zero; None once masks are frozen

    @property
    def dead(self) -> bool:
        return self.nonzeros == 0

    connections = renamed("connections", "nonzeros")


@dataclass(frozen=True)
class Health:
    """The progress of mask learning so far."""

    layers: tuple[LayerHealth, ...]
    steps: tuple[int, ...]  # optimizer steps at which the traces were taken
    decay: tuple[float, ...]  # λ1 at those steps, given or solved for
    nonzeros: tuple[int, ...]
    flips: tuple[int, ...]  # masks that changed since the previous point
    flips_per_epoch: float | None  # in the latest part of the run; None without steps_per_epoch
    skipped_steps: int  # steps in which masks did not learn because gradients were not finite

    @property
    def dead_layers(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers if layer.dead)

    connections = renamed("connections", "nonzeros")


@dataclass(frozen=True)
class Counters:
    """The latest entries of the log."""

    decay: float  # λ1
    nonzeros: int  # 0 before the first entry
    flips: int  # masks that changed, since masks began to train
    skipped: int  # steps in which masks did not learn because gradients were not finite


class HealthLog:
    """The log of mask learning, in device tensors."""

    def __init__(self, tensors: int, first_step: int, mask_steps: int, device: torch.device) -> None:
        self.first_step, self.mask_steps = first_step, max(1, mask_steps)
        self.slots = min(SLOTS, self.mask_steps)
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        # One row per point of the trace: λ1, nonzeros, all flips so far.
        self.trace = torch.zeros(self.slots, 3, dtype=torch.float64, device=device)
        self.flips = torch.zeros((), dtype=torch.float64, device=device)
        self.gradient_squares = torch.zeros(tensors, dtype=torch.float32, device=device)
        self.gradient_weight = torch.zeros((), dtype=torch.float32, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._on_host: Tensor | None = None  # the counters as last read from the device

    def set_step(self, step: int) -> None:
        self.slot.fill_(min(self.slots - 1, max(0, (step - self.first_step) * self.slots // self.mask_steps)))

    def write(self, *, decay: Tensor, nonzeros: Tensor, flips: Tensor, squares: Tensor, healthy: Tensor) -> None:
        """Record a step: scalars and, per tensor, the sum of squares of its mask gradient."""
        if self._has_kernel(squares):
            from gossamer.diagnostics_triton import write_on_gpu_  # needs Triton

            write_on_gpu_(
                self,
                decay=decay,
                nonzeros=nonzeros,
                flips=flips,
                squares=squares,
                healthy=healthy,
                fresh=1.0 - _MEMORY,
            )
            return
        self.flips.add_(flips)
        row = torch.stack([decay.to(self.trace.dtype), nonzeros.to(self.trace.dtype), self.flips])
        self.trace.index_copy_(0, self.slot, row[None])
        fresh = healthy.to(torch.float32) * (1.0 - _MEMORY)
        self.gradient_squares.lerp_(torch.where(healthy, squares, 0.0).to(torch.float32), fresh)
        self.gradient_weight.lerp_(torch.ones_like(self.gradient_weight), fresh)
        self.skipped.add_(healthy.logical_not())

    def _has_kernel(self, squares: Tensor) -> bool:
        return squares.is_cuda and squares.dtype == torch.float32 and has_triton()

    def skipped_so_far(self) -> int:
        """Steps without mask learning. Does not wait for an accelerator."""
        return int(self.skipped) if self.skipped.device.type == "cpu" else self.counters().skipped

    def counters(self, *, wait: bool = False) -> Counters:
        """The latest entries of the log. Without `wait`, an accelerator is not synchronized: the result is then what it
        had computed by the previous call."""
        row = self.trace.index_select(0, self.slot)[0]
        now = torch.cat([row, self.skipped.to(row.dtype)[None]])
        if self._on_host is None or wait or now.device.type == "cpu":
            self._on_host = torch.empty(4, dtype=now.dtype, device="cpu", pin_memory=now.is_cuda).copy_(now)
            values = self._on_host.tolist()
        else:
            values = self._on_host.tolist()
            self._on_host.copy_(now, non_blocking=True)
        return Counters(values[0], int(values[1]), int(values[2]), int(values[3]))

    def state(self) -> dict[str, Any]:
        return {"mask_steps": self.mask_steps, **{name: getattr(self, name).clone() for name in _LOGGED}}

    def load(self, state: dict[str, Any]) -> None:
        # From the plan at the time when masks began to learn.
        self.mask_steps, self.slots = state["mask_steps"], len(state["trace"])
        for name in _LOGGED:
            tensor = getattr(self, name)
            setattr(self, name, state[name].to(tensor.device, tensor.dtype, copy=True))

    def read(
        self,
        weights: Sequence[Weight],
        masks: Iterable[Tensor],
        margins: Iterable[float | None],
        step: int,
        steps_per_epoch: int | None,
    ) -> Health:
        rows = self.trace.tolist()
        filled = [index for index, (_, nonzeros, _) in enumerate(rows) if nonzeros]
        steps = [self.first_step + index * self.mask_steps // self.slots for index in filled]
        so_far = [0, *(int(rows[index][2]) for index in filled)]
        flips = [after - before for before, after in pairwise(so_far)]
        per_epoch = None
        if steps_per_epoch is not None and filled:
            recent = max(1, min(len(filled), -(-steps_per_epoch * self.slots // self.mask_steps)))
            span = max(1, min(step, self.first_step + self.mask_steps) - steps[-recent])
            per_epoch = sum(flips[-recent:]) * steps_per_epoch / span
        seen = float(self.gradient_weight) or 1.0
        squares = (self.gradient_squares / seen).tolist()
        return Health(
            layers=tuple(map(_layer, weights, masks, squares, margins)),
            steps=tuple(steps),
            decay=tuple(rows[index][0] for index in filled),
            nonzeros=tuple(int(rows[index][1]) for index in filled),
            flips=tuple(flips),
            flips_per_epoch=per_epoch,
            skipped_steps=int(self.skipped),
        )


def _layer(weight: Weight, mask: Tensor, squares: float, margin: float | None) -> LayerHealth:
    alive = by_feature(mask, weight.feature_axis, weight.groups).any(dim=1)
    return LayerHealth(
        name=weight.name,
        nonzeros=int(mask.sum()),
        weights=mask.numel(),
        features=alive.numel(),
        dead_features=int((~alive).sum()),
        gradient_scale=float((squares / max(1, mask.numel())) ** 0.5),
        margin=margin,
    )
