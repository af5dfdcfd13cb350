"""A `Run`, as `gossamer train` knows it, as a lane of a stack; and what a stack cannot do for a run."""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.lab.batched.lanes import Common, Lane
from gossamer.lab.batched.training import Training
from gossamer.lab.data import kind_of
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.training.optimise import learning_rate, plan_without_masks
from gossamer.lab.training.run import Run
from gossamer.methods import find
from gossamer.methods.base import Layout, min_nonzeros
from gossamer.methods.dense import Dense
from gossamer.methods.filters import check_reach
from gossamer.methods.lottery import rewound
from gossamer.methods.scl import SCLOptions
from gossamer.schedule import Plan, make_plan
from gossamer.settings import Phases

_DEFAULT = Run()
# What runs of one stack may differ in. Everything else they share.
_RATES = ("lr", "schedule", "lr_warmup", "lr_drops", "lr_factor", "lr_restart")
_REQUEST = ("method", "sparsity", "decay")
_OWN = (*_REQUEST, "preset", "settings", "seed", "momentum", "weight_decay", "weight_decay_power", *_RATES)
# What has to stay as it is by default.
_NOT_IN_A_STACK = ("flops", "leave_at", "include", "exclude", "optimizer", "nesterov", "clip", "sharding", "distil")


def why_not(run: Run) -> list[str]:
    """The settings of a run that a stack cannot follow."""
    told = [
        f"{name}={getattr(run, name)!r}" for name in _NOT_IN_A_STACK if getattr(run, name) != getattr(_DEFAULT, name)
    ]
    if run.schedule == "plateau":
        told.append("schedule='plateau'")
    if run.model == "indrnn":  # whose recurrence is bounded after every step of the optimizer
        told.append("model='indrnn'")
    if kind_of(run.data) in ("folder", "text"):
        told.append(f"data={run.data!r}")
    options = run.options
    if run.method == "scl" and isinstance(options, SCLOptions):
        told += ["settings.scale='per_sample'"] if options.scale == "per_sample" else []
        told += [f"settings.mask_momentum={options.mask_momentum}"] if options.mask_momentum else []
    elif run.method != "dense" and run.sparsity is None:
        told.append(f"decay={run.decay} with method={run.method}")
    return told


def check(runs: list[Run]) -> None:
    """Refuse, all at once, the runs that have to be trained by themselves."""
    problems = [f"run {run.run_id}: {', '.join(told)}" for run in runs if (told := why_not(run))]
    if problems:
        raise ValueError(
            "a stack of runs cannot do all that a run alone can; train such a run by itself (gossamer train):\n  "
            + "\n  ".join(problems)
        )


def check_reachable(runs: list[Run], layout: Layout) -> None:
    """Refuse, before anything is trained, what whole filters are too coarse for or the floor does not allow."""
    problems = []
    for run in runs:
        if run.sparsity is None:
            continue
        try:
            if find(run.method).structured:
                check_reach(layout, run.sparsity)
            else:
                check_floor(layout, run.sparsity, run.phases.min_density)
        except ValueError as error:
            problems.append(f"run {run.run_id}, method={run.method}: {error}")
    if problems:
        raise ValueError("runs that cannot be trained:\n  " + "\n  ".join(problems))


def check_floor(layout: Layout, sparsity: float, floor: float) -> None:
    if not 0 <= sparsity < 1:
        raise ValueError(f"expected sparsity to be a number of at least 0 and below 1, such as 0.95, got {sparsity}")
    least, left = sum(min_nonzeros(layout.sizes, floor)), layout.keep(sparsity)
    if least > left:
        raise ValueError(
            f"sparsity={sparsity} leaves {left} connections, but min_density keeps {least} of them: ask for less, or "
            "lower it (settings.min_density=0 in a run, scl:min_density=0 in a comparison)"
        )


def shared(run: Run) -> Run:
    """What all runs of its stack have in common, as a run."""
    common = {name: getattr(_DEFAULT, name) for name in _OWN}
    return replace(run, **common)


def common_of(run: Run) -> Common:
    return Common(run.epochs, run.batch_size, run.label_smoothing)


def images_of(run: Run, images: ImageSet) -> ImageSet:
    """The images that a run trains on, of its data set."""
    images = images.split(run.validation) if run.validation else images
    return images if run.augment else replace(images, padding=0, flip=False)


def lane_of(run: Run, steps_per_epoch: int) -> Lane:
    """A run that `check` has nothing against."""
    total, method, phases = run.epochs * steps_per_epoch, find(run.method), run.phases
    if method is Dense:
        plan = plan_without_masks(run, total, steps_per_epoch)
    else:
        plan = method.phases(_plan(phases, total, steps_per_epoch))
    followed = replace(_DEFAULT, **{name: getattr(run, name) for name in (*_REQUEST, *_RATES)})
    return Lane(
        name=run.run_id,
        identity=run.run_id,
        method_type=method,
        options=method.options() if method is Dense else run.options,
        sparsity=run.sparsity or 0.0,
        seed=run.seed,
        plan=None if method is Dense else plan,
        rates=_rates(followed, plan, total, steps_per_epoch, method.rewinds),
        weight_decay=run.weight_decay,
        momentum=run.momentum,
        min_density=phases.min_density,
        training=Training() if method is Dense else Training(weight_decay_power=run.weight_decay_power),
        decay=run.decay,
    )


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
