"""What noise does to masks in a run of many steps, small enough for one CPU core: minutes a run.

    python benchmarks/sinking.py --sparsity 0.5 --methods scl str
    python benchmarks/sinking.py --sparsity 0.5 --methods scl:anchor=0,mask_lr=0.01,removed_gradient=0,midpoint=5

Six convolutions on CIFAR-10 averaged to 8 × 8 pixels, 45,000 images, 32 epochs of 703 steps, weight decay 1e-3, with
which batch norm has settled after a thousand steps: so what grows with the steps shows as it does in hundreds of
epochs of a large network. Accuracies are on the other 5,000 training images; the test set is not looked at. Methods may
have settings, as in `gossamer compare`. One JSON record a run; runs that have one are not trained again.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from peers_small import PlainNetwork, race
from torch.nn import functional

from gossamer.lab import data
from gossamer.lab.data.sets import ImageSet, Labelled

HELD_OUT = 5000


def small_network() -> PlainNetwork:
    """Six convolutions in a row; 51,600 connections."""
    return PlainNetwork(16, 16, 32, 32, 48, 48)


def tiny_images(whole: ImageSet, held_out: int = HELD_OUT) -> ImageSet:
    """The training images at a quarter of the resolution, the last ones in the place of the test images."""
    pixels = functional.avg_pool2d(whole.train.images.float(), 4).round().to(torch.uint8)
    labels, count = whole.train.labels, len(whole.train) - held_out
    return ImageSet(
        f"{whole.name} at a quarter of the resolution",
        Labelled(pixels[:count], labels[:count]),
        Labelled(pixels[count:], labels[count:]),
        whole.class_names,
        whole.mean,
        whole.std,
        padding=1,
        flip=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/sinking"))
    parser.add_argument("--methods", nargs="+", default=["scl", "scl:anchor=0,mask_lr=0.01,removed_gradient=0", "str"])
    parser.add_argument("--sparsity", type=float, default=0.95)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=32)
    parser.add_argument("--weight-decay", type=float, default=1e-3)
    told = parser.parse_args(arguments)
    torch.set_num_threads(1)
    told.out.mkdir(parents=True, exist_ok=True)
    whole = data.load("cifar10")
    assert isinstance(whole, ImageSet)
    net, usual = ("six convolutions", small_network), {"weight_decay": told.weight_decay}
    files = race(told.out, net, told.methods, told.sparsity, told.seeds, told.epochs, tiny_images(whole), **usual)
    for file in files:
        run = json.loads(file.read_text())
        print(f"{file.stem:<60} {run['accuracy']:.2f} loss {run['train_loss']:.4f} {run['connections_by_tensor']}")


if __name__ == "__main__":
    main()
