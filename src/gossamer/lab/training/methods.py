"""The methods that a run can name, all driven through the steps of the optimizer."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer import methods
from gossamer.lab.training.optimise import learning_rate
from gossamer.lab.training.run import Run
from gossamer.methods.attach import Attached
from gossamer.methods.lottery import rewound
from gossamer.schedule import Phase, Plan
from gossamer.sparsifier import Sparsifier


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


def _peer(
    run: Run, model: nn.Module, optimizer: Optimizer, total: int, per_epoch: int, example: Tensor
) -> SparseTraining:
    if run.sparsity is None or run.leave_at is not None:
        raise ValueError(
            f"method={run.method}: expected sparsity= alone; only method=scl knows flops=, decay=, leave_at="
        )

    def shared(plan: Plan, step: int) -> float:
        return learning_rate(run, plan, step, total_steps=total, steps_per_epoch=per_epoch)

    def again(plan: Plan, step: int) -> float:
        return rewound(plan, step, shared=lambda at: shared(plan, at), peak=run.lr)

    return Attached(
        model,
        optimizer,
        run.method,
        sparsity=run.sparsity,
        total_steps=total,
        steps_per_epoch=per_epoch,
        phases=run.mask_settings,
        settings=run.method_settings,
        seed=run.seed,
        include=run.include or None,
        exclude=run.exclude or None,
        rate=again if methods.find(run.method).rewinds else None,
    )


METHODS: Mapping[str, Builder] = MappingProxyType(
    {name: {"dense": _dense, "scl": _scl}.get(name, _peer) for name in methods.METHODS}
)


def method_of(run: Run) -> Builder:
    return METHODS[methods.find(run.method).name]
