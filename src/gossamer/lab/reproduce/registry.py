"""The exhibits of the paper by name: what each needs, and the function that reproduces it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gossamer.hints import did_you_mean
from gossamer.io.checkpoints import read_checkpoint
from gossamer.lab import data, models
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.recipes import find, imagenet
from gossamer.lab.reproduce import figures, indrnn, map_fitting, mnist, paper_settings, short_decay
from gossamer.lab.results import density, map_fitting_rows, mnist_decay_table, mnist_estimator_table
from gossamer.lab.results.exhibits import indrnn_table, short_decay_table
from gossamer.lab.results.plot import can_draw
from gossamer.lab.results.records import read_records
from gossamer.lab.training.distributed import join

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True)
class Asked:
    """The options of `gossamer reproduce`."""

    out: Path
    seeds: int = 3
    steps: int = map_fitting.STEPS
    epochs: int | None = None
    device: str = "auto"
    network: Path | None = None
    changes: Sequence[str] = ()
    progress: Callable[[str], None] = lambda line: None
    moved: Callable[[float], None] = lambda share: None


@dataclass(frozen=True)
class Reproduced:
    """What an exhibit shows."""

    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    records: Sequence[Any] = ()


@dataclass(frozen=True)
class Exhibit:
    """One exhibit. `cost` says what it takes."""

    name: str
    about: str
    cost: str
    reproduce: Callable[[Asked], Reproduced] = field(repr=False)
    folder: str = ""  # of its records under results/

    @property
    def default_out(self) -> Path:
        return Path("results") / (self.folder or self.name)


def _ste(asked: Asked) -> Reproduced:
    rows = [
        [each.name, f"{min(each.gradient):.2f} to {max(each.gradient):.2f}", _intervals(each.dead)]
        for each in figures.estimators()
    ]
    return Reproduced(
        [(("estimator", "proxy gradient", "dead zone of the mask variable"), rows)],
        _drawn(asked.out / "estimators.svg", figures.draw_estimators),
    )


def _intervals(dead: Sequence[tuple[float, float]]) -> str:
    def edge(value: float, end: float, text: str) -> str:
        return text if value == end else f"{value:.2g}"

    return (
        ", ".join(f"{edge(start, -figures.RANGE, '-∞')} to {edge(end, figures.RANGE, '∞')}" for start, end in dead)
        or "none"
    )


def _drawn(path: Path, draw: Callable[[Path], None]) -> list[str]:
    if not can_draw():
        return ["no picture: it needs matplotlib (pip install 'gossamer[plot]')"]
    draw(path)
    return [f"the picture is {path}"]


def _map_fitting(asked: Asked) -> Reproduced:
    records = map_fitting.reproduce(
        asked.out, seeds=asked.seeds, steps=asked.steps, progress=asked.progress, moved=asked.moved
    )
    rows = []
    for estimator, *cells in map_fitting_rows(records):
        rows += [[estimator, "raw", *cells[:3]], ["", "normalised", *cells[3:]]]
    notes = [
        "The paper prints curves and no numbers: clipped ReLU is worst, ReLU is better, the other three are best and "
        "similar, and normalisation reduces all errors.",
        f"the records and, if matplotlib is installed, their curves are in {asked.out}",
    ]
    head = ("estimator", "mask gradient", "rate 0.1", "best constant", "best cosine")
    return Reproduced([(head, rows)], notes, records)


def _mnist(asked: Asked) -> Reproduced:
    records = mnist.reproduce(
        asked.out,
        seeds=asked.seeds,
        epochs=mnist.EPOCHS if asked.epochs is None else asked.epochs,
        device=join(asked.device).device,
        progress=asked.progress,
        moved=asked.moved,
    )
    note = f"the records and, if matplotlib is installed, the picture {mnist.PICTURE} are in {asked.out}"
    return Reproduced([mnist_decay_table(records), mnist_estimator_table(records)], [note], records)


def _short_decay(asked: Asked) -> Reproduced:
    device = join(asked.device).device
    short = short_decay.reproduce(asked.out, device=device, progress=asked.progress, moved=asked.moved)
    whole = read_records(asked.out.parent / "mnist", ("part",)) if (asked.out.parent / "mnist").is_dir() else []
    return Reproduced([short_decay_table(short, whole)], [f"the records are in {asked.out}"], short)


def _indrnn(asked: Asked) -> Reproduced:
    curves = indrnn.reproduce(asked.out, seeds=asked.seeds)
    return Reproduced(
        [indrnn_table(curves)], [f"the record and, if matplotlib is installed, its picture are in {asked.out}"]
    )


def _density(asked: Asked) -> Reproduced:
    """From the records of other exhibits: those of DenseNet-40 and ResNet-110 nearest to 10 and 30 % density."""
    profiles = density.committed_profiles(asked.out.parent)
    if not profiles:
        return Reproduced(
            notes=["no records of DenseNet-40 or ResNet-110 at 10 or 30 % density: reproduce these first"]
        )
    rows = [
        [each.title, *(f"{100 * share:.1f} %" for share in (each.density[0], min(each.density), each.density[-1]))]
        for each in profiles
    ]
    notes = _drawn(asked.out / density.NAME, lambda path: density.draw(profiles, path))
    return Reproduced([(("network", "first layer", "least", "last layer"), rows)], notes)


def _mask_gradients(asked: Asked) -> Reproduced:
    if asked.network is None:
        raise ValueError(
            "mask-gradients needs a trained dense ResNet-110: name its file with --network (gossamer train "
            "cifar10-resnet110-dense --out DIR writes DIR/model.safetensors)"
        )
    network = models.create("resnet110", num_classes=10)
    network.load_state_dict(read_checkpoint(asked.network))
    images = data.load("cifar10")
    assert isinstance(images, ImageSet)
    return mask_gradients_of(network, images, asked.out / "mask-gradients.svg")


def mask_gradients_of(network: torch.nn.Module, images: ImageSet, path: Path) -> Reproduced:
    found = figures.mask_gradients(network, *figures.batch_of(images))
    rows = [
        [kind, *(f"{of[place]:.1e}" for place in (0, len(of) // 2, -1)), f"{max(of) / min(of):.0f}"]
        for kind, of in (("raw", found.by_layer), ("normalised", found.normalised_by_layer))
    ]
    head = ("mask gradient", "first layer", "middle", "last layer", "largest / smallest layer")
    return Reproduced([(head, rows)], _drawn(path, lambda path: figures.draw_mask_gradients(found, path)))


def _paper_settings(exhibit: str) -> Callable[[Asked], Reproduced]:
    def reproduce(asked: Asked) -> Reproduced:
        records = paper_settings.reproduce(
            paper_settings.RECIPES[exhibit],
            asked.out,
            seeds=asked.seeds,
            epochs=asked.epochs,
            device=join(asked.device).device,
            changes=asked.changes,
            progress=asked.progress,
            moved=asked.moved,
        )
        return Reproduced([paper_settings.rows(records)], [f"the records are in {asked.out}"], records)

    return reproduce


def _recipes(*names: str) -> Callable[[Asked], Reproduced]:
    """Exhibits whose runs are trained one by one, by recipes."""

    def reproduce(asked: Asked) -> Reproduced:
        rows = [[name, find(name).about, str(find(name).run.epochs)] for name in names]
        note = "train each with `gossamer train RECIPE --out DIR`; docs/reproduction.md says with which options"
        return Reproduced([(("recipe", "what", "epochs"), rows)], [note])

    return reproduce


_GPU = {
    "resnet20": ("ResNet-20 table and its six estimator cells", "18 GPU minutes for three seeds"),
    "resnet110": ("ResNet-110 table and its six estimator cells", "45 GPU minutes for one seed"),
    "vgg16": ("VGG-16 figure", "20 GPU minutes"),
    "vgg19": ("VGG-19 figure", "15 GPU minutes"),
    "densenet40": ("DenseNet-40 table", "50 GPU minutes for one seed"),
    "densenet-bc100": ("DenseNet-BC-100 figure", "50 GPU minutes for one seed"),
    "wrn28-10": ("WRN-28-10 against L0, CIFAR-10", "120 GPU minutes"),
    "cifar100-wrn28-10": ("WRN-28-10 against L0, CIFAR-100", "120 GPU minutes"),
}
EXHIBITS: tuple[Exhibit, ...] = (
    Exhibit("ste", "figure of the five proxy gradients, drawn from the code", "seconds", _ste),
    Exhibit("mask-gradients", "figure of mask gradient magnitudes of a ResNet-110", "a trained one", _mask_gradients),
    Exhibit("map-fitting", "figure of map fitting, with α varied", "15 CPU minutes", _map_fitting),
    Exhibit("mnist", "MNIST: table of λ1, connectivity figure, table of estimators", "2 CPU hours", _mnist),
    Exhibit("short-decay", "λ1 by short runs: what they predict, on MNIST", "1 CPU minute", _short_decay),
    *(Exhibit(name, *_GPU[name], _paper_settings(name), f"paper-{name}") for name in paper_settings.RECIPES),
    Exhibit("density", "density profiles of DenseNet-40 and ResNet-110", "the records of both", _density),
    Exhibit("wikitext2", "WikiText-2 table", "25 GPU minutes per run", _recipes("wikitext2-lstm")),
    Exhibit("indrnn", "IndRNN: gradients over time with W or u pruned", "seconds", _indrnn),
    Exhibit(
        "imagenet",
        "VGG-16, ResNet-50 and EfficientNet-B0 on ImageNet",
        "ImageNet, and days",
        _recipes(*(recipe.name for recipe in imagenet.RECIPES)),
    ),
)  # fmt: skip


def exhibit(name: str) -> Exhibit:
    for each in EXHIBITS:
        if each.name == name:
            return each
    names = [each.name for each in EXHIBITS]
    hint = did_you_mean(name, names, f"the exhibits are {', '.join(names)}")
    raise ValueError(f"expected the name of an exhibit, got {name!r}: {hint}")
