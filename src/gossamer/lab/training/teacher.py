"""Teachers: frozen networks from whose outputs a student learns (gossamer.distillation has the loss).

`teacher=trunk` is a copy of the network at the end of the warm-up, which teaches from then on. With schedule=restart
its learning rate has fallen to zero by then, so it is a finished dense network. Any other `teacher` is the folder of a
finished run or a file with a network, which teaches from the first step on.

A teacher gets the same augmented batches as its student, in evaluation mode: without dropout, and with outputs that do
not depend on how processes share a batch. Every process has a full copy of it, even if the parameters of the student
are sharded. A language model used as a teacher has its own hidden state.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.distillation import distil
from gossamer.lab import model_files
from gossamer.lab.training import networks
from gossamer.lab.training.checks import TRUNK
from gossamer.lab.training.distributed import DistributedContext, autocast, compiled, whole_state
from gossamer.lab.training.rnn_state import RNNState
from gossamer.lab.training.run import Run
from gossamer.schedule import Plan


@dataclass(frozen=True)
class TeacherRequirements:
    """The requirements of a task on a teacher."""

    example: Tensor
    num_classes: int
    hidden: RNNState | None  # if outputs come with a hidden state, a fresh one


class Teacher:
    """Calling it adds the distillation term to a loss."""

    def __init__(self, run: Run, context: DistributedContext, requirements: TeacherRequirements, warmup: int) -> None:
        """`run` has to be resolved; `warmup` is the number of steps after which the trunk is ready."""
        self._run, self._context, self._classes, self._hidden = (
            run,
            context,
            requirements.num_classes,
            requirements.hidden,
        )
        self._ready_at = warmup
        self._forward: Callable[..., Any] | None = None
        self._network: nn.Module | None = None
        self._description: dict[str, Any] = {"from": run.teacher, "network": run.model}
        if run.teacher == TRUNK:
            if warmup < 1:
                raise ValueError(
                    f"teacher={TRUNK}: expected a warm-up in which the trunk learns, got one of no steps: raise "
                    "settings.warmup, train longer, or set teacher= to a file"
                )
            self._description["steps"] = warmup
        else:
            found, self._description["sha256"] = context.main_process_first(lambda: _opened(run))
            self._description["network"] = found.name
            self._take(found.model)
            _check(found, self._network, requirements, run)

    @property
    def teaches(self) -> bool:
        """Whether the teacher exists yet."""
        return self._network is not None

    def before(self, step: int, model: nn.Module) -> None:
        """Freeze the trunk at the end of the warm-up; all processes have to take part."""
        if self._network is None and step == self._ready_at:
            self._build_trunk(whole_state(model))

    def __call__(self, loss: Tensor, logits: Tensor, inputs: Tensor) -> Tensor:
        """The loss of the student on the labels and on the teacher; `logits` are those of the student for `inputs`."""
        if self._forward is None:
            return loss
        with torch.no_grad(), autocast(self._run, self._context):
            if self._hidden is None:
                answer = self._forward(inputs)
            else:
                answer, hidden = self._forward(inputs, self._hidden.value)
                self._hidden.note(hidden)
        return distil(loss, logits, answer, share=self._run.distil, temperature=self._run.temperature)

    def carry(self) -> None:
        """After the backward pass of a batch, as `Task.carry`."""
        if self._hidden is not None and self._network is not None:
            self._hidden.carry()

    def begin_epoch(self) -> None:
        if self._hidden is not None:
            self._hidden.clear()

    def description(self) -> dict[str, Any]:
        """The teacher, for the result of the run."""
        return dict(self._description)

    # --- checkpoints ---

    def state(self) -> dict[str, Any]:
        """The state shared by all processes: the trunk, if it exists; for a file only its digest."""
        trunk = self._network if self._run.teacher == TRUNK else None
        return {"trunk": None if trunk is None else trunk.state_dict(), "sha256": self._description.get("sha256")}

    def own_state(self) -> list[Tensor] | None:
        """The state of each process: the hidden state of its slice."""
        return None if self._hidden is None else self._hidden.state()

    def load_state(self, state: Mapping[str, Any], own: list[Tensor] | None) -> None:
        digest = self._description.get("sha256")
        if state["sha256"] != digest:
            raise ValueError(
                f"expected the teacher with which the run began in {self._run.teacher} (SHA-256 "
                f"{str(state['sha256'])[:12]}…), got another file ({str(digest)[:12]}…): put the old one back, or "
                "start over in another folder"
            )
        if state["trunk"] is not None:
            self._build_trunk(state["trunk"])
        if self._hidden is not None:
            self._hidden.load(own)

    # --- the network ---

    def _build_trunk(self, tensors: Mapping[str, Tensor]) -> None:
        """A new network with these tensors, because a copy of the student would include the hooks of methods."""
        with torch.random.fork_rng(
            devices=[]
        ):  # its initial random weights are overwritten, and must not advance the generator
            network = networks.create(self._run, self._classes)
        network.load_state_dict(tensors)
        self._take(network)

    def _take(self, network: nn.Module) -> None:
        self._network = networks.to_layout(network, self._run, self._context.device).eval().requires_grad_(False)
        self._forward = compiled(self._network, self._context) if self._run.compile else self._network


def make_teacher(
    run: Run, context: DistributedContext, requirements: TeacherRequirements, plan: Plan | None
) -> Teacher | None:
    """The teacher of a run; None if it learns from the labels alone."""
    return Teacher(run, context, requirements, plan.warmup if plan is not None else 0) if run.distil else None


def _opened(run: Run) -> tuple[model_files.StoredModel, str]:
    """The network in a folder or file, and the digest of that file."""
    path = Path(run.teacher).expanduser()
    if path.is_dir() and not (path / model_files.MODEL).is_file():
        raise FileNotFoundError(
            f"teacher={run.teacher}: expected a folder with a {model_files.MODEL}, as a finished run leaves it, got "
            "one without: train it to the end first"
        )
    file = path / model_files.MODEL if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"teacher={run.teacher}: expected {TRUNK!r}, the folder of a finished run or a safetensors file, got a "
            "path that does not exist"
        )
    with torch.random.fork_rng(devices=[]):
        found = model_files.open_network(file, otherwise=(run.model, run.model_options))
    with file.open("rb") as content:
        return found, hashlib.file_digest(content, "sha256").hexdigest()


def _check(
    found: model_files.StoredModel, network: nn.Module | None, requirements: TeacherRequirements, run: Run
) -> None:
    """Refuse a teacher whose outputs do not have the shape of its student's."""
    assert network is not None
    expected = f"expected a teacher that gives {requirements.num_classes} logits for batches of {run.data}"
    try:
        with torch.no_grad():
            out = network(requirements.example)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(
            f"{expected}, got {found.name} from {run.teacher}, which does not take them ({first_line}): choose one "
            "that was trained on this data"
        ) from error
    logits = out[0] if isinstance(out, tuple) else out
    if isinstance(out, tuple) != (requirements.hidden is not None) or logits.shape[-1] != requirements.num_classes:
        raise ValueError(
            f"{expected}, got {found.name} from {run.teacher} with answers of shape {tuple(logits.shape)}: choose one "
            "that was trained on this data"
        )
