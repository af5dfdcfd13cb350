"""The Sparsifier of a run."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.lab.training.optimise import learning_rate
from gossamer.lab.training.run import Run
from gossamer.methods import find
from gossamer.methods.lottery import rewound
from gossamer.patterns import parse_option
from gossamer.schedule import Plan
from gossamer.sparsifier import Sparsifier


def make_sparsifier(
    run: Run, model: nn.Module, optimizer: Optimizer, *, total_steps: int, steps_per_epoch: int, example: Tensor
) -> Sparsifier | None:
    """The Sparsifier of a run; None for a dense run."""
    if run.method == "dense":
        return None

    def shared(plan: Plan, step: int) -> float:
        return learning_rate(run, plan, step, total_steps=total_steps, steps_per_epoch=steps_per_epoch)

    def again(plan: Plan, step: int) -> float:
        return rewound(plan, step, shared=lambda at: shared(plan, at), peak=run.lr)

    settings: dict[str, Any] = dict(run.settings)
    return Sparsifier(
        model,
        optimizer,
        method=run.method,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        sparsity=run.sparsity,
        flops=run.flops,
        decay=run.decay,
        leave_at=run.leave_at,
        pattern=None if run.pattern is None else parse_option(run.pattern),
        preset=run.preset,
        seed=run.seed,
        include=run.include or None,
        exclude=run.exclude or None,
        example_input=example if run.flops is not None else None,
        learning_rate=again if find(run.method).rewinds else None,
        **settings,
    )
