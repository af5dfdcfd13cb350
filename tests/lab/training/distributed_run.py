"""Short runs in as many processes as torchrun starts: distributed_run.py FOLDER DEVICE.

Each run is done twice: whole, and once more from its last checkpoint, in a folder whose name ends in -again. Every
process notes how many images of the folder it has evaluated.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_data import tiny_images, tiny_text
from torch import nn

from gossamer.lab.checkpoint import Checkpoints
from gossamer.lab.data import DataNotFound, FolderBatches, FolderSet, ImageSet, TextSet
from gossamer.lab.data.folder import load_folder
from gossamer.lab.training import LossNotFinite, Run, networks, task, train
from gossamer.lab.training.distributed import end_process

IMAGES = Run(
    model="lenet300",
    data="mnist",
    epochs=3,
    batch_size=10,
    method="scl",
    sparsity=0.8,
    clip=1.0,
    log_steps=2,
    checkpoint_steps=5,
)
WORDS = replace(
    IMAGES,
    model="lstm_lm",
    model_options={"hidden": 8, "dropout": 0.0},
    data="wikitext2",
    batch_size=5,
    bptt=9,
    lr=2.0,
    momentum=0.0,
    schedule="plateau",
)
FOLDER = replace(IMAGES, data="imagefolder", image_size=12, workers=1, epochs=2, batch_size=5, checkpoint_steps=3)
TAUGHT = replace(IMAGES, distil=0.5)  # by the trunk, which is whole in every process
BY_FILE = replace(WORDS, distil=0.5, teacher="its folder")
KINDS = {"images": IMAGES, "words": WORDS, "folder": FOLDER, "taught": TAUGHT, "by-file": BY_FILE}


def small(run: Run, num_classes: int) -> nn.Module:
    """A network without dropout, which is no sum over samples, and with batch normalisation only where torch
    synchronises it."""
    if run.model == "lstm_lm":
        return whole(run, num_classes)
    norm = nn.BatchNorm2d(5) if run.device == "cuda" else nn.Identity()
    first = [nn.LazyConv2d(5, 3, stride=2), norm, nn.ReLU(), nn.Flatten()]
    network = nn.Sequential(*first, nn.LazyLinear(7), nn.ReLU(), nn.Linear(7, num_classes))
    network(torch.zeros(2, 3, 12, 12) if run.data == "imagefolder" else torch.zeros(2, 1, 8, 8))
    return network


whole = networks.create


def tiny_folder(root: Path) -> FolderSet:
    """Thirteen images to train on, so that the two processes have unequal slices of a batch of five."""
    if os.environ.get("RANK", "0") == "0":
        random = np.random.default_rng(0)
        for index in range(19):
            path = root / ("train" if index < 13 else "val") / f"{index % 3}" / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (20, 16, 3), dtype=np.uint8)).save(path)
        (root / "ready").touch()
    while not (root / "ready").exists():
        time.sleep(0.01)
    return load_folder(root)


def write_teacher(path: Path) -> None:
    """Of all processes the same, so that none has to wait for another."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        state = whole(WORDS, 11).state_dict()
    temporary = path.with_name(f"{path.name}-{os.environ.get('RANK', '0')}")
    del state["decoder.weight"]  # tied to the embedding
    save_file(state, temporary)
    temporary.rename(path)


def twice(run: Run, folder: Path) -> None:
    again = folder.with_name(f"{folder.name}-again")
    with mock.patch.object(Checkpoints, "clear"):  # so that there is something to go on from
        train(run, folder)
    if os.environ.get("RANK", "0") == "0":
        copy = folder.with_name("copy")
        # Without that of the last step, as the run of the folder writes one: something has to be left to train.
        last = "checkpoint-000000004.*"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("result.json", "model.*", last))
        copy.rename(again)
    while not again.is_dir():
        time.sleep(0.01)
    train(run, again)


def noting_evaluated(path: Path) -> Callable[[FolderBatches], Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """Batches that leave a line with their number of images where they are not trained on."""
    plain = FolderBatches.__iter__

    def iterate(batches: FolderBatches) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, labels in plain(batches):
            if not batches.training:
                with path.open("a") as file:
                    file.write(f"{len(labels)}\n")
            yield images, labels

    return iterate


def all_of_them(folder: Path, shardings: tuple[str, ...], device: str) -> None:
    sets: dict[str, ImageSet | TextSet | FolderSet] = {
        "mnist": tiny_images(count=47),
        "wikitext2": tiny_text(),
        "imagefolder": tiny_folder(folder / "files"),
    }
    evaluated = folder / f"evaluated-{os.environ.get('RANK', '0')}.txt"
    with (
        mock.patch.object(FolderBatches, "__iter__", noting_evaluated(evaluated)),
        mock.patch.object(task.data, "load", lambda name, root=None: sets[name]),
        mock.patch.object(networks, "create", small),
    ):
        write_teacher(folder / "teacher")
        for sharding in shardings:
            for kind, run in KINDS.items():
                teacher = str(folder / "teacher") if kind == "by-file" else run.teacher
                run = replace(run, sharding=sharding, device=device, teacher=teacher)
                twice(run, folder / f"{kind}-{sharding}")


def failures(folder: Path, device: str) -> None:
    """What every process says when one of them cannot go on."""

    def note(name: str, action: Callable[[], object], kind: type[Exception]) -> None:
        try:
            action()
        except kind as error:
            (folder / f"{name}-{os.environ['RANK']}.txt").write_text(str(error))

    def only_in_one(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * (float("nan") if os.environ["RANK"] == "1" else 1.0)

    def missing(name: str, root: str | None = None) -> ImageSet:
        if os.environ["RANK"] == "0":
            raise DataNotFound("the leader found nothing")
        return tiny_images(count=47)

    with (
        mock.patch.object(networks, "create", small),
        mock.patch.object(task.data, "load", return_value=tiny_images(count=47)),
        mock.patch.object(nn.ReLU, "forward", only_in_one),
    ):
        run = replace(IMAGES, device=device, method="dense", sparsity=None, checkpoint_steps=0)
        note("nan", lambda: train(run, folder / "nan"), LossNotFinite)
    with mock.patch.object(task.data, "load", missing):
        note("missing", lambda: train(run, folder / "missing"), DataNotFound)
    note("another", lambda: train(run, folder / "images-ddp"), ValueError)


if __name__ == "__main__":
    torch.set_num_threads(1)
    all_of_them(Path(sys.argv[1]), ("ddp", "fsdp2"), sys.argv[2])
    failures(Path(sys.argv[1]), sys.argv[2])
    end_process(0)
