"""What batched training supports: a `Run`, as `gossamer train` knows it, as a run of a batch, or why not."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.lab.batched.rows import BatchedRun, request_of
from gossamer.lab.data import kind_of
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.models import MODELS
from gossamer.lab.training.checks import TRUNK
from gossamer.lab.training.optimise import learning_rate, plan_without_masks
from gossamer.lab.training.run import Run
from gossamer.methods import find
from gossamer.methods.base import Layout, min_nonzeros
from gossamer.methods.dense import Dense
from gossamer.methods.lottery import rewound
from gossamer.methods.scl import SCLOptions
from gossamer.schedule import Plan, make_plan
from gossamer.settings import Phases

_DEFAULT = Run()
_RATES = ("lr", "schedule", "lr_warmup", "lr_drops", "lr_factor", "lr_restart")
_REQUEST = ("method", "sparsity", "decay", "leave_at")
_DECAY = ("momentum", "weight_decay", "weight_decay_power")
_TEACHING = ("distil", "temperature", "teacher")
OWN = ("preset", "pattern", "settings", *_DECAY, *_TEACHING, *_RATES)
"""What runs of one batch may differ in, besides their request and their seed. All else is shared."""
# What has to stay as it is by default.
_NOT_IN_A_BATCH = ("flops", "include", "exclude", "nesterov", "sharding")


def unsupported(run: Run) -> list[str]:
    """The settings of a run that batched training does not support."""
    found = [
        f"{name}={getattr(run, name)!r}" for name in _NOT_IN_A_BATCH if getattr(run, name) != getattr(_DEFAULT, name)
    ]
    if run.schedule == "plateau":
        found.append("schedule='plateau'")
    if run.distil and run.teacher != TRUNK:
        found.append(f"teacher={run.teacher!r}")
    # The recurrence of an IndRNN is bounded after every step of the optimizer; torch cannot map recurrent layers.
    if run.model == "indrnn" or any(entry.recurrent for entry in MODELS if entry.name == run.model):
        found.append(f"model={run.model!r}")
    if kind_of(run.data) in ("folder", "text", "sentences"):
        found.append(f"data={run.data!r}")
    options = run.options
    if find(run.method).observes:
        found.append(f"method={run.method!r}")
    if run.method == "scl" and isinstance(options, SCLOptions):
        found += ["settings.scale='per_sample'"] if options.scale == "per_sample" else []
        found += [f"settings.mask_momentum={options.mask_momentum}"] if options.mask_momentum else []
    elif run.method != "dense" and run.sparsity is None and run.pattern is None:
        found.append(f"decay={run.decay} with method={run.method}")
    return found


def check(runs: Sequence[Run]) -> None:
    """Refuse, all at once, the runs that have to be trained by themselves."""
    problems = [f"run {run.run_id}: {', '.join(found)}" for run in runs if (found := unsupported(run))]
    if problems:
        raise ValueError(
            "batched training does not support all that a run alone does; train such a run by itself (gossamer "
            "train):\n  " + "\n  ".join(problems)
        )


def check_reachable(runs: Sequence[Run], layout: Layout) -> None:
    """Refuse, before anything is trained, budgets that whole filters, `min_density` or a pattern do not allow."""
    problems = []
    for run in runs:
        try:
            check_filters(run, layout)
            check_min_density(run, layout)
            check_pattern(run, layout)
        except ValueError as error:
            problems.append(f"run {run.run_id}, method={run.method}: {error}")
    if problems:
        raise ValueError("runs that cannot be trained:\n  " + "\n  ".join(problems))


def check_observer(run: Run) -> None:
    """Refuse a method that observes the forward pass, which is mapped over networks here."""
    if find(run.method).observes:
        raise ValueError(f"method={run.method} observes the forward pass, so train it by itself (gossamer train)")


def check_filters(run: Run, layout: Layout) -> None:
    """Refuse a budget that whole filters are too coarse for, or a missing batch norm that a method needs."""
    method = find(run.method)
    if method.structured and run.sparsity is not None:
        method.check(layout, request_of(run, layout))


def check_min_density(run: Run, layout: Layout) -> None:
    """Refuse a budget below the nonzeros that `min_density` keeps in each tensor."""
    if run.sparsity is None or run.pattern is not None or find(run.method).structured:
        return
    least, kept = sum(min_nonzeros(layout.sizes, run.phases.min_density)), layout.keep(run.sparsity)
    if least > kept:
        raise ValueError(
            f"sparsity={run.sparsity} keeps {kept} weights, but min_density keeps at least {least}: ask for less "
            "sparsity, or lower min_density (settings.min_density=0 in a run, scl:min_density=0 in a comparison)"
        )


def check_pattern(run: Run, layout: Layout) -> None:
    """Refuse a pattern that does not fit the network or the sparsity."""
    if run.pattern is not None:
        request_of(run, layout)


def shared(run: Run) -> Run:
    """What all runs of its batch have in common, as a run."""
    return replace(run, **{name: getattr(_DEFAULT, name) for name in (*_REQUEST, "seed", *OWN)})


def images_of(run: Run, images: ImageSet) -> ImageSet:
    """The images that a run trains on, of its data set."""
    images = images.split(run.validation) if run.validation else images
    return images if run.augment else replace(images, padding=0, flip=False)


def batched_run(run: Run, steps_per_epoch: int) -> BatchedRun:
    """A run that `check` accepts, in steps."""
    total, method = run.epochs * steps_per_epoch, find(run.method)
    if method is Dense:
        plan = plan_without_masks(run, total, steps_per_epoch)
    else:
        plan = method.phases(_plan(run.phases, total, steps_per_epoch))
    if run.distil and plan is not None and plan.warmup == 0:
        raise ValueError(
            f"teacher={TRUNK}: expected a warm-up in which the teacher learns, got one of no steps: raise "
            "settings.warmup, or train longer"
        )
    rates = _rates(_followed(run), plan, total, steps_per_epoch, method.rewinds)
    return BatchedRun(run, None if method is Dense else plan, rates)


def leave_sparsify(each: BatchedRun, step: int, steps_per_epoch: int) -> BatchedRun:
    """A run whose sparsify phase ends at this step; its learning rate follows from the next one on, as alone."""
    assert each.plan is not None
    plan = each.plan.leave_sparsify(step)
    rates = _rates(_followed(each.run), plan, len(each.rates), steps_per_epoch, each.method_type.rewinds)
    return replace(
        each, plan=plan, rates=torch.cat([each.rates[: step + 1], rates[step + 1 :]]), left=step, first_plan=each.begun
    )


def _followed(run: Run) -> Run:
    """What the learning rate of a run depends on, besides its plan, as a run: many runs share it."""
    any_request = _DEFAULT if run.method == "dense" else replace(_DEFAULT, method="scl", sparsity=0.5)
    return replace(any_request, **{name: getattr(run, name) for name in _RATES})


def _plan(phases: Phases, total: int, steps_per_epoch: int) -> Plan:
    durations = {"warmup": phases.warmup, "sparsify": phases.sparsify, "stabilise": phases.stabilise}
    return make_plan(total, steps_per_epoch=steps_per_epoch, **durations)


# Many runs follow the same rates, and steps are many.
@lru_cache(maxsize=64)
def _rates(run: Run, plan: Plan | None, total: int, steps_per_epoch: int, rewinds: bool) -> Tensor:
    def usual(step: int) -> float:
        return learning_rate(run, plan, step, total_steps=total, steps_per_epoch=steps_per_epoch)

    def again(step: int) -> float:
        assert plan is not None
        return rewound(plan, step, shared=usual, peak=run.lr)

    return torch.tensor([again(step) if rewinds else usual(step) for step in range(total)], dtype=torch.float64)
