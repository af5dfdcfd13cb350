"""Order, augmentation and resuming of device-resident batches."""

from __future__ import annotations

import pytest
import torch

from gossamer.lab.data import Batches, ImageSet, Labelled, Position
from gossamer.lab.data.augment import crop_flip
from gossamer.lab.data.batches import epoch_plan, seed_for

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (23, 3, 6, 6), dtype=torch.uint8, generator=GENERATOR)
LABELS = torch.arange(23)


def batches(**options: object) -> Batches:
    settings: dict[str, object] = {"mean": MEAN, "std": STD, "padding": 2, "flip": True, "seed": 5} | options
    return Batches(IMAGES, LABELS, 4, **settings)  # type: ignore[arg-type]


def test_an_epoch_is_what_its_plan_says() -> None:
    loader = batches(lookahead=2)
    for epoch in range(2):
        plan = epoch_plan(23, seed=5, epoch=epoch, padding=2, flip=True)
        assert plan.draw is not None
        pixels = crop_flip(IMAGES[plan.order], plan.draw, padding=2).double() / 255
        expected = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        got = list(loader)
        assert [len(images) for images, _ in got] == [4, 4, 4, 4, 4, 3]
        torch.testing.assert_close(torch.cat([images for images, _ in got]).double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.cat([labels for _, labels in got]).tolist() == plan.order.tolist()
        assert sorted(plan.order.tolist()) == list(range(23))


def test_epochs_and_seeds_differ() -> None:
    plans = {tuple(epoch_plan(23, seed=s, epoch=e).order.tolist()) for s in range(4) for e in range(4)}
    assert len(plans) == 16
    assert seed_for(1, 2) != seed_for(2, 1)
    assert 0 <= seed_for(2**40, 3) < 2**63


@pytest.mark.parametrize("lookahead", [1, 2, 4, 32])
def test_lookahead_changes_nothing(lookahead: int) -> None:
    for (a, x), (b, y) in zip(batches(lookahead=1), batches(lookahead=lookahead), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(x, y)


@pytest.mark.parametrize("drop_last", [True, False])
def test_going_on_from_any_position_is_bit_identical(drop_last: bool) -> None:
    whole = batches(drop_last=drop_last)
    assert len(whole) == (5 if drop_last else 6)
    stream = []
    for _ in range(2):
        for images, labels in whole:
            stream.append((whole.state, images, labels))
    assert whole.state == Position(2, 0)
    for number, (state, _, _) in enumerate(stream[:-1]):
        resumed = batches(drop_last=drop_last)
        resumed.state = state
        images, labels = next(iter(resumed))
        assert torch.equal(images, stream[number + 1][1])
        assert torch.equal(labels, stream[number + 1][2])
        assert resumed.state == stream[number + 1][0]


def test_a_loop_that_was_left_is_continued_by_the_next() -> None:
    loader = batches(lookahead=3)
    labels = []
    for _, batch_labels in loader:
        labels.append(batch_labels)
        if len(labels) == 2:
            break
    assert loader.state == Position(0, 2)
    labels += [batch_labels for _, batch_labels in loader]
    assert sorted(torch.cat(labels).tolist()) == list(range(23))
    assert loader.state == Position(1, 0)


def test_format_and_precision() -> None:
    images, labels = next(iter(batches(dtype=torch.bfloat16, channels_last=True)))
    assert images.dtype == torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.dtype == torch.int64
    exact, _ = next(iter(batches()))
    torch.testing.assert_close(images.float(), exact, rtol=1e-2, atol=1e-2)


def test_training_and_evaluation_of_a_set() -> None:
    labelled = Labelled(IMAGES, LABELS)
    dataset = ImageSet("tiny", labelled, labelled, tuple(map(str, range(23))), MEAN, STD, padding=2, flip=True)
    training = Batches.training(dataset, 4, seed=5)
    for (a, _), (b, _) in zip(training, batches(drop_last=True), strict=True):
        assert torch.equal(a, b)
    evaluation = list(Batches.evaluation(dataset, dataset.test, 10))
    assert torch.cat([labels for _, labels in evaluation]).tolist() == list(range(23))
    mean = torch.tensor(MEAN).view(3, 1, 1)
    pixels = torch.cat([images for images, _ in evaluation]) * torch.tensor(STD).view(3, 1, 1) + mean
    torch.testing.assert_close(pixels * 255, IMAGES.float(), rtol=1e-4, atol=1e-3)


def test_pixels_are_shared_not_copied() -> None:
    a, b = batches(), batches()
    assert a._data.images.data_ptr() == b._data.images.data_ptr() == IMAGES.data_ptr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5,)}, "expected 3 channel means and stds, got 1 and 3"),
        ({"lookahead": 0}, "batch_size and lookahead of at least 1"),
        ({"padding": -1}, "padding and seed of at least 0"),
        ({"seed": -1}, "padding and seed of at least 0"),
    ],
)
def test_impossible_settings_are_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches(**options)


def test_too_few_images_are_an_error() -> None:
    with pytest.raises(ValueError, match="lower batch_size"):
        Batches(IMAGES[:3], LABELS[:3], 4, mean=MEAN, std=STD, drop_last=True)
    with pytest.raises(ValueError, match="got 0 images"):
        Batches(IMAGES[:0], LABELS[:0], 4, mean=MEAN, std=STD)
    assert len(Batches(IMAGES[:3], LABELS[:3], 4, mean=MEAN, std=STD)) == 1


@pytest.mark.parametrize("position", [Position(-1, 0), Position(0, 6), Position(0, -1)])
def test_a_position_from_elsewhere_is_refused(position: Position) -> None:
    with pytest.raises(ValueError, match="another batch size or data set"):
        batches().state = position
