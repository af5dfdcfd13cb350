"""A short run in as many processes as torchrun starts: distributed_run.py FOLDER DEVICE.

Each run is done twice: whole, and once more from its last checkpoint, in a folder whose name ends in -again.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from tiny_data import tiny_images
from torch import nn

from gossamer.training import Run, networks, task, train
from gossamer.training.checkpoint import Checkpoints

RUN = Run(
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


def small(run: Run, num_classes: int) -> nn.Module:
    """A network without dropout, which is no sum over samples, and with batch normalisation only where torch
    synchronises it."""
    norm = nn.BatchNorm2d(5) if run.device == "cuda" else nn.Identity()
    first = [nn.Conv2d(1, 5, 3, stride=2), norm, nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, nn.Linear(45, 7), nn.ReLU(), nn.Linear(7, num_classes))


def twice(folder: Path, sharding: str, device: str) -> None:
    run, again = RUN.with_settings([f"sharding={sharding}", f"device={device}"]), folder / f"{sharding}-again"
    with mock.patch.object(Checkpoints, "clear"):  # so that there is something to go on from
        train(run, folder / sharding)
    if os.environ.get("RANK", "0") == "0":
        shutil.copytree(folder / sharding, folder / "copy", ignore=shutil.ignore_patterns("result.json", "model.*"))
        (folder / "copy").rename(again)
    while not again.is_dir():
        time.sleep(0.01)
    train(run, again)


def all_of_them(folder: Path, shardings: tuple[str, ...], device: str) -> None:
    with (
        mock.patch.object(task.data, "load", return_value=tiny_images(count=47)),
        mock.patch.object(networks, "create", small),
    ):
        for sharding in shardings:
            twice(folder, sharding, device)


if __name__ == "__main__":
    torch.set_num_threads(1)
    all_of_them(Path(sys.argv[1]), ("ddp", "fsdp2"), sys.argv[2])
    torch.distributed.destroy_process_group()
    # Seen once in many runs: a process aborts in the interpreter's farewell, after all its work ("terminate called
    # without an active exception"). What is tested here is the work.
    os._exit(0)
