"""Are the statistics of batch normalisation out of date when a sparse network is done? They are taken anew.

    python benchmarks/recalibrate.py FILE… --out results/recalibration/resnet20.json

For each sparse file of a CIFAR-10 network: the accuracy on the test images with the running statistics that training
left, and with means and variances over training images, augmented as in training and as they are (`--images` of them).
Nothing is chosen by it.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from gossamer.lab import data
from gossamer.lab.data.augment import crop_flip, draw_crop_flip, normalise, scale_and_shift
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.stored import open_network
from gossamer.lab.training.result import write_json
from gossamer.provenance import commit

BATCH = 500


@torch.no_grad()
def accuracy(network: nn.Module, part: Labelled, images: Tensor) -> float:
    network.eval()
    right = sum(
        int((network(batch).argmax(1) == labels).sum())
        for batch, labels in zip(images.split(BATCH), part.labels.split(BATCH), strict=True)
    )
    return 100 * right / len(part)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--net", default="resnet20")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args(arguments)
    images = data.load("cifar10")
    assert isinstance(images, ImageSet)
    generator = torch.Generator().manual_seed(0)
    plain = images.train.images[torch.randperm(len(images.train), generator=generator)[: told.images]]
    draw = draw_crop_flip(len(plain), padding=images.padding, flip=images.flip, generator=generator)
    constants = scale_and_shift(images.mean, images.std)
    test = normalise(images.test.images, *constants)
    seen = {
        "augmented": normalise(crop_flip(plain, draw, padding=images.padding), *constants),
        "as they are": normalise(plain, *constants),
    }
    rows = []
    for path in told.files:
        network = open_network(path, told.net).model
        row = {"file": path.stem, "accuracy": accuracy(network, images.test, test)}
        for name, pixels in seen.items():
            update_bn(pixels.split(BATCH), network)  # means over the batches
            row[name] = accuracy(network, images.test, test)
        rows.append(row)
        print(row, flush=True)
    about = {"net": told.net, "data": "cifar10", "images": told.images, "torch": torch.__version__, "commit": commit()}
    told.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(told.out, {**about, "rows": rows})


if __name__ == "__main__":
    main()
