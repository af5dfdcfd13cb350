"""A network of two tensors as rows of numbers, for holding a method against its own equations."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.methods import Context, Layout, Method, Request, Timeline, find, make_options
from gossamer.methods.base import MatrixStep
from gossamer.patterns import Shape, assign, target_of
from gossamer.schedule import Plan
from gossamer.target import Target

Array = npt.NDArray[Any]
LAYOUT = Layout(("a", "b"), ((4, 3, 2), (2, 8)))  # 24 and 16 weights
PLAN = Plan(0, 10, 5, 5)
RATE = 0.1


def begin(
    name: str,
    *sparsities: float,
    layout: Layout = LAYOUT,
    plan: Plan = PLAN,
    min_density: float = 0.0,
    seed: int = 0,
    tabulated: bool = True,
    target: Target | None = None,
    pattern: str | None = None,
    **settings: Any,
) -> tuple[Method[Any], Tensor, Timeline]:
    """The method, the dense weights of its runs and its timeline."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(len(sparsities), layout.count, generator=generator, dtype=torch.float64) * 0.3
    weights = torch.nn.functional.pad(drawn, (0, 5))[:, : layout.count]  # other parameters lie beside them in batches
    timeline = Timeline(
        plan, rows=len(sparsities), device=weights.device, dtype=weights.dtype, epoch=2, tabulated=tabulated
    )
    timeline.rate.fill_(RATE)
    kind = find(name)
    options = make_options(kind, settings)
    shapes = [Shape.features_first(each, shape) for each, shape in zip(layout.names, layout.shapes, strict=True)]
    patterns = assign(pattern, shapes)
    targets = [
        target if patterns is None else target_of(patterns, shapes, sparsity=sparsity, min_density=min_density)
        for sparsity in sparsities
    ]
    requests = [Request(sparsity, 7 + row, options, targets[row], patterns) for row, sparsity in enumerate(sparsities)]
    return kind(Context(layout, requests, timeline, weights, min_density=min_density)), weights, timeline


def gradient_like(weights: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(weights.shape, generator=generator, dtype=weights.dtype) * 0.01


def update(method: Method[Any], gradient: Tensor, weights: Tensor, layout: Layout = LAYOUT) -> None:
    """Let the method learn from a gradient and change it."""
    active = None
    if method.observes:
        filters = sum(shape[0] for shape in layout.shapes if len(shape) > 2)
        active = torch.linspace(0.1, 0.9, filters, dtype=weights.dtype).expand(len(weights), -1)
    method.update_masks(MatrixStep(gradient, weights, layout, active))


def step(
    method: Method[Any], weights: Tensor, timeline: Timeline, number: int, layout: Layout = LAYOUT
) -> tuple[Tensor, Tensor]:
    """One step of plain SGD. Returns the gradient that was given, and what the method made of it."""
    given = gradient_like(weights, number)
    gradient = given.clone()
    update(method, gradient, weights, layout)
    weights.sub_(gradient * RATE)
    method.project(weights)
    timeline.set(number + 1)
    if method.topology_due(number + 1):
        method.update_topology(weights, number + 1)
    return given, gradient


def forward_weights(method: Method[Any], weights: Tensor) -> Tensor:
    """What the forward pass uses."""
    out = torch.full_like(weights, torch.nan)
    method.apply_masks(weights, out)
    return out


def top(scores: Array, count: int) -> Array:
    """The largest of each row, `count` of them, as a mask."""
    mask = np.zeros(scores.shape, dtype=bool)
    for row, each in enumerate(scores):
        mask[row, np.argsort(-each, kind="stable")[:count]] = True
    return mask


def left(ramp: float, total: int, keep: int) -> int:
    """The cubic budget, written down a second time."""
    return int(np.floor(keep + (total - keep) * (1 - ramp) ** 3 + 0.5))
