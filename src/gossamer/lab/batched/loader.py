"""Batches for all seeds at once, gathered and augmented on the device by a counter of steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.lab.data.augment import CropFlip, crop_flip, normalise, scale_and_shift
from gossamer.lab.data.batches import EpochPlan, epoch_plan
from gossamer.lab.data.sets import ImageSet, Labelled


class BatchLoader:
    """The training images on the device, and for each seed the order and the augmentation of the current epoch."""

    def __init__(
        self, data: ImageSet, seeds: Sequence[int], batch_size: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._data, self._seeds, self._batch, self._dtype = data, list(seeds), batch_size, dtype
        self._images, self._labels = data.train.images.to(device), data.train.labels.to(device)
        self._scale, self._shift = scale_and_shift(data.mean, data.std, device)
        self.steps = len(data.train) // batch_size
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows = torch.arange(batch_size, device=device)
        self._order = torch.zeros(len(self._seeds), len(data.train), dtype=torch.int64, device=device)
        self._top, self._left = torch.zeros_like(self._order), torch.zeros_like(self._order)
        self._flip = torch.zeros_like(self._order, dtype=torch.bool)

    def begin_epoch(self, epoch: int, step: int = 0) -> None:
        """Let `next_batch` give the batches of an epoch, from a step of it on."""
        plans = [self._plan(seed, epoch) for seed in self._seeds]
        self._order.copy_(torch.stack([plan.order for plan in plans]))
        draws = [plan.draw for plan in plans if plan.draw is not None]
        if draws:
            self._top.copy_(torch.stack([draw.top for draw in draws]))
            self._left.copy_(torch.stack([draw.left for draw in draws]))
            self._flip.copy_(torch.stack([draw.flip for draw in draws]))
        self._position.fill_(step)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next batch of each seed: images (seeds, batch, …) and labels (seeds, batch)."""
        rows = self._position * self._batch + self._rows
        self._position += 1
        index = self._order.index_select(1, rows).flatten()
        images = self._images.index_select(0, index)
        if self._data.padding or self._data.flip:
            parts = (table.index_select(1, rows).flatten() for table in (self._top, self._left, self._flip))
            images = crop_flip(images, CropFlip(*parts), padding=self._data.padding)
        images = normalise(images, self._scale, self._shift, dtype=self._dtype)
        shape = (len(self._seeds), self._batch)
        return images.view(*shape, *images.shape[1:]), self._labels.index_select(0, index).view(shape)

    def evaluation(self, part: Labelled, batch_size: int = 500) -> list[tuple[Tensor, Tensor]]:
        """All of `part` in order, not augmented."""
        device = self._images.device
        return [
            (normalise(images.to(device), self._scale, self._shift, dtype=self._dtype), labels.to(device))
            for images, labels in zip(
                torch.split(part.images, batch_size), torch.split(part.labels, batch_size), strict=True
            )
        ]

    def _plan(self, seed: int, epoch: int) -> EpochPlan:
        count, data = len(self._data.train), self._data
        return epoch_plan(count, seed=seed, epoch=epoch, padding=data.padding, flip=data.flip)
