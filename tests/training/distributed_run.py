"""A short run that torchrun starts in several processes: python distributed_run.py FOLDER [key=value …]."""

import sys

import torch
from conftest import tiny_images
from torch import nn

from gossamer.training import Run, networks, task, train
from gossamer.training.run import Run as RunType

RUN = Run(model="lenet300", data="mnist", epochs=3, batch_size=10, method="scl", sparsity=0.8, clip=1.0, log_steps=2)


def small(run: RunType, num_classes: int) -> nn.Module:
    """A network without batch normalisation and dropout: they are not sums over samples."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(45, 7), nn.ReLU(), nn.Linear(7, num_classes)
    )


def main(folder: str, *changes: str) -> None:
    torch.set_num_threads(1)
    dataset = tiny_images(count=47)
    task.data.load = lambda name, root=None: dataset
    networks.create = small
    train(RUN.with_settings(changes), folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
