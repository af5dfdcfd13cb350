"""What a run is trained on: batches, the loss of a batch, and the measure of success.

There are two tasks, classification of images and prediction of the next word. Both are driven by the same loop; what
they have to carry from step to step (a language model its hidden state) they keep, give away and take back.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer import data
from gossamer.data import Batches, ImageSet, Position, TextSet
from gossamer.data.text import TextBatches
from gossamer.training.place import Place
from gossamer.training.run import Run

_EVALUATION_BATCH = 500
_EVALUATION_COLUMNS = 10  # as the PyTorch word-language-model example evaluates


class Source(Protocol):
    """Batches in an order that a position describes."""

    @property
    def state(self) -> Position: ...

    @state.setter
    def state(self, position: Position) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...


class Task(Protocol):
    """What the loop needs to know of its data."""

    metric: str
    num_classes: int
    source: Source
    has_validation: bool

    def example(self) -> Tensor:
        """A batch of the right shape, of zeros."""
        ...

    def loss(self, forward: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of this process's slice; its mean over processes is the loss of the batch."""
        ...

    def begin_epoch(self) -> None: ...

    def evaluate(self, model: nn.Module, part: str) -> float:
        """The metric on 'validation' or 'test'."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


def make_task(run: Run, place: Place) -> Task:
    dataset = data.load(run.data, run.data_root)
    if isinstance(dataset, TextSet):
        return TextTask(run, place, dataset)
    return ImageTask(run, place, dataset)


def autocast(run: Run, place: Place) -> torch.autocast:
    return torch.autocast(place.device.type, torch.bfloat16, enabled=run.precision == "bf16")


class ImageTask:
    """Classification of images."""

    metric = "accuracy"

    def __init__(self, run: Run, place: Place, dataset: ImageSet) -> None:
        dataset = dataset.split(run.validation) if run.validation else dataset
        if not run.augment:
            dataset = replace(dataset, padding=0, flip=False)
        self._run, self._place, self._dataset = run, place, dataset.to(place.device)
        self.num_classes = dataset.num_classes
        self.has_validation = dataset.validation is not None
        self.source: Source = Batches.training(
            self._dataset, run.batch_size, seed=run.seed, channels_last=run.channels_last
        )

    def example(self) -> Tensor:
        return torch.zeros(2, *self._dataset.input_shape, device=self._place.device)

    def loss(self, forward: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        mine = self._place.slice_of(len(labels))
        with autocast(self._run, self._place):
            logits = forward(images[mine])
        loss = functional.cross_entropy(
            logits.float(), labels[mine], label_smoothing=self._run.label_smoothing
        )
        return loss * self._place.weight_of(len(labels)) if self._place.world > 1 else loss

    def begin_epoch(self) -> None:
        pass  # images are independent of each other

    def evaluate(self, model: nn.Module, part: str) -> float:
        chosen = self._dataset.test if part == "test" else self._dataset.validation
        if chosen is None:
            raise ValueError(f"{self._dataset.name} has no validation part: set validation= to hold images out")
        right = torch.zeros((), dtype=torch.int64, device=self._place.device)
        batches = Batches.evaluation(
            self._dataset, chosen, _EVALUATION_BATCH, channels_last=self._run.channels_last
        )
        with _evaluating(model), autocast(self._run, self._place):
            for images, labels in batches:
                right += (model(images).argmax(dim=1) == labels).sum()
        return float(right) / len(chosen)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass


class TextTask:
    """Prediction of the next word, by truncated back-propagation through time."""

    metric = "perplexity"
    has_validation = True

    def __init__(self, run: Run, place: Place, dataset: TextSet) -> None:
        self._run, self._place, self._dataset = run, place, dataset
        self.num_classes = len(dataset.vocabulary)
        self.source: Source = TextBatches(dataset.train, run.batch_size, length=run.bptt, device=place.device)
        self._hidden: tuple[Tensor, ...] | None = None

    def example(self) -> Tensor:
        return torch.zeros(1, 2, dtype=torch.int64, device=self._place.device)

    def loss(self, forward: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        count = batch[0].shape[1]
        tokens, following = (part[:, self._place.slice_of(count)] for part in batch)
        with autocast(self._run, self._place):
            logits, hidden = forward(tokens, self._hidden)
        self._hidden = tuple(part.detach() for part in hidden)
        loss = functional.cross_entropy(
            logits.float().flatten(0, 1), following.flatten(), label_smoothing=self._run.label_smoothing
        )
        return loss * self._place.weight_of(count) if self._place.world > 1 else loss

    def begin_epoch(self) -> None:
        self._hidden = None

    def evaluate(self, model: nn.Module, part: str) -> float:
        stream = self._dataset.test if part == "test" else self._dataset.validation
        windows = TextBatches(stream, _EVALUATION_COLUMNS, length=self._run.bptt, device=self._place.device)
        total = torch.zeros((), dtype=torch.float64, device=self._place.device)
        words, hidden = 0, None
        with _evaluating(model), autocast(self._run, self._place):
            for tokens, following in windows:
                logits, hidden = model(tokens, hidden)
                total += functional.cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="sum")
                words += following.numel()
        return math.exp(min(float(total) / words, 700.0))  # a hopeless model is huge, not an overflow

    def state(self) -> dict[str, Any]:
        return {"hidden": None if self._hidden is None else list(self._hidden)}

    def load_state(self, state: dict[str, Any]) -> None:
        hidden = state["hidden"]
        self._hidden = None if hidden is None else tuple(part.to(self._place.device) for part in hidden)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
