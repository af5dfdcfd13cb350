"""The optimizer of a run, and its learning rate as a pure function of the step.

The factor depends only on the step, so there is no scheduler state to save: resuming sets the step.

    constant        1
    cosine          from 1 to 0 over the run, step by step
    steps           times lr_factor at each of lr_drops
    phases          the paper: times lr_factor when the sparsify phase ends, again half-way through fine-tuning
    phases_cosine   a cosine from 1 to lr_factor over the mask phases, then times lr_factor half-way through fine-tuning
    restart         a cosine from 1 to 0 over the warm-up, so that it ends with a finished dense network, and another
                    one over the rest of the run, from the rate lr_restart to 0
    plateau         times lr_factor after each evaluation on the validation set without an improvement, except in the
                    sparsify phase, in which pruning makes a network worse

Only the last one depends on the past; `Plateau` is its state.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from gossamer.lab.training.durations import PHASES
from gossamer.lab.training.run import Run
from gossamer.schedule import Plan, cosine, make_plan, sparse_weight_decay, steps_of

PHASED = ("phases", "phases_cosine", "restart")  # schedules that follow the phases of the masks
_OF_THE_DEVICE = ("lr", "fused", "foreach", "capturable")  # the learning rate changes in every step
_LEAST_GAIN = 1e-4  # relative; anything smaller is no improvement


def make_optimizer(run: Run, model: nn.Module) -> Optimizer:
    """The optimizer; on a GPU a fused one, which reads the learning rate from the device, as a captured step must.

    Sharded parameters have no fused SGD and use a plain number. `run` has to be resolved.
    """
    parameters = list(model.parameters())
    fused = all(each.is_cuda and not isinstance(each, DTensor) for each in parameters)
    captured = fused and bool(run.capture)
    lr = torch.tensor(run.lr, device=parameters[0].device) if fused else run.lr
    if run.optimizer in ("adam", "adamw"):
        kind = Adam if run.optimizer == "adam" else AdamW
        return kind(parameters, lr=lr, weight_decay=run.weight_decay, fused=fused or None, capturable=captured)
    return SGD(
        parameters,
        lr=lr,
        momentum=run.momentum,
        nesterov=run.nesterov,
        weight_decay=run.weight_decay,
        fused=fused or None,
    )


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)  # in place, where a captured step reads it
        else:
            group["lr"] = value


def weight_decay(run: Run, plan: Plan | None, step: int) -> float:
    """The weight decay of a step."""
    if plan is None or step < plan.warmup:
        return run.weight_decay
    left = 1.0 if run.sparsity is None else 1.0 - run.sparsity
    left = left if run.flops is None else run.flops
    return sparse_weight_decay(run.weight_decay, density=left, power=run.weight_decay_power)


def set_weight_decay(optimizer: Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = value


def taken_learning_rate(optimizer: Optimizer, given: float) -> float:
    """The learning rate of the step: the given one, unless the method has its own."""
    taken = optimizer.param_groups[0]["lr"]
    return given if isinstance(taken, Tensor) else float(taken)


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state that may come from another device, and keep the implementation flags of this optimizer.

    A state that does not fit is a `TypeError`, before anything changes: torch would accept it and fail in a later step.
    """
    _check_optimizer_state(optimizer, state)
    groups = [
        {**saved, **{name: own[name] for name in _OF_THE_DEVICE if name in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})


def _check_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        for name, value in own.items():
            if name not in ("params", *_OF_THE_DEVICE) and not _is_like(saved[name], value):
                raise TypeError(f"the optimizer's {name} is {saved[name]!r:.40}, not like {value!r:.40}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        for name, value in values.items():
            fits = value is None or _is_like(value, 0.0)
            if not fits and not (isinstance(value, Tensor) and value.shape == parameters[index].shape):
                raise TypeError(f"the optimizer's {name} of parameter {index} does not have its shape")


def _is_like(value: object, own: object) -> bool:
    """Whether a setting may stand for that of this optimizer: a number or a tensor with one for another."""
    if isinstance(own, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(own) and all(map(_is_like, value, own))
    if isinstance(own, int | float | Tensor):
        return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return value is None or value == own


def learning_rate(run: Run, plan: Plan | None, step: int, *, total_steps: int, steps_per_epoch: int) -> float:
    """The learning rate of step `step`, counted from 0. Schedules that follow the phases need their `plan`."""

    def steps(duration: str) -> int:
        return steps_of(duration, total_steps=total_steps, steps_per_epoch=steps_per_epoch)

    rising = steps(run.lr_warmup)
    rise = (step + 1) / (rising + 1) if step < rising else 1.0
    return run.lr * rise * _factor(run, plan, step, total_steps, steps)


def out_of_reach(run: Run, total_steps: int, steps_per_epoch: int) -> list[str]:
    """Changes of the learning rate that would come after the end of the run, in words."""

    def steps(duration: str) -> int:
        return steps_of(duration, total_steps=total_steps, steps_per_epoch=steps_per_epoch)

    problems = [
        f"lr_drops={each} comes after the end of the run, of {total_steps} steps, so the learning rate does not fall "
        "then: set it as a fraction of the run, such as 0.5run"
        for each in run.lr_drops
        if steps(each) >= total_steps
    ]
    if steps(run.lr_warmup) >= total_steps:
        problems.append(
            f"lr_warmup={run.lr_warmup} takes the whole run, of {total_steps} steps, so the learning rate never "
            f"reaches lr={run.lr:g}: shorten it"
        )
    return problems


def plan_without_masks(run: Run, total_steps: int, steps_per_epoch: int, *, leads: bool = True) -> Plan | None:
    """The phases of a sparse run of this length, for a dense run with the same learning rates.

    A dense run has no masks, so phases that do not fit are no error: the run ends within them, and the process that
    `leads` warns.
    """
    if run.schedule not in PHASED:
        return None
    durations = {name: getattr(run.phases, name) for name in PHASES}
    try:
        return make_plan(total_steps, steps_per_epoch=steps_per_epoch, **durations)
    except ValueError:  # the durations are valid, so they are too long, or the mask phases have no step
        warmup, sparsify, stabilise = (
            steps_of(each, total_steps=total_steps, steps_per_epoch=steps_per_epoch) for each in durations.values()
        )
    plan = Plan(warmup, max(1, sparsify), stabilise, finetune=0)
    if plan.total > total_steps and leads:
        named = ", ".join(f"settings.{name}={duration}" for name, duration in durations.items())
        warnings.warn(
            f"schedule={run.schedule}: the learning rate follows the phases {named}, which take {plan.total} steps, "
            f"and the run ends after {total_steps}, before it has fallen: set them as fractions of the run, such as "
            "0.3run, or set schedule=cosine",
            stacklevel=2,
        )
    return replace(plan, finetune=max(0, total_steps - plan.total))


def _factor(run: Run, plan: Plan | None, step: int, total_steps: int, steps: Callable[[str], int]) -> float:
    if run.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * step / total_steps))
    if run.schedule == "steps":
        drops = sum(step >= steps(duration) for duration in run.lr_drops)
        return float(run.lr_factor**drops)
    if run.schedule in ("constant", "plateau"):
        return 1.0
    if plan is None:
        raise ValueError(f"schedule={run.schedule} follows the phases of the masks, but got no plan")
    if run.schedule == "restart":
        if step < plan.warmup:
            return cosine(step / plan.warmup)
        again = 1.0 if run.lr_restart is None else run.lr_restart / run.lr
        return again * cosine((step - plan.warmup) / (total_steps - plan.warmup))
    masks_end = plan.warmup + plan.sparsify + plan.stabilise
    if step >= masks_end:
        second_half = step >= masks_end + plan.finetune // 2
        return run.lr_factor**2 if second_half else run.lr_factor
    if run.schedule == "phases":
        return run.lr_factor if step >= plan.warmup + plan.sparsify else 1.0
    settled = max(0, step - plan.warmup) / (plan.sparsify + plan.stabilise)
    return run.lr_factor + (1.0 - run.lr_factor) * 0.5 * (1.0 + math.cos(math.pi * settled))


@dataclass(frozen=True)
class Plateau:
    """A factor that falls when a metric stops improving."""

    factor: float = 1.0
    best: float | None = None  # as a loss: lower is better

    def see(self, run: Run, metric: str, value: float, *, shrinking: bool = False) -> "Plateau":
        """The state after an evaluation on the validation set.

        While weights are pruned (`shrinking`), a network gets worse at any learning rate, so the best value is reset.
        """
        if run.schedule != "plateau":
            return self
        loss = math.log(value) if metric == "perplexity" else 1.0 - value
        if shrinking or self.best is None or loss < self.best * (1.0 - _LEAST_GAIN):
            return replace(self, best=loss)
        return replace(self, factor=self.factor * run.lr_factor)
