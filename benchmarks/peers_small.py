"""A race that one CPU core runs in minutes, to find out why a method fails and which settings suit it.

    python benchmarks/peers_small.py --out results/peers-small [--methods str str:rate=4000 gradual] [--sparsity 0.95]

A ResNet-14 of half the usual width (with `--net deep` a ResNet-110 of a quarter of it, which wants `--learning-rate
0.02`; with `--net plain` seven convolutions without shortcuts), on 3,200 images of CIFAR-10's training set, averaged to
16 × 16 pixels, for 16 epochs of 50 steps; accuracies are on 2,000 other images of the training set: the test set is not
looked at. Methods may have settings, as in `gossamer compare`. One JSON record a run; runs that have one are not
trained again.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.lab import data
from gossamer.lab.batched import Member, Race, run_race
from gossamer.lab.batched.compare import Comparison, record
from gossamer.lab.batched.entrants import entrant
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.models.initialise import he_initialise_
from gossamer.lab.models.resnet import BasicBlock
from gossamer.lab.results import race_blocks, race_table
from gossamer.lab.results.records import table
from gossamer.lab.training.result import write_json
from gossamer.provenance import commit

HELD_OUT = 2000


class NarrowResNet(nn.Module):
    """Three stages of as many blocks, each with twice the channels of the one before: ResNet-14 with 8, 16 and 32
    has 43,160 connections, ResNet-110 with 4, 8 and 16 has 107,692."""

    def __init__(self, blocks: int = 2, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        widths = [width] * (blocks + 1) + [2 * width] * blocks + [4 * width] * blocks
        self.blocks = nn.Sequential(*(BasicBlock(here, there, there // here) for here, there in pairwise(widths)))
        self.classifier = nn.Linear(4 * width, 10)
        he_initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.bn(self.conv(x))))
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits


class PlainNetwork(nn.Module):
    """Convolutions in a row, no shortcuts; seven with 16, 32 and 64 channels have 109,360 connections."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in pairwise((3, *(widths or (16, 16, 32, 32, 64, 64, 64)))):
            layers += [nn.MaxPool2d(2)] if before not in (3, width) else []
            layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, 10)
        he_initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


NETWORKS = {
    "residual": ("narrow ResNet-14", NarrowResNet),
    "deep": ("narrow ResNet-110", lambda: NarrowResNet(blocks=18, width=4)),
    "plain": ("seven plain convolutions", PlainNetwork),
}


def small_images(whole: ImageSet, count: int, held_out: int = HELD_OUT) -> ImageSet:
    """So many training images at half the resolution, and others in the place of the test images."""
    order = torch.randperm(len(whole.train), generator=torch.Generator().manual_seed(0))[: count + held_out]
    pixels = functional.avg_pool2d(whole.train.images[order].float(), 2).round().to(torch.uint8)
    labels = whole.train.labels[order]
    return ImageSet(
        f"{whole.name} at half the resolution",
        Labelled(pixels[:count], labels[:count]),
        Labelled(pixels[count:], labels[count:]),
        whole.class_names,
        whole.mean,
        whole.std,
        padding=2,
        flip=True,
    )


def path_of(out: Path, text: str, member: Member, phases: Race) -> Path:
    """The file of a run; a folder has runs of one network and one number of images."""
    text += f":label_smoothing={phases.label_smoothing:g}" if phases.label_smoothing else ""
    text += f":learning_rate={phases.learning_rate:g}" if phases.learning_rate != 0.1 else ""
    return out / file_name(text, member.sparsity, phases.epochs, member.seed)


def file_name(text: str, sparsity: float, epochs: int, seed: int) -> str:
    slug = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in text)
    return f"{slug}-{100 * sparsity:g}-{epochs}ep-s{seed}.json"


def check_settings(path: Path, text: str, member: Member) -> None:
    """A file is named by what was asked for, and the defaults behind that may have changed since."""
    there, asked = json.loads(path.read_text())["settings"], json.loads(json.dumps(member.to_dict()))
    if wrong := [name for name in asked if there.get(name, asked[name]) != asked[name]]:
        raise ValueError(
            f"expected a run of {text} in {path}, got one with another {', '.join(wrong)}: its default has changed "
            "since, so rename the file, or choose another --out"
        )


def race(
    out: Path,
    net: tuple[str, Callable[[], nn.Module]],
    methods: Sequence[str],
    sparsity: float,
    seeds: int,
    epochs: int,
    images: ImageSet,
    label_smoothing: float = 0.0,
    learning_rate: float = 0.1,
    **usual: float,
) -> list[Path]:
    """Train what has no record yet, each seed of all methods side by side; returns the files of all.

    `usual` are settings of runs that say nothing else."""
    name_of_net, make_network = net
    whole = Comparison(name_of_net, images.name, epochs=epochs).race()
    phases = replace(whole, label_smoothing=label_smoothing, learning_rate=learning_rate)
    found = []
    for seed in range(seeds):
        told = [(text, *entrant(text)) for text in methods]
        members = {text: Member.of(seed, name, sparsity, **{**usual, **settings}) for text, name, settings in told}
        paths = {text: path_of(out, text, member, phases) for text, member in members.items()}
        missing = [text for text in members if not paths[text].exists()]
        for text in members.keys() - set(missing):
            check_settings(paths[text], text, members[text])
        runs, start = [members[text] for text in missing], time.perf_counter()
        outcomes = run_race(
            phases, runs, images, make_network, device=torch.device("cpu"), dtype=torch.float32, progress=print
        ) if runs else []  # fmt: skip
        seconds = time.perf_counter() - start
        for text, member, outcome in zip(missing, runs, outcomes, strict=True):
            about = {"tier": "small", "net": name_of_net, "data": images.name, "images": len(images.train)}
            about["accuracy_on"] = f"{len(images.test)} images held out of the training set"
            content = record(member, outcome, phases, seconds, len(runs), torch.device("cpu"))
            write_json(paths[text], {**about, "commit": commit(), **content})
        found += [*paths.values()]
    return found


def parser_of(description: str | None, out: str) -> argparse.ArgumentParser:
    """With what every race of small networks may be asked for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--net", choices=NETWORKS, default="residual")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.95])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--images", type=int, default=3200)
    return parser


def prepare(out: Path, count: int) -> ImageSet:
    """One thread, the folder of the records, and so many images."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    whole = data.load("cifar10")
    assert isinstance(whole, ImageSet)
    return small_images(whole, count)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "results/peers-small")
    parser.add_argument("--methods", nargs="+", default=["gradual", "dpf", "scl", "str", "hyperflux"])
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    told = parser.parse_args(arguments)
    images = prepare(told.out, told.images)
    same = (told.seeds, told.epochs, images, told.label_smoothing, told.learning_rate)
    races = [race(told.out, NETWORKS[told.net], told.methods, sparsity, *same) for sparsity in told.sparsity]
    files = [file for found in races for file in found]
    for block in race_blocks([json.loads(file.read_text()) for file in files]):
        print(table(*race_table(block)))


if __name__ == "__main__":
    main()
