"""The task of a run: batches, the loss of a batch, and the metric.

There are two tasks: classification, of images or sentences, and next-word prediction. The same loop trains both. A
task owns the state that is carried from step to step (the hidden state of a language model), and saves and restores it.
A teacher, if any, adds its term to the loss of a batch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.lab import data
from gossamer.lab.data import (
    Batches,
    FolderBatches,
    FolderSet,
    ImageSet,
    Position,
    SentenceBatches,
    SentenceSet,
    TextBatches,
    TextSet,
)
from gossamer.lab.training.distributed import DistributedContext, autocast
from gossamer.lab.training.rnn_state import RNNState
from gossamer.lab.training.run import Run
from gossamer.lab.training.teacher import Teacher, TeacherRequirements

_EVALUATION_BATCH = 500
_EVALUATION_COLUMNS = 10  # as the PyTorch word-language-model example evaluates

Tell = Callable[[int, int], object]  # receives the number of batches done, and their total
Outcome = tuple[Tensor, Tensor | None]  # of a batch: its loss and accuracy


class Source(Protocol):
    """Batches in a reproducible order, with a position."""

    @property
    def state(self) -> Position: ...

    @state.setter
    def state(self, position: Position) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...


class Task(Protocol):
    """The interface between the loop and its data."""

    metric: str
    num_classes: int
    source: Source
    has_validation: bool
    streamed: bool  # from files, so an evaluation is slow

    def example(self) -> Tensor:
        """A batch with the shape of the data: zeros, or sentences."""
        ...

    def requirements(self) -> TeacherRequirements:
        """The requirements of the task on a teacher."""
        ...

    def loss(
        self, forward: Callable[..., Any], batch: tuple[Tensor, Tensor], teacher: Teacher | None = None
    ) -> Outcome:
        """The loss and accuracy (None for text) of this process's slice; their means over processes are those of the
        batch."""
        ...

    def carry(self) -> None:
        """Called after the backward pass of a batch: carries the state over to the next batch."""
        ...

    def begin_epoch(self) -> None: ...

    def evaluate(self, model: nn.Module, part: str, tell: Tell) -> float:
        """The metric on 'validation' or 'test'; `tell` is called before every batch, in all processes."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


def make_task(run: Run, context: DistributedContext) -> Task:
    dataset = data.load(run.data, run.data_root)
    if isinstance(dataset, TextSet):
        return TextTask(run, context, dataset)
    return ImageTask(run, context, dataset)


class ImageTask:
    """Classification, with a set of images or sentences on the device, or a streamed folder of images."""

    metric = "accuracy"

    def __init__(self, run: Run, context: DistributedContext, dataset: ImageSet | FolderSet | SentenceSet) -> None:
        self._run, self._context = run, context
        self.num_classes = dataset.num_classes
        self.source: Source
        self._parts: dict[str, Source]
        if isinstance(dataset, FolderSet):
            self.source, self._parts = _of_folder(run, context, dataset)
            self._shape: tuple[int, ...] = (3, run.image_size, run.image_size)
            self._mine: Callable[[int], slice] = slice  # all: the source decodes only the images of this process
        elif isinstance(dataset, SentenceSet):
            self.source, self._parts = _of_sentences(run, context, dataset)
            self._mine = context.slice_of
        else:
            self.source, self._parts = _of_images(run, context, dataset)
            self._shape = dataset.input_shape
            self._mine = context.slice_of
        self.has_validation = "validation" in self._parts
        self.streamed = isinstance(dataset, FolderSet)
        self._sentences = dataset.test.tokens[:2] if isinstance(dataset, SentenceSet) else None
        self._digest = dataset.digest() if isinstance(dataset, FolderSet) else None  # others have checksums

    def example(self) -> Tensor:
        if self._sentences is not None:
            return self._sentences.to(self._context.device)
        return torch.zeros(2, *self._shape, device=self._context.device)

    def requirements(self) -> TeacherRequirements:
        return TeacherRequirements(self.example(), self.num_classes, hidden=None)

    def loss(
        self, forward: Callable[..., Any], batch: tuple[Tensor, Tensor], teacher: Teacher | None = None
    ) -> Outcome:
        mine = self._mine(len(batch[1]))
        images, labels = batch[0][mine], batch[1][mine]
        with autocast(self._run, self._context):
            logits = forward(images)
        loss = functional.cross_entropy(logits.float(), labels, label_smoothing=self._run.label_smoothing)
        if teacher is not None:
            loss = teacher(loss, logits, images)
        # In training, every batch is full.
        weight = self._context.weight_of(self._run.batch_size)
        right = (logits.detach().argmax(dim=1) == labels).sum() * (weight / len(labels))
        return loss * weight if self._context.world > 1 else loss, right

    def carry(self) -> None:
        pass  # images are independent of each other

    def begin_epoch(self) -> None:
        pass

    def evaluate(self, model: nn.Module, part: str, tell: Tell) -> float:
        counts = torch.zeros(2, dtype=torch.int64, device=self._context.device)  # correct answers, and all
        with _evaluating(model), autocast(self._run, self._context):
            for images, labels in _with_progress(self._parts[part], tell):
                mine = self._mine(len(labels))
                images, labels = images[mine], labels[mine]
                if not len(labels):  # the last batch has fewer images than there are processes
                    model(self.example())  # still run, as all processes gather sharded parameters together
                    continue
                counts[0] += (model(images).argmax(dim=1) == labels).sum()
                counts[1] += len(labels)
        right, seen = self._context.total(counts).tolist()
        return float(right / seen)

    def state(self) -> dict[str, Any]:
        return {} if self._digest is None else {"images": self._digest}

    def load_state(self, state: dict[str, Any]) -> None:
        if state.get("images", self._digest) != self._digest:
            raise ValueError(
                "expected the image folder that this run began with, got one with other images or classes: set "
                "data_root= to that one, undo the changes in it, or start over in another folder (--out)"
            )


def _of_images(run: Run, context: DistributedContext, dataset: ImageSet) -> tuple[Source, dict[str, Source]]:
    dataset = dataset.split(run.validation) if run.validation else dataset
    if not run.augment:
        dataset = replace(dataset, padding=0, flip=False)
    dataset = dataset.to(context.device)
    named = {"test": dataset.test, "validation": dataset.validation}
    return Batches.training(dataset, run.batch_size, seed=run.seed, channels_last=bool(run.channels_last)), {
        name: Batches.evaluation(dataset, part, _EVALUATION_BATCH, channels_last=bool(run.channels_last))
        for name, part in named.items()
        if part is not None
    }


def _of_sentences(run: Run, context: DistributedContext, dataset: SentenceSet) -> tuple[Source, dict[str, Source]]:
    batches = partial(SentenceBatches, device=context.device)
    named = {"test": dataset.test, "validation": dataset.validation}
    return batches(dataset.train, run.batch_size, training=True, seed=run.seed), {
        name: batches(part, _EVALUATION_BATCH, training=False) for name, part in named.items()
    }


def _of_folder(run: Run, context: DistributedContext, dataset: FolderSet) -> tuple[Source, dict[str, Source]]:
    """The `val` part of such a folder is the test set, because ImageNet does not publish the labels of its test set."""
    dataset = dataset.split(run.validation) if run.validation else dataset
    size = run.image_size
    common: dict[str, Any] = {
        "size": size,
        "resize": size * 256 // 224,
        "workers": run.workers,
        "device": context.device,
        "channels_last": bool(run.channels_last),
        "slice_of": context.slice_of,
    }
    training = FolderBatches(dataset, dataset.train, run.batch_size, training=True, seed=run.seed, **common)
    named = {"test": dataset.validation, "validation": dataset.held_out}
    return training, {
        name: FolderBatches(dataset, part, run.batch_size, training=False, **common)
        for name, part in named.items()
        if part is not None
    }


class TextTask:
    """Next-word prediction, by truncated back-propagation through time."""

    metric = "perplexity"
    has_validation = True
    streamed = False

    def __init__(self, run: Run, context: DistributedContext, dataset: TextSet) -> None:
        self._run, self._context, self._dataset = run, context, dataset
        self.num_classes = len(dataset.vocabulary)
        self.source: Source = TextBatches(dataset.train, run.batch_size, length=run.bptt, device=context.device)
        self._hidden = RNNState(context.device)

    def example(self) -> Tensor:
        return torch.zeros(1, 2, dtype=torch.int64, device=self._context.device)

    def requirements(self) -> TeacherRequirements:
        return TeacherRequirements(self.example(), self.num_classes, RNNState(self._context.device))

    def loss(
        self, forward: Callable[..., Any], batch: tuple[Tensor, Tensor], teacher: Teacher | None = None
    ) -> Outcome:
        count = batch[0].shape[1]
        tokens, following = (part[:, self._context.slice_of(count)] for part in batch)
        with autocast(self._run, self._context):
            logits, hidden = forward(tokens, self._hidden.value)
        self._hidden.note(hidden)
        loss = functional.cross_entropy(
            logits.float().flatten(0, 1), following.flatten(), label_smoothing=self._run.label_smoothing
        )
        if teacher is not None:
            loss = teacher(loss, logits, tokens)
        return loss * self._context.weight_of(count) if self._context.world > 1 else loss, None

    def carry(self) -> None:
        self._hidden.carry()

    def begin_epoch(self) -> None:
        self._hidden.clear()

    def evaluate(self, model: nn.Module, part: str, tell: Tell) -> float:
        stream = self._dataset.test if part == "test" else self._dataset.validation
        windows = TextBatches(stream, _EVALUATION_COLUMNS, length=self._run.bptt, device=self._context.device)
        total = torch.zeros((), dtype=torch.float64, device=self._context.device)
        words, hidden = 0, None
        with _evaluating(model), autocast(self._run, self._context):
            for tokens, following in _with_progress(windows, tell):
                logits, hidden = model(tokens, hidden)
                total += functional.cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="sum")
                words += following.numel()
        return perplexity(float(total) / words)

    def state(self) -> dict[str, Any]:
        return {"hidden": self._hidden.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._hidden.load(state["hidden"])


def _with_progress(source: Source, tell: Tell) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an evaluation, reporting progress before each."""
    tell(0, len(source))  # before the first one, as workers take time to start
    for done, batch in enumerate(source):
        if done:
            tell(done, len(source))
        yield batch


def perplexity(loss: float) -> float:
    """The perplexity of a mean loss, bounded to avoid an overflow."""
    return math.exp(min(loss, 700.0))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
