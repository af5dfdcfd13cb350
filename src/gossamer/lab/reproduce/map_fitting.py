"""The paper's map fitting: can masks be learned alone, and what do estimator and normalisation do to it?

A three-layer network with fixed random weights and a random mask is the map. The same network with other random masks
learns them, by gradient descent on the mask variables alone, to give the same outputs. Many fits are trained at once,
as one stacked network.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, replace_all_batch_norm_modules_, vmap

from gossamer.lab import models
from gossamer.lab.batched.folder import held
from gossamer.lab.json_files import read_object
from gossamer.lab.results.plot import can_draw, map_fitting_curves
from gossamer.lab.training.distributed import DistributedContext
from gossamer.lab.training.result import hardware, write_json
from gossamer.methods.scl import ESTIMATORS, divisor, mask_gradient, masked_weight, unit_step, update_mask_variable_
from gossamer.provenance import commit, versions
from gossamer.schedule import cosine

RATES = {"none": (0.1, 10.0, 100.0, 1000.0, 10_000.0), "batch": (0.01, 0.1, 1.0)}
ALPHAS = {"clipped_relu": (0.1, 0.5, 1.0, 2.0, 4.0), "leaky_relu": (0.01, 0.1, 0.3, 0.6, 0.9)}
ALPHA_RATES = {"none": (0.1, 100.0), "batch": (0.1,)}
STEPS = 2000
ALPHA = "alpha"  # the folder of the records in which α varies
POINTS = 40  # of each learning curve


@dataclasses.dataclass(frozen=True)
class Fit:
    """One attempt to recover the masks."""

    seed: int
    estimator: str
    scale: str  # none or batch
    anneal: str  # of the mask learning rate: constant or cosine
    mask_lr: float
    alpha: float = 0.1  # slope of leaky_relu, upper bound of clipped_relu


@dataclasses.dataclass(frozen=True)
class Fitted:
    fit: Fit
    error: float  # mean squared error over the last tenth of the steps
    recovered: float  # share of the masks that equal those of the map
    curve: tuple[float, ...]


def all_fits(seeds: int) -> list[Fit]:
    return [
        Fit(seed, estimator, scale, anneal, rate)
        for estimator in ESTIMATORS
        for scale, rates in RATES.items()
        for anneal in ("constant", "cosine")
        for rate in rates
        for seed in range(seeds)
    ]


def alpha_fits(seeds: int) -> list[Fit]:
    """The estimators with an α, for several of them, at a constant rate and at the rate that suits raw gradients."""
    return [
        Fit(seed, estimator, scale, "cosine" if rate > 1 else "constant", rate, alpha)
        for estimator, alphas in ALPHAS.items()
        for alpha in alphas
        for scale, rates in ALPHA_RATES.items()
        for rate in rates
        for seed in range(seeds)
    ]


def fit_masks(
    fits: Sequence[Fit],
    *,
    steps: int,
    batch_size: int = 256,
    samples: int = 4096,
    moved: Callable[[float], None] = lambda share: None,
) -> list[Fitted]:
    """Fit maps in one batch; all fits of a seed share weights, inputs, map and first masks. One estimator at a time."""
    (estimator,) = {fit.estimator for fit in fits}
    seeds = sorted({fit.seed for fit in fits})
    template = replace_all_batch_norm_modules_(models.create("map_fit"))  # only batch statistics are used here
    names = [name for name, parameter in template.named_parameters() if parameter.dim() > 1]
    problems = {seed: _problem(seed, samples) for seed in seeds}
    weights = {name: torch.stack([problems[fit.seed].weights[name] for fit in fits]) for name in names}
    goals = {name: torch.stack([problems[fit.seed].goal[name] for fit in fits]) for name in names}
    masks = {name: torch.stack([problems[fit.seed].start[name] for fit in fits]) for name in names}
    inputs = torch.stack([problems[seed].inputs for seed in seeds])
    which = torch.tensor([seeds.index(fit.seed) for fit in fits])
    normalised = torch.tensor([fit.scale == "batch" for fit in fits])[:, None, None]
    alpha = torch.tensor([fit.alpha for fit in fits])[:, None, None]
    generator = torch.Generator().manual_seed(0)

    def forward(used: dict[str, Tensor], images: Tensor) -> Tensor:
        return functional_call(template, used, (images,))  # type: ignore[no-any-return]

    curves, late = [], []
    for step in range(steps):
        rows = torch.randint(0, samples, (batch_size,), generator=generator)
        batch = inputs[:, rows].index_select(0, which)
        with torch.no_grad():
            target = vmap(forward)({n: masked_weight(weights[n], goals[n]) for n in names}, batch)
        used = {n: masked_weight(weights[n], unit_step(masks[n])).requires_grad_() for n in names}
        errors = (vmap(forward)(used, batch) - target).square().mean((1, 2))
        gradients = torch.autograd.grad(errors.sum(), list(used.values()))
        rates = torch.tensor([_rate(fit, step / steps) for fit in fits])[:, None, None]
        for name, gradient in zip(names, gradients, strict=True):
            direction = mask_gradient(gradient, weights[name], masks[name], estimator=estimator, alpha=alpha)
            scale = direction.square().mean(2, keepdim=True).sqrt()
            direction = torch.where(normalised, direction / divisor(scale), direction)
            update_mask_variable_(masks[name], direction, learning_rate=rates)
        if step % max(1, steps // POINTS) == 0:
            curves.append(errors.detach())
            moved(step / steps)
        if step >= steps - max(1, steps // 10):
            late.append(errors.detach())
    recovered = torch.cat([((masks[n] > 0) == goals[n]).flatten(1) for n in names], dim=1).float().mean(1)
    curve, final = torch.stack(curves), torch.stack(late).mean(0)
    return [
        Fitted(fit, float(final[row]), float(recovered[row]), tuple(curve[:, row].tolist()))
        for row, fit in enumerate(fits)
    ]


def reproduce(
    out: Path,
    *,
    seeds: int = 3,
    steps: int = STEPS,
    progress: Callable[[str], None] = lambda line: None,
    moved: Callable[[float], None] = lambda share: None,
) -> list[dict[str, Any]]:
    """All estimators, with and without normalisation; one record per estimator under `out`, and the curves if
    matplotlib is installed."""
    if seeds < 1 or steps < 1:
        raise ValueError(f"expected at least 1 seed and 1 step, got {seeds} and {steps}")
    with held(out):
        everything, varied = all_fits(seeds), alpha_fits(seeds)
        wanted = [(out, estimator, everything) for estimator in ESTIMATORS]
        wanted += [(out / ALPHA, estimator, varied) for estimator in ALPHAS]
        records = []
        for done, (folder, estimator, fits) in enumerate(wanted):
            moved(done / len(wanted))
            within = partial(_move_within, moved, done, len(wanted))
            records.append(_record(folder, estimator, fits, seeds, steps, progress, within))
        records = records[: len(ESTIMATORS)]
        if can_draw():
            map_fitting_curves(records, out / "curves.svg")
    return records


def _move_within(moved: Callable[[float], None], done: int, parts: int, share: float) -> None:
    """Report the share of all the parts, given that of the current one."""
    moved((done + share) / parts)


def _record(
    folder: Path,
    estimator: str,
    fits: Sequence[Fit],
    seeds: int,
    steps: int,
    progress: Callable[[str], None],
    moved: Callable[[float], None],
) -> dict[str, Any]:
    """The record of an estimator, computed if it does not exist."""
    path = folder / f"{estimator}.json"
    if not path.exists():
        progress(f"{estimator}: fitting")
        folder.mkdir(exist_ok=True)
        fitted = fit_masks([fit for fit in fits if fit.estimator == estimator], steps=steps, moved=moved)
        about = {
            "commit": commit(),
            "versions": versions(),
            "hardware": hardware(DistributedContext(torch.device("cpu"))),
        }
        write_json(path, {"steps": steps, **about, "fits": [dataclasses.asdict(each) for each in fitted]})
    record = read_object(path, "the fits of an estimator", ": delete it")
    if lacking := [name for name in ("steps", "fits") if name not in record]:
        raise ValueError(f"expected the fits of an estimator in {path}, got no {', '.join(lacking)}: delete it")
    kept = len({each["fit"]["seed"] for each in record["fits"]})
    if (record["steps"], kept) != (steps, seeds):
        raise ValueError(
            f"{path} has {record['steps']} steps and {kept} seeds, not {steps} and {seeds}: ask for the same, choose "
            "another folder (--out), or delete it"
        )
    return record


@dataclasses.dataclass(frozen=True, eq=False)
class _Problem:
    inputs: Tensor
    weights: dict[str, Tensor]
    goal: dict[str, Tensor]
    start: dict[str, Tensor]


def _problem(seed: int, samples: int) -> _Problem:
    torch.manual_seed(seed)
    network = models.create("map_fit")
    weights = {name: p.detach().clone() for name, p in network.named_parameters() if p.dim() > 1}
    return _Problem(
        inputs=torch.randn(samples, 64),
        weights=weights,
        goal={name: torch.randn_like(weight) > 0 for name, weight in weights.items()},
        start={name: torch.randn_like(weight) for name, weight in weights.items()},
    )


def _rate(fit: Fit, progress: float) -> float:
    return fit.mask_lr * (cosine(progress) if fit.anneal == "cosine" else 1.0)
