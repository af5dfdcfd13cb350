"""Batches of a small image set on the device.

The pixels stay on the device as bytes; each batch is gathered, augmented and normalised there, many batches at a time
(`lookahead`), so that a training step needs neither a kernel launch nor a host synchronization for its data. An epoch
(the order of images, every crop and mirror) is a pure function of (seed, epoch), drawn on the CPU and therefore the
same on every device. A position in the data is just (epoch, step), and resuming sets it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gossamer.lab.data.augment import CropFlip, crop_flip, draw_crop_flip, normalise, scale_and_shift
from gossamer.lab.data.sets import ImageSet, Labelled

__all__ = ["BatchSource", "Batches", "EpochPlan", "Position", "epoch_plan", "seed_for"]


@dataclasses.dataclass(frozen=True)
class Position:
    """The epoch and step of the next batch."""

    epoch: int = 0
    step: int = 0

    def next(self, steps: int) -> Position:
        """The next position, with `steps` steps per epoch."""
        return Position(self.epoch, self.step + 1) if self.step + 1 < steps else Position(self.epoch + 1, 0)

    def check(self, steps: int) -> None:
        """Refuse a position outside an epoch of `steps` steps."""
        if self.epoch < 0 or not 0 <= self.step < steps:
            raise ValueError(
                f"expected a position with epoch ≥ 0 and 0 ≤ step < {steps}, got {self}; "
                "it was probably saved with another batch size or data set"
            )


class BatchSource(ABC):
    """Batches that can be resumed at any position, `state`."""

    _position: Position

    @abstractmethod
    def __len__(self) -> int:
        """Batches per epoch."""

    @property
    def state(self) -> Position:
        return self._position

    @state.setter
    def state(self, position: Position) -> None:
        position.check(len(self))
        self._position = position


@dataclasses.dataclass(frozen=True, eq=False)
class EpochPlan:
    """The order of one epoch and the random numbers of each image, in that order."""

    order: Tensor
    draw: CropFlip | None

    def to(self, device: torch.device) -> EpochPlan:
        draw = self.draw
        if draw is not None:
            draw = CropFlip(_send(draw.top, device), _send(draw.left, device), _send(draw.flip, device))
        return EpochPlan(_send(self.order, device), draw)


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; for a GPU from pinned memory, so that the copy does not wait for pending work."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def seed_for(*parts: int) -> int:
    """A 63-bit seed from several numbers ≥ 0, such that neighbours (epoch, epoch + 1) are unrelated."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def epoch_plan(
    count: int, *, seed: int, epoch: int, shuffle: bool = True, padding: int = 0, flip: bool = False
) -> EpochPlan:
    """The plan of epoch `epoch` for `count` images: a pure function of its arguments, on the CPU."""
    generator = torch.Generator().manual_seed(seed_for(seed, epoch))
    order = torch.randperm(count, generator=generator) if shuffle else torch.arange(count)
    draw = draw_crop_flip(count, padding=padding, flip=flip, generator=generator) if padding or flip else None
    return EpochPlan(order, draw)


class Batches(BatchSource):
    """Iterate over normalised (images, labels) batches, an epoch at a time.

    `for images, labels in batches` runs from the current position to the end of its epoch; the next `for` is
    the next epoch. `state` is the position of the next batch: set it to resume there, bit for bit.
    Batches are views of a larger block: do not change them in place.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        padding: int = 0,
        flip: bool = False,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        lookahead: int = 32,
    ) -> None:
        data = Labelled(images, labels)
        if batch_size < 1 or lookahead < 1:
            raise ValueError(f"expected batch_size and lookahead of at least 1, got {batch_size} and {lookahead}")
        if padding < 0 or seed < 0:
            raise ValueError(f"expected padding and seed of at least 0, got {padding} and {seed}")
        if not len(mean) == len(std) == images.shape[1]:
            raise ValueError(f"expected {images.shape[1]} channel means and stds, got {len(mean)} and {len(std)}")
        if len(images) < (batch_size if drop_last else 1):
            raise ValueError(
                f"expected at least one batch of {batch_size}, got {len(images)} images: lower batch_size, or hold "
                "fewer of them out"
            )
        self._data = data if device is None else data.to(device)
        self.device = self._data.images.device
        self.batch_size = batch_size
        self.padding, self.flip, self.shuffle, self.drop_last, self.seed = (
            padding,
            flip,
            shuffle,
            drop_last,
            seed,
        )
        self.dtype, self.channels_last, self.lookahead = dtype, channels_last, lookahead
        self._scale, self._shift = scale_and_shift(mean, std, self.device)
        self._position = Position()

    @classmethod
    def training(
        cls,
        dataset: ImageSet,
        batch_size: int,
        *,
        seed: int = 0,
        drop_last: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> Batches:
        """Shuffled batches of the training part with the set's own normalisation and augmentation."""
        return cls(
            dataset.train.images,
            dataset.train.labels,
            batch_size,
            mean=dataset.mean,
            std=dataset.std,
            padding=dataset.padding,
            flip=dataset.flip,
            seed=seed,
            drop_last=drop_last,
            device=device,
            dtype=dtype,
            channels_last=channels_last,
        )

    @classmethod
    def evaluation(
        cls,
        dataset: ImageSet,
        part: Labelled,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> Batches:
        """All of `part` (the set's test or validation images) in order, normalised and not augmented."""
        return cls(
            part.images,
            part.labels,
            batch_size,
            mean=dataset.mean,
            std=dataset.std,
            shuffle=False,
            device=device,
            dtype=dtype,
            channels_last=channels_last,
            lookahead=1,
        )

    def __len__(self) -> int:
        """Batches per epoch."""
        count = len(self._data)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        position = self._position
        plan = self.plan(position.epoch).to(self.device)
        for block in range(position.step, len(self), self.lookahead):
            last = min(block + self.lookahead, len(self))
            images, labels = self._gather(plan, slice(block * self.batch_size, last * self.batch_size))
            for batch in zip(torch.split(images, self.batch_size), torch.split(labels, self.batch_size), strict=True):
                # Advanced before the batch is returned: a checkpoint written in the meantime counts it as seen.
                position = position.next(len(self))
                self._position = position
                yield batch

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of one epoch, for a training loop that gathers by itself (e.g. inside a CUDA graph)."""
        return epoch_plan(
            len(self._data),
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
            padding=self.padding,
            flip=self.flip,
        )

    def _gather(self, plan: EpochPlan, rows: slice) -> tuple[Tensor, Tensor]:
        index = plan.order[rows]
        images = self._data.images[index]
        if plan.draw is not None:
            images = crop_flip(images, plan.draw[rows], padding=self.padding)
        images = normalise(images, self._scale, self._shift, dtype=self.dtype)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, self._data.labels[index]
