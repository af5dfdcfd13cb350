"""Every recipe is built and takes two steps by the one loop, the second of them with masks that learn."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.lab import models
from gossamer.lab.data import FolderSet, ImageSet, Labelled, Sentences, SentenceSet, TextSet, kind_of
from gossamer.lab.data.folder import load_folder
from gossamer.lab.models.wide_resnet import WideResNet
from gossamer.lab.recipes import RECIPES, Recipe, names
from gossamer.lab.training import Run, networks, task, train
from gossamer.lab.training.progress import Status

CLASSES = {"digits": 10, "mnist": 10, "cifar10": 10, "cifar100": 100}
SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}
# Of the same build, but small: what makes them heavy is not what is tested here.
SMALLER = {"lstm_lm": {"hidden": 16}, "transformer_lm": {"width": 16, "layers": 2}, "minilm": {"layers": 1}}


class StopAfter:
    """Ends a run after some steps."""

    class Reached(Exception):
        pass

    def __init__(self, step: int) -> None:
        self._step, self.seen = step, list[Status]()

    def begin(self, status: Status) -> None: ...

    def tell(self, status: Status) -> None:
        self.seen.append(status)
        if status.step == self._step:
            raise StopAfter.Reached

    def move(self, step: int, seconds: float, doing: str | None = None) -> None: ...

    def close(self) -> None: ...


def folder(root: Path) -> FolderSet:
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for name in ("train/a/1", "train/a/2", "train/b/3", "train/b/4", "val/a/5", "val/b/6"):
        path = root / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(random.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)
    return load_folder(root)


def data_of(run: Run, root: Path) -> ImageSet | TextSet | FolderSet | SentenceSet:
    generator = torch.Generator().manual_seed(0)
    if run.data == "imagefolder":
        return folder(root)
    if run.data == "sst2":
        sentences = Sentences(torch.randint(1, 50, (6, 8), generator=generator), torch.arange(6) % 2)
        return SentenceSet(run.data, sentences, sentences, sentences, ("no", "yes"))
    if run.data not in SHAPES:
        stream = torch.randint(50, (140,), generator=generator)
        return TextSet(run.data, stream, stream[:40], stream[:40], tuple(map(str, range(50))))
    shape, classes = SHAPES[run.data], CLASSES[run.data]
    part = Labelled(torch.randint(256, (8, *shape), dtype=torch.uint8, generator=generator), torch.arange(8))
    middle = (0.5,) * shape[0]
    return ImageSet(run.data, part, part, tuple(map(str, range(classes))), middle, middle)


def small(run: Run, num_classes: int) -> nn.Module:
    if run.model == "wrn28_10":
        return WideResNet(10, 1, num_classes)
    if run.model == "vgg16":
        return models.create("vgg16_cifar", num_classes=num_classes)  # without 120 million weights of its classifier
    return whole(run, num_classes)


whole = networks.create


@pytest.mark.parametrize("recipe", RECIPES, ids=names())
def test_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, recipe: Recipe
) -> None:
    if recipe.run.data == "imagefolder":
        request.getfixturevalue("torchvision_or_skip")
    dataset = data_of(recipe.run, tmp_path / "images")
    monkeypatch.setattr(task.data, "load", lambda name, root=None: dataset)
    monkeypatch.setattr(networks, "create", small)
    smaller = {"folder": ["image_size=32"], "text": ["bptt=5"]}.get(kind_of(recipe.run.data) or "", [])
    changes = ["batch_size=2", *smaller, "workers=0", "log_steps=1", "device=cpu"]
    changes += ["validation=2"] if recipe.run.validation else []
    changes += ["settings.every=1"] if recipe.run.method == "gradual_per_layer" else []
    run = recipe.run.with_settings([*changes, "settings.warmup=1it"])
    run = Run.from_dict({**run.to_dict(), "model_options": SMALLER.get(run.model, {})})  # no download of weights
    watcher = StopAfter(2)
    with pytest.raises(StopAfter.Reached):
        train(run, tmp_path / "out", observers=[watcher])
    assert [status.phase for status in watcher.seen] == (
        ["dense", "dense"] if run.method == "dense" else ["warm-up", "sparsify"]
    )
    assert all(status.loss is not None and math.isfinite(status.loss) for status in watcher.seen)
    if run.decay is None and run.method != "dense":
        assert watcher.seen[1].sparsity is not None
        assert watcher.seen[1].sparsity > 0  # the budget has begun to come down


def test_the_recipes_cover_the_networks_of_the_paper_and_of_the_suite() -> None:
    """Left out: networks that neither the paper nor the suite trains (LeNet-5, ResNet-56, IndRNN), or that fit in
    another way (map fitting)."""
    used = {recipe.run.model for recipe in RECIPES}
    assert set(models.names()) - used == {"lenet5", "resnet56", "indrnn", "map_fit"}
