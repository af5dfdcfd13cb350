"""Normalisation and the CIFAR augmentation, as pure functions over whole batches.

Cropping and mirroring are one gather per batch, without a loop over images and without dependence on values. So they
need no host synchronization and can be captured in a CUDA graph. The random numbers are an argument (`CropFlip`): drawn
in advance for an epoch, or on the device inside a captured step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["CropFlip", "crop_flip", "draw_crop_flip", "normalise", "scale_and_shift"]


@dataclasses.dataclass(frozen=True, eq=False)
class CropFlip:
    """One row per image: the start of its crop in the padded image, and whether it is mirrored."""

    top: Tensor
    left: Tensor
    flip: Tensor

    def __getitem__(self, rows: slice | Tensor) -> CropFlip:
        return CropFlip(self.top[rows], self.left[rows], self.flip[rows])


def draw_crop_flip(
    count: int,
    *,
    padding: int = 4,
    flip: bool = True,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> CropFlip:
    """Uniform crop positions, and mirroring with probability one half (`flip=False`: never)."""
    corners = torch.randint(0, 2 * padding + 1, (2, count), generator=generator, device=device)
    coins = torch.randint(0, 2, (count,), generator=generator, device=device, dtype=torch.uint8).bool()
    return CropFlip(corners[0], corners[1], coins if flip else torch.zeros_like(coins))


def crop_flip(images: Tensor, draw: CropFlip, *, padding: int = 4) -> Tensor:
    """Pad by `padding` black pixels on each side, crop back to the same size, then mirror where drawn.

    `images` is N × C × H × W of any dtype; black is 0, so this comes before normalisation.
    """
    count, channels, height, width = images.shape
    device = images.device
    rows = torch.arange(height, device=device) + (draw.top[:, None] - padding)
    across = torch.arange(width, device=device)
    columns = torch.where(draw.flip[:, None], width - 1 - across, across) + (draw.left[:, None] - padding)
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None]
    picked = images[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows.clamp(0, height - 1)[:, None, :, None],
        columns.clamp(0, width - 1)[:, None, None, :],
    ]
    return picked * inside


def scale_and_shift(
    mean: Sequence[float], std: Sequence[float], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """The two per-channel tensors with which `normalise` maps bytes 0…255 to (x / 255 − mean) / std."""
    shape = (1, len(mean), 1, 1)
    scale = torch.tensor([1 / (255 * s) for s in std], device=device)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device)
    return scale.view(shape), shift.view(shape)


def normalise(images: Tensor, scale: Tensor, shift: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """images · scale + shift, computed in the scale's precision and rounded once to `dtype`."""
    return (images * scale + shift).to(dtype)
