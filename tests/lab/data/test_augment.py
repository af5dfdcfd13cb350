"""The vectorised crop against one image at a time in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.lab.data.augment import CropFlip, crop_flip, draw_crop_flip, normalise, scale_and_shift


def one_by_one(images: Tensor, draw: CropFlip, padding: int) -> Tensor:
    height, width = images.shape[2:]
    results = []
    for number, image in enumerate(images.numpy()):
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        top, left = int(draw.top[number]), int(draw.left[number])
        crop = padded[:, top : top + height, left : left + width]
        results.append(crop[:, :, ::-1] if draw.flip[number] else crop)
    return torch.from_numpy(np.stack(results))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)),
    padding=st.integers(0, 4),
    flip=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_crop_flip_is_pad_crop_mirror(shape: tuple[int, int, int, int], padding: int, flip: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    draw = draw_crop_flip(shape[0], padding=padding, flip=flip, generator=generator)
    result = crop_flip(images, draw, padding=padding)
    assert result.dtype == torch.uint8
    assert torch.equal(result, one_by_one(images, draw, padding))


def test_draws_are_uniform() -> None:
    draw = draw_crop_flip(90_000, padding=4, generator=torch.Generator().manual_seed(0))
    for corner in (draw.top, draw.left):
        counts = torch.bincount(corner, minlength=9)
        assert len(counts) == 9
        assert (counts - 10_000).abs().max() < 500  # five standard deviations
    assert draw.flip.float().mean().item() == pytest.approx(0.5, abs=0.01)
    assert not draw_crop_flip(100, flip=False).flip.any()


def test_normalise_is_the_textbook_formula() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    expected = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    scale, shift = scale_and_shift(mean, std)
    torch.testing.assert_close(normalise(images, scale, shift), expected.float(), rtol=1e-5, atol=1e-6)
    assert normalise(images, scale, shift, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_augmentation_is_one_graph_without_decisions_on_values() -> None:
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    scale, shift = scale_and_shift((0.5,) * 3, (0.2,) * 3)

    def step(images: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
        return normalise(crop_flip(images, CropFlip(top, left, flip)), scale, shift)

    draw = draw_crop_flip(4)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    expected = step(images, draw.top, draw.left, draw.flip)
    torch.testing.assert_close(compiled(images, draw.top, draw.left, draw.flip), expected)
