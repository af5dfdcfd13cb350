"""The complete state of a run: collected into one checkpoint, and restored.

State that is equal in all processes is written once. State that differs (random numbers, the hidden state of a language
model, and all sharded parameters) is written per process, so such a run resumes with the same number of processes.
"""

import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gossamer.lab.checkpoint import Checkpoints, random_states, reshard, set_random_states, unshard
from gossamer.lab.data import Position
from gossamer.lab.training.distributed import DistributedContext
from gossamer.lab.training.optimise import Plateau, load_optimizer_state
from gossamer.lab.training.run import Run
from gossamer.lab.training.task import Task
from gossamer.lab.training.teacher import Teacher
from gossamer.provenance import cpu_name
from gossamer.sparsifier import Sparsifier

_FORMAT = 1


@dataclass(eq=False)
class Parts:
    """Everything that changes while a run is trained."""

    model: nn.Module
    optimizer: Optimizer
    sparsifier: Sparsifier | None
    task: Task
    teacher: Teacher | None = None
    plateau: Plateau = field(default_factory=Plateau)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sparsifier": None if self.sparsifier is None else self.sparsifier.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        if self.sparsifier is not None:
            self.sparsifier.load_state_dict(state["sparsifier"])

    def mesh(self) -> DeviceMesh | None:
        """The device mesh over which the parameters are sharded, or None."""
        sharded = (each.device_mesh for each in self.model.parameters() if isinstance(each, DTensor))
        return next(sharded, None)


def save(
    checkpoints: Checkpoints, run: Run, context: DistributedContext, parts: Parts, *, step: int, seconds: float
) -> bool:
    """Write a checkpoint; all processes have to take part. Returns False if it could not be written."""
    own: dict[str, Any] = {"random": random_states(context.device), "task": unshard(parts.task.state())}
    alike: dict[str, Any] = {}
    if parts.teacher is not None:
        own["teacher"], alike["teacher"] = unshard(parts.teacher.own_state()), parts.teacher.state()
    if parts.mesh() is not None:
        own |= unshard(parts.state())
    elif context.leads:
        alike |= parts.state()
    ranks = context.gather(own)
    written = True
    if context.leads:
        header = {"format": _FORMAT, "run": run.to_dict(), "step": step, "seconds": seconds, "machine": _machine()}
        header["plateau"] = asdict(parts.plateau)
        position = asdict(parts.task.source.state)
        written = checkpoints.save({**header, "position": position, **alike, "ranks": ranks}, step)
    return bool(context.broadcast(written))


def restore(checkpoints: Checkpoints, run: Run, context: DistributedContext, parts: Parts) -> float:
    """Resume from the newest intact checkpoint, if there is one. Returns the seconds trained so far."""
    state = context.broadcast(checkpoints.load() if context.leads else None)
    if state is None:
        return 0.0
    if state.get("format") != _FORMAT:
        raise ValueError(
            f"expected a checkpoint in format {_FORMAT}, got {state.get('format')!r}: "
            "resume with the version of gossamer that began this run"
        )
    try:
        return _restore(checkpoints, run, context, parts, state)
    except (LookupError, TypeError, AttributeError, RuntimeError, AssertionError, ArithmeticError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"expected a checkpoint of this run in {checkpoints.folder}, got an incomplete one, though it agrees "
            f"with its SHA-256 ({reason:.200}): delete it to resume from the previous one, or resume with the version "
            "of gossamer that wrote it"
        ) from error


def _restore(
    checkpoints: Checkpoints, run: Run, context: DistributedContext, parts: Parts, state: dict[str, Any]
) -> float:
    other = Run.from_dict(state["run"])
    if other.run_id != run.run_id:
        raise ValueError(
            f"the checkpoint in {checkpoints.folder} is from another run, which differs in "
            f"{', '.join(run.differences_from(other))}: choose another folder"
        )
    if len(state["ranks"]) != context.world:
        raise ValueError(
            f"expected {len(state['ranks'])} processes, as at the start of the run, got {context.world}: start the "
            "same number"
        )
    own = state["ranks"][context.rank]
    parts.task.load_state(own["task"])  # first: a network for other data cannot load the weights
    parts.load(reshard(own, parts.mesh()) if "model" in own else state)
    if parts.teacher is not None:
        parts.teacher.load_state(state["teacher"], own["teacher"])
    parts.task.source.state = Position(**state["position"])
    parts.plateau = Plateau(**state["plateau"])
    if not all(
        isinstance(value, int | float | None) for value in (*state["position"].values(), *state["plateau"].values())
    ):
        raise TypeError("position and plateau are not numbers")
    set_random_states(own["random"], context.device)
    if context.leads and context.device.type == "cpu":
        _warn_of_another_machine(state.get("machine"))
    return float(state["seconds"])


def _machine() -> dict[str, int | str]:
    """What decides, on a CPU, in which order numbers are added up, and so the last bits of a result."""
    return {"threads": torch.get_num_threads(), "processor": cpu_name()}


def _warn_of_another_machine(before: Any) -> None:
    now = _machine()
    if not isinstance(before, dict) or before.keys() != now.keys():  # a checkpoint of an earlier version
        return
    changes = [
        f"{name} {value} instead of {before[name]!s:.80}" for name, value in now.items() if before[name] != value
    ]
    if changes:
        warnings.warn(
            f"this run resumes with {', '.join(changes)}: sums are added up in another order, so its last bits will "
            "differ from those of an uninterrupted run",
            stacklevel=2,
        )
