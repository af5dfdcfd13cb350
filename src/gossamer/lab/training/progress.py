"""Progress of a run: a live line, a log of JSON lines, and TensorBoard if it is installed.

Without a terminal, plain lines replace the live one. The loop passes a frozen `Status` to every observer and does not
know how it is shown.
"""

import importlib.util
import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from gossamer.lab.checkpoint import write_atomically


@dataclass(frozen=True)
class Status:
    """Progress of a run. What is unknown at this moment is None."""

    step: int  # steps done
    total_steps: int
    epoch: float  # epochs done
    epochs: int
    phase: str
    lr: float
    seconds: float  # of training, over all sessions
    loss: float | None = None  # mean since the last status
    metric: str = "accuracy"
    train: float | None = None  # the metric on the training batches since the last status, each at its own step
    validation: float | None = None  # the metric on the validation set
    sparsity: float | None = None
    decay: float | None = None  # λ1, given or solved for


class Observer(Protocol):
    """Receives training events."""

    def begin(self, status: Status) -> None: ...

    def tell(self, status: Status) -> None: ...

    def move(self, step: int, seconds: float, doing: str | None = None) -> None:
        """Called about once a second between two statuses, with what is known without synchronizing with the device.
        `doing` describes what the run does if it is not training."""
        ...

    def close(self) -> None: ...


class Observers:
    """Several observers as one; always closes all of them.

    A full disk or a closed terminal does not stop a run: there is a warning, and training goes on.
    """

    def __init__(self, observers: Sequence[Observer], *, every: float = 1.0) -> None:
        """`every` is the least time between two calls of `move`, in seconds."""
        self._observers, self._every = observers, every
        self._warned: set[int] = set()
        self._last = -math.inf

    def begin(self, status: Status) -> None:
        for observer in self._observers:
            self._try(observer, lambda each: each.begin(status))

    def tell(self, status: Status) -> None:
        for observer in self._observers:
            self._try(observer, lambda each: each.tell(status))
        self._last = time.monotonic()

    def move(self, step: int, seconds: float, doing: str | None = None, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - self._last < self._every:
            return
        for observer in self._observers:
            self._try(observer, lambda each: each.move(step, seconds, doing))
        self._last = time.monotonic()

    def _try(self, observer: Observer, action: Callable[[Observer], None]) -> None:
        try:
            action(observer)
        except OSError as error:
            if id(observer) not in self._warned:
                self._warned.add(id(observer))
                warnings.warn(
                    f"{_name_of(observer)} could not be written ({error}); training goes on, and lines may be missing",
                    stacklevel=3,
                )

    def __enter__(self) -> "Observers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for observer in self._observers:
            self._try(observer, lambda each: each.close())


class JsonLines:
    """One JSON object per status, in log.jsonl. A resumed run drops the lines of steps that it will repeat."""

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder) / "log.jsonl"

    def begin(self, status: Status) -> None:
        lines = self.path.read_text("utf-8", errors="replace").splitlines() if self.path.is_file() else []
        kept = [line for line in lines if _step_of(line) <= status.step] if status.step else []
        text = "".join(f"{line}\n" for line in kept)
        write_atomically(self.path, lambda file: file.write(text.encode()))

    def tell(self, status: Status) -> None:
        values = {name: value for name, value in asdict(status).items() if value is not None}
        with open(self.path, "a") as file:
            file.write(json.dumps(values) + "\n")

    def move(self, step: int, seconds: float, doing: str | None = None) -> None:
        pass  # the log has only the requested steps

    def close(self) -> None:
        pass  # the file is opened for each line, so that a kill loses none


def _name_of(observer: Observer) -> str:
    return str(getattr(observer, "path", f"the output of {type(observer).__name__}"))


def _step_of(line: str) -> float:
    """The step of a line; infinite for a line that a kill left incomplete."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


class TensorBoard:
    """Scalars for TensorBoard, in the folder tensorboard."""

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder) / "tensorboard"
        self._writer: Any = None
        self._hook = threading.excepthook

    @staticmethod
    def is_installed() -> bool:
        return importlib.util.find_spec("tensorboard") is not None

    def begin(self, status: Status) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._hook, threading.excepthook = threading.excepthook, self._filter
        # Steps after this one that an earlier session logged are repeated, and hidden.
        self._writer = SummaryWriter(str(self.path), purge_step=status.step + 1 if status.step else None)

    def _filter(self, arguments: threading.ExceptHookArgs) -> None:
        """Ignore errors in the writer thread: the next scalar raises them again."""
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            self._hook(arguments)

    def tell(self, status: Status) -> None:
        named = {f"validation {status.metric}": status.validation, f"training {status.metric}": status.train}
        named |= {
            "loss": status.loss,
            "learning rate": status.lr,
            "sparsity": status.sparsity,
            "connectivity decay": status.decay,
        }
        for name, value in named.items():
            if value is not None and self._writer is not None:
                self._writer.add_scalar(name, value, status.step)

    def move(self, step: int, seconds: float, doing: str | None = None) -> None:
        pass  # as for the log

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            if threading.excepthook == self._filter:
                threading.excepthook = self._hook


class LiveLine:
    """One line on the terminal, updated in place; on a narrow terminal the bar and the title shrink."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._progress = Progress(
            TextColumn("{task.description}", "bold", markup=False, table_column=Column(overflow="ellipsis")),
            BarColumn(bar_width=10),
            _Facts(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
            console=console or Console(stderr=True),
        )
        self._task = self._progress.add_task(title, total=None, facts="")
        self._validation: float | None = None
        self._status: Status | None = None

    def begin(self, status: Status) -> None:
        self._progress.start()
        self.tell(status)

    def tell(self, status: Status) -> None:
        if status.validation is not None:
            self._validation = status.validation
        self._status = status
        self._show(status)

    def move(self, step: int, seconds: float, doing: str | None = None) -> None:
        if self._status is not None:
            self._show(moved(self._status, step, seconds), doing)

    def _show(self, status: Status, doing: str | None = None) -> None:
        self._progress.update(
            self._task,
            total=status.total_steps,
            completed=status.step,
            facts=facts(status, self._validation, doing),
        )

    def close(self) -> None:
        self._progress.stop()


class PlainLines:
    """Progress without a terminal, as in the log of a batch job: a plain line at intervals."""

    def __init__(self, title: str, console: Console | None = None, *, every: float = 30.0) -> None:
        """Prints a line `every` this many seconds, and at the end."""
        self._title, self._every = title, every
        self._console = console or Console(stderr=True)
        self._last = -math.inf
        self._validation: float | None = None
        self._status: Status | None = None

    def begin(self, status: Status) -> None:
        self.tell(status)

    def tell(self, status: Status) -> None:
        if status.validation is not None:
            self._validation = status.validation
        self._status = status
        if self._is_time() or status.step == status.total_steps:
            self._say(status)

    def move(self, step: int, seconds: float, doing: str | None = None) -> None:
        if self._status is not None and self._is_time():
            self._say(moved(self._status, step, seconds), doing)

    def _is_time(self) -> bool:
        return time.monotonic() - self._last >= self._every

    def _say(self, status: Status, doing: str | None = None) -> None:
        self._last = time.monotonic()
        seconds_left = status.seconds * (status.total_steps - status.step) / status.step if status.step else None
        remaining = "" if not seconds_left else f" · {timedelta(seconds=round(seconds_left))} left"
        line = f"{self._title}: {facts(status, self._validation, doing)}{remaining}"
        self._console.file.write(f"{line}\n")  # rich would exit the program on a broken pipe
        self._console.file.flush()

    def close(self) -> None:
        pass  # every line is complete


class _Facts(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields["facts"]), no_wrap=True)


def moved(status: Status, step: int, seconds: float) -> Status:
    """The status some steps later, with the last known metrics."""
    return replace(status, step=step, epoch=status.epochs * step / status.total_steps, seconds=seconds)


def facts(status: Status, validation: float | None, doing: str | None = None) -> str:
    """A short description of the status."""
    parts = [f"{min(int(status.epoch) + 1, status.epochs)}/{status.epochs} {status.phase}"]
    if doing is not None:
        return f"{parts[0]} · {doing}"
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if validation is not None:
        parts.append(f"{validation:.2%}" if status.metric == "accuracy" else f"ppl {validation:.2f}")
    elif status.train is not None:  # without a validation set
        parts.append(
            f"train acc {status.train:.1%}" if status.metric == "accuracy" else f"train ppl {status.train:.2f}"
        )
    if status.sparsity is not None:
        parts.append(f"sparse {status.sparsity:.1%}")
    if status.decay is not None:
        parts.append(f"λ1 {status.decay:.2g}")
    return " · ".join(parts)
