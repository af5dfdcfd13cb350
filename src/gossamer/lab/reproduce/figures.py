"""Figures of the paper that need no training of their own: from the code, from records, or from a trained network.

Each has a function that computes what is drawn, and one that draws it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.lab.data import Batches
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.results.plot import save_figure
from gossamer.methods.scl import ESTIMATORS, divisor, feature_scale, mask_gradient
from gossamer.prunable import select

ALPHA = {"leaky_relu": 0.1, "clipped_relu": 1.0}  # large enough to see the live zone of clipped ReLU
RANGE = 3.0  # of mask variables
_POINTS = 601
_BATCH = 500


# --- the straight-through estimators ---


@dataclass(frozen=True)
class Estimator:
    """A proxy gradient σ'(m̃), and the intervals of m̃ in which it is zero, so that masks cannot learn."""

    name: str
    mask_variable: Sequence[float]
    gradient: Sequence[float]
    dead: Sequence[tuple[float, float]]


def estimators() -> list[Estimator]:
    """Of all estimators, evaluated by the code that trains."""
    points = (
        torch.linspace(-RANGE, RANGE, _POINTS, dtype=torch.float64).round(decimals=6) + 0.0
    )  # exactly 0 in the middle
    found = []
    for name, derivative in ESTIMATORS.items():
        gradient = derivative(points, ALPHA.get(name, 0.1))
        found.append(Estimator(name, points.tolist(), gradient.tolist(), _zero_intervals(points, gradient)))
    return found


def _zero_intervals(points: Tensor, values: Tensor) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    start: float | None = None
    for point, zero in zip(points.tolist(), (values == 0).tolist(), strict=True):
        if zero:
            start, end = (point if start is None else start), point
        elif start is not None:
            found.append((start, end))
            start = None
    return found if start is None else [*found, (start, points[-1].item())]


def draw_estimators(path: Path) -> None:
    everything = estimators()
    with save_figure(path, width=11.0, height=2.4) as figure:
        for axes, each in zip(figure.subplots(1, len(everything), sharey=True), everything, strict=True):
            axes.plot(each.mask_variable, each.gradient, color="C0")
            for start, end in each.dead:
                axes.axvspan(start, end, color="C1", alpha=0.15)
                axes.text((start + end) / 2, 0.5, "dead", ha="center", color="C1", fontsize=8)
            alpha = f", α = {ALPHA[each.name]:g}" if each.name in ALPHA else ""
            axes.set_title(f"{each.name.replace('_', ' ')}{alpha}", fontsize=9)
            axes.set_xlabel("mask variable")
            axes.set_ylim(-0.08, 1.12)


# --- magnitudes of mask gradients ---


@dataclass(frozen=True)
class MaskGradients:
    """Mean magnitudes of the mask gradient on a trained dense network."""

    names: Sequence[str]
    by_layer: Sequence[float]
    normalised_by_layer: Sequence[float]
    by_channel: Mapping[str, Sequence[float]]  # of two layers: the second, and the third but last
    normalised_by_channel: Mapping[str, Sequence[float]]


def mask_gradients(network: nn.Module, images: Tensor, labels: Tensor) -> MaskGradients:
    """|∂L/∂w ⊙ w| of each layer, and of each output channel of two layers, before and after normalisation."""
    network.train()
    weights = select(network)
    loss = F.cross_entropy(network(images), labels)
    gradients = torch.autograd.grad(loss, [weight.parameter for weight in weights])
    raw, scaled = [], []
    for weight, gradient in zip(weights, gradients, strict=True):
        value = weight.parameter.detach()
        direction = mask_gradient(gradient, value, torch.ones_like(value)).flatten(1)
        raw.append(direction.abs())
        scaled.append((direction / divisor(feature_scale(direction))[:, None]).abs())
    names = [weight.name for weight in weights]
    chosen = sorted({min(1, len(names) - 1), max(0, len(names) - 3)})
    return MaskGradients(
        names,
        [float(each.mean()) for each in raw],
        [float(each.mean()) for each in scaled],
        {names[index]: raw[index].mean(1).tolist() for index in chosen},
        {names[index]: scaled[index].mean(1).tolist() for index in chosen},
    )


def batch_of(images: ImageSet) -> tuple[Tensor, Tensor]:
    """The first training images, not augmented."""
    return next(iter(Batches.evaluation(images, images.train, _BATCH)))


def draw_mask_gradients(found: MaskGradients, path: Path) -> None:
    with save_figure(path, width=4.0 * (1 + len(found.by_channel)), height=4.6) as figure:
        grid = figure.subplots(2, 1 + len(found.by_channel), squeeze=False)
        for row, by_layer, by_channel, title in (
            (0, found.by_layer, found.by_channel, "raw"),
            (1, found.normalised_by_layer, found.normalised_by_channel, "normalised"),
        ):
            grid[row][0].semilogy(by_layer)
            grid[row][0].set_ylim(min(by_layer) / 2, max(by_layer) * 2)
            grid[row][0].set_title(f"mean of each layer, {title}", fontsize=9)
            for axes, (name, values) in zip(grid[row][1:], by_channel.items(), strict=True):
                axes.semilogy(values, ".")
                axes.set_ylim(min(values) / 2, max(values) * 2)
                axes.set_title(f"channels of {name}, {title}", fontsize=9)
