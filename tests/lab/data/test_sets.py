"""Splitting and the checks of the values themselves."""

from __future__ import annotations

import pytest
import torch

from gossamer.lab.data import ImageSet, Labelled


def image_set(count: int = 50) -> ImageSet:
    # Pixel (0, 0) is the image's number, so that every image can be told from the others.
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2).clone()
    train = Labelled(images, torch.arange(count) % 5)
    test = Labelled(images[:7].clone(), torch.arange(7) % 5)
    return ImageSet("tiny", train, test, tuple("abcde"), (0.5,), (0.25,))


def test_split_holds_out_without_losing_or_mixing() -> None:
    whole = image_set()
    parts = whole.split(validation=10, seed=3)
    assert parts.validation is not None
    assert len(parts.train) == 40
    assert len(parts.validation) == 10
    kept, held = parts.train.images[:, 0, 0, 0].tolist(), parts.validation.images[:, 0, 0, 0].tolist()
    assert sorted(kept + held) == list(range(50))
    assert parts.train.labels.tolist() == [number % 5 for number in kept]
    assert parts.validation.labels.tolist() == [number % 5 for number in held]
    assert parts.test is whole.test


def test_split_is_decided_by_its_seed() -> None:
    def held(seed: int) -> list[int]:
        validation = image_set().split(10, seed).validation
        assert validation is not None
        return validation.images[:, 0, 0, 0].tolist()

    assert held(0) == held(0)
    assert held(0) != held(1)


def test_impossible_splits_are_errors() -> None:
    for count in (0, 50, 51):
        with pytest.raises(ValueError, match=f"expected 1 to 49 images .* got {count}"):
            image_set().split(count)
    with pytest.raises(ValueError, match="split already"):
        image_set().split(10).split(10)


def test_shape_and_classes() -> None:
    assert image_set().num_classes == 5
    assert image_set().input_shape == (1, 2, 2)
    moved = image_set().split(10).to("cpu")
    assert moved.validation is not None
    assert len(moved.validation) == 10


def test_wrong_tensors_are_refused() -> None:
    images, labels = torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected uint8 images"):
        Labelled(images.float(), labels)
    with pytest.raises(ValueError, match="expected uint8 images"):
        Labelled(images[0], labels)
    with pytest.raises(ValueError, match="expected 3 int64 labels"):
        Labelled(images, labels[:2])
    with pytest.raises(ValueError, match="expected 3 int64 labels"):
        Labelled(images, labels.float())
