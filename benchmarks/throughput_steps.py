"""What benchmarks/throughput.py measures: a step of training as `gossamer train` takes it, on random data."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer import Sparsifier
from gossamer.lab import models
from gossamer.lab.data import ImageSet, Labelled, TextSet
from gossamer.lab.recipes import RECIPES
from gossamer.lab.training import Run, networks
from gossamer.lab.training.distributed import DistributedContext, autocast, forward_of
from gossamer.lab.training.modes import Mode
from gossamer.lab.training.optimise import make_optimizer
from gossamer.lab.training.step import Meter, Step
from gossamer.lab.training.task import ImageTask, TextTask

FLAT = ("fc_densenet_mnist", "lenet300", "gru", "indrnn")  # they take images as vectors
TINY_WORDS = 16  # vocabulary and units of a language model in a check


def modes_of(entry: models.ModelEntry, *, compiled: bool) -> list[Mode]:
    """The modes that make sense for a network: layouts for images; compiled, what is captured, but cuDNN's layers."""
    bf16 = Mode("bf16")
    convolutions = len(entry.input_shape) == 3 and entry.name not in FLAT
    if entry.recurrent:
        kinds = [Mode()]  # under autocast torch would compute them in float16, whose small gradients vanish
    elif convolutions:
        kinds = [Mode(), bf16, replace(bf16, channels_last=True)]
    else:
        kinds = [Mode(), bf16]
    if not compiled:
        return [replace(kind, capture=captured) for kind in kinds for captured in (False, True)]
    if entry.recurrent:
        return []
    kinds = kinds[-1:] if convolutions else kinds
    return [replace(kind, compile=True, capture=True) for kind in kinds]


class MapTask:
    """Regression of a random map on random vectors, for the one network that is no classifier."""

    def __init__(self, run: Run, context: DistributedContext, width: int) -> None:
        self._run, self._context = run, context
        self.source = [tuple(torch.randn(2, run.batch_size, width, device=context.device))]

    def loss(
        self, forward: Callable[..., Any], batch: tuple[Tensor, Tensor], teacher: None = None
    ) -> tuple[Tensor, None]:
        with autocast(self._run, self._context):
            fitted = forward(batch[0])
        return functional.mse_loss(fitted.float(), batch[1]), None

    def carry(self) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """A network with the batches and the optimizer of its recipe."""

    entry: models.ModelEntry
    run: Run
    device: torch.device

    @property
    def samples(self) -> int:
        """Images, or words, of one step."""
        return self.run.batch_size * (self.run.bptt if self.entry.tokens else 1)

    def task(self, run: Run, context: DistributedContext) -> Any:
        """Random data of the network's kind."""
        entry, classes = self.entry, self.classes
        torch.manual_seed(0)
        if entry.tokens:
            stream = torch.randint(classes, (run.batch_size * (50 * run.bptt + 1),))  # no window is short
            return TextTask(run, context, TextSet("random", stream, stream, stream, tuple(map(str, range(classes)))))
        if len(entry.input_shape) == 1:
            return MapTask(run, context, *entry.input_shape)
        count = run.batch_size * (2 if entry.data == "imagefolder" else 100)
        channels, augmented = entry.input_shape[0], entry.data == "cifar10"
        images = torch.randint(256, (count, *entry.input_shape), dtype=torch.uint8)
        part = Labelled(images, torch.randint(classes, (count,)))
        names, middle = tuple(map(str, range(classes))), (0.5,) * channels
        dataset = ImageSet("random", part, part, names, middle, middle, padding=4 * augmented, flip=augmented)
        return ImageTask(run, context, dataset)

    @property
    def classes(self) -> int:
        return TINY_WORDS if TINY_WORDS in self.run.model_options.values() else self.entry.num_classes

    def build(self) -> nn.Module:
        options = {key: value for key, value in self.run.model_options.items() if key != "pretrained"}
        with self.device:  # random weights are drawn much faster on a GPU
            return models.create(self.entry.name, num_classes=self.classes, **options)


def case_of(name: str, device: torch.device, *, tiny: bool) -> Case:
    entry = models.entry(name)
    recipes = (recipe.run for recipe in RECIPES if recipe.run.model == name and recipe.run.sparsity is not None)
    run = next(recipes, Run(model=name, data=entry.data, method="scl", sparsity=0.95))
    if tiny:
        words: dict[str, Any] = {"bptt": 5, "model_options": {"hidden" if entry.recurrent else "width": TINY_WORDS}}
        run = replace(run, batch_size=4, **(words if entry.tokens else {"model_options": {}}))
    return Case(entry, run, device)


class Trained:
    """A network with everything that a step needs; calling it takes one step."""

    def __init__(self, case: Case, mode: Mode, *, sparse: bool) -> None:
        run, context = replace(case.run, **asdict(mode)), DistributedContext(case.device)
        task = case.task(run, context)
        model = networks.to_layout(case.build(), run, case.device).train()
        optimizer = make_optimizer(run, model)
        sparsifier = None
        if sparse:
            phases = {"warmup": "0it", "sparsify": "900000it", "stabilise": "0it"}
            sparsifier = Sparsifier(model, optimizer, sparsity=run.sparsity, total_steps=1_000_000, **phases)
        forward = forward_of(model, run, context)
        self._step = Step(run, context, task, model, optimizer, sparsifier, forward, Meter(context, 0))
        self._batches = endless(task.source)

    def __call__(self) -> None:
        self._step(next(self._batches), 1e-4)  # so small that random data cannot make it diverge


def endless(source: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from source
