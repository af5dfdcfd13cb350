"""The methods that a run can name, all driven through the steps of the optimizer."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.schedule import Phase, Plan
from gossamer.sparsifier import Sparsifier
from gossamer.training.run import Run


class SparseTraining(Protocol):
    """What the loop asks of a method; `gossamer.Sparsifier` is one."""

    @property
    def plan(self) -> Plan: ...

    @property
    def phase(self) -> Phase: ...

    @property
    def sparsity(self) -> float: ...

    def finish(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


# (run, model, optimizer, total steps, steps an epoch, example input) -> method
Builder = Callable[[Run, nn.Module, Optimizer, int, int, Tensor], SparseTraining | None]


def _dense(run: Run, model: nn.Module, optimizer: Optimizer, total: int, per_epoch: int, example: Tensor) -> None:
    return None


def _scl(
    run: Run, model: nn.Module, optimizer: Optimizer, total: int, per_epoch: int, example: Tensor
) -> SparseTraining:
    return Sparsifier(
        model,
        optimizer,
        total_steps=total,
        steps_per_epoch=per_epoch,
        sparsity=run.sparsity,
        flops=run.flops,
        decay=run.decay,
        leave_at=run.leave_at,
        preset=run.preset,
        include=run.include or None,
        exclude=run.exclude or None,
        example_input=example if run.flops is not None else None,
        **dict[str, Any](run.settings),
    )


METHODS: Mapping[str, Builder] = MappingProxyType({"dense": _dense, "scl": _scl})


def method_of(run: Run) -> Builder:
    if run.method in METHODS:
        return METHODS[run.method]
    near = difflib.get_close_matches(run.method, [*METHODS], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the methods are {', '.join(METHODS)}"
    raise ValueError(f"unknown method {run.method!r}: {hint}")
