"""A network of two tensors as rows of numbers, for holding a rule against its own equations."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.methods import Layout, Request, Rule, Timeline, find, make_options
from gossamer.schedule import Plan

Array = npt.NDArray[Any]
LAYOUT = Layout(("a", "b"), ((4, 3, 2), (2, 8)))  # 24 and 16 connections
PLAN = Plan(0, 10, 5, 5)
RATE = 0.1


def begin(
    name: str,
    *sparsities: float,
    layout: Layout = LAYOUT,
    plan: Plan = PLAN,
    floor: float = 0.0,
    seed: int = 0,
    **settings: Any,
) -> tuple[Rule[Any], Tensor, Timeline]:
    """The rule, the weight variables of its rows and its timeline."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(len(sparsities), layout.count, generator=generator, dtype=torch.float64) * 0.3
    weights = torch.nn.functional.pad(drawn, (0, 5))[:, : layout.count]  # in a race other parameters lie beside them
    timeline = Timeline(plan, rows=len(sparsities), device=weights.device, dtype=weights.dtype, epoch=2)
    timeline.rate.fill_(RATE)
    rule = find(name)
    options = make_options(rule, settings)
    requests = [Request(sparsity, 7 + row, options) for row, sparsity in enumerate(sparsities)]
    return rule(layout, requests, timeline, weights, floor=floor), weights, timeline


def gradient_like(weights: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(weights.shape, generator=generator, dtype=weights.dtype) * 0.01


def step(rule: Rule[Any], weights: Tensor, timeline: Timeline, number: int) -> tuple[Tensor, Tensor]:
    """One step as in a race with plain SGD. Returns the gradient that was given, and what the rule made of it."""
    given = gradient_like(weights, number)
    gradient = given.clone()
    rule.learn_(gradient, weights)
    weights.sub_(gradient * RATE)
    rule.settle_(weights)
    timeline.clock += 1
    if rule.due(number + 1):
        rule.refresh_(weights, number + 1)
    return given, gradient


def shown(rule: Rule[Any], weights: Tensor) -> Tensor:
    out = torch.full_like(weights, torch.nan)
    rule.show_(weights, out)
    return out


def top(scores: Array, count: int) -> Array:
    """The so many largest of each row, as a mask."""
    mask = np.zeros(scores.shape, dtype=bool)
    for row, each in enumerate(scores):
        mask[row, np.argsort(-each, kind="stable")[:count]] = True
    return mask


def left(ramp: float, total: int, keep: int) -> int:
    """The cubic budget, written down a second time."""
    return int(np.floor(keep + (total - keep) * (1 - ramp) ** 3 + 0.5))
