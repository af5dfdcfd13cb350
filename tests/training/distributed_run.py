"""A short run in as many processes as torchrun starts: distributed_run.py FOLDER."""

import sys
from pathlib import Path
from unittest import mock

import torch
from conftest import tiny_images
from torch import nn

from gossamer.training import Run, networks, task, train

RUN = Run(model="lenet300", data="mnist", epochs=3, batch_size=10, method="scl", sparsity=0.8, clip=1.0, log_steps=2)


def small(run: Run, num_classes: int) -> nn.Module:
    """A network without batch normalisation and dropout: they are not sums over samples."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(45, 7), nn.ReLU(), nn.Linear(7, num_classes)
    )


def all_of_them(folder: Path, shardings: tuple[str, ...]) -> None:
    dataset = tiny_images(count=47)
    with (
        mock.patch.object(task.data, "load", return_value=dataset),
        mock.patch.object(networks, "create", small),
    ):
        for sharding in shardings:
            train(RUN.with_settings([f"sharding={sharding}"]), folder / sharding)


if __name__ == "__main__":
    torch.set_num_threads(1)
    all_of_them(Path(sys.argv[1]), ("ddp", "fsdp2"))
