"""The reference network: gradients against autograd, runs against torch SGD, reductions to known cases."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from . import mlp, scl
from .scl import Array


def constant(value: float) -> Callable[[int], float]:
    return lambda step: value


def small_problem(seed: int = 0, dtype: type = np.float64) -> mlp.Problem:
    rng = np.random.default_rng(seed)
    sizes = (5, 6, 4, 3)
    weights = tuple((rng.normal(size=(o, i)) / np.sqrt(i)).astype(dtype) for i, o in pairwise(sizes))
    return mlp.Problem(
        inputs=rng.normal(size=(24, 5)).astype(dtype),
        labels=rng.integers(0, 3, size=24),
        batches=tuple(np.split(rng.permutation(24), 3)),
        weights=weights,
        biases=tuple((0.1 * rng.normal(size=o)).astype(dtype) for o in sizes[1:]),
        mask_variables=tuple(np.abs(w) for w in weights),
    )


def torch_loss(weights: list[torch.Tensor], biases: list[torch.Tensor], x: Array, y: mlp.IntArray) -> torch.Tensor:
    h = torch.from_numpy(x)
    for w, b in zip(weights[:-1], biases[:-1], strict=True):
        h = torch.relu(torch.nn.functional.linear(h, w, b))
    return torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(h, weights[-1], biases[-1]), torch.from_numpy(y)
    )


def leaves(tensors: mlp.Tensors) -> list[torch.Tensor]:
    return [torch.tensor(t, requires_grad=True) for t in tensors]


def test_gradients_agree_with_autograd_for_the_batch_and_for_each_sample() -> None:
    p = small_problem()
    found = mlp.backpropagate(p.weights, p.biases, p.inputs, p.labels)
    w, b = leaves(p.weights), leaves(p.biases)
    loss = torch_loss(w, b, p.inputs, p.labels)
    assert found.loss == pytest.approx(loss.item(), rel=1e-12)
    for ours, theirs in zip(found.weights + found.biases, torch.autograd.grad(loss, w + b), strict=True):
        assert_allclose(ours, theirs.numpy(), rtol=1e-10, atol=1e-14)
    for sample in range(len(p.labels)):
        one = torch_loss(w, b, p.inputs[sample : sample + 1], p.labels[sample : sample + 1])
        for ours, theirs in zip(found.per_sample, torch.autograd.grad(one, w), strict=True):
            assert_allclose(ours[sample], theirs.numpy(), rtol=1e-10, atol=1e-14)


def test_gradients_agree_with_finite_differences() -> None:
    p = small_problem(1)
    found = mlp.backpropagate(p.weights, p.biases, p.inputs, p.labels)
    for layer, row, column in [(0, 2, 3), (1, 1, 5), (2, 0, 2)]:
        losses = []
        for sign in (1, -1):
            moved = [w.copy() for w in p.weights]
            moved[layer][row, column] += sign * 1e-5
            losses.append(mlp.backpropagate(tuple(moved), p.biases, p.inputs, p.labels).loss)
        assert found.weights[layer][row, column] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)


def test_frozen_masks_of_ones_are_plain_sgd() -> None:
    p = small_problem()
    run = mlp.train(
        p, mlp.Settings(rate=0.3, mask_rate=constant(0.0), momentum=0.9, weight_decay=0.01, scale="batch"), 40
    )
    w, b = leaves(p.weights), leaves(p.biases)
    optimizer = torch.optim.SGD(w + b, lr=0.3, momentum=0.9, weight_decay=0.01)
    for step, state in enumerate(run):
        rows = p.batches[step % 3]
        optimizer.zero_grad()
        torch_loss(w, b, p.inputs[rows], p.labels[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for ours, theirs in zip(state.weights + state.biases, w + b, strict=True):
            assert_allclose(ours, theirs.detach().numpy(), rtol=1e-8, atol=1e-12)
    assert run[-1].sparsity == 0


class StraightThrough(torch.autograd.Function):
    """w = w̃ ⊙ H(m̃) with the two gradients redefined as in the paper: the formulation the reference avoids."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return w * (m > 0)

    @staticmethod
    def backward(ctx: torch.autograd.function.BackwardCFunction, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (w,) = ctx.saved_tensors
        return g, g * w


@pytest.mark.parametrize("mask_momentum", [0.0, 0.9])
def test_fixed_decay_agrees_with_the_autograd_formulation(mask_momentum: float) -> None:
    p = small_problem()
    mask_rate = 0.05 * (1 - mask_momentum)  # the same pace in the long run
    settings = mlp.Settings(
        rate=0.1,
        mask_rate=constant(mask_rate),
        momentum=0.9,
        weight_decay=1e-3,
        mask_momentum=mask_momentum,
        decay=0.05,
    )
    run = mlp.train(p, settings, 60)
    w, b, m = leaves(p.weights), leaves(p.biases), leaves(p.mask_variables)
    optimizers = (
        torch.optim.SGD(w + b, lr=0.1, momentum=0.9, weight_decay=1e-3),
        torch.optim.SGD(m, lr=mask_rate, momentum=mask_momentum),
    )
    for step, state in enumerate(run):
        rows = p.batches[step % 3]
        for optimizer in optimizers:
            optimizer.zero_grad()
        used = [StraightThrough.apply(*pair) for pair in zip(w, m, strict=True)]  # type: ignore[no-untyped-call]
        penalty = sum((0.05 * mask.sum() for mask in m), torch.zeros(()))  # Σ m through the identity estimator
        (torch_loss(used, b, p.inputs[rows], p.labels[rows]) + penalty).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        for ours, theirs in zip(state.weight_variables + state.mask_variables, w + m, strict=True):
            assert_allclose(ours, theirs.detach().numpy(), rtol=1e-7, atol=1e-10)
    assert 0.2 < run[-1].sparsity < 0.9  # the comparison saw connections go and others stay


def test_huge_decay_kills_everything_and_leaves_the_weight_variables() -> None:
    run = mlp.train(small_problem(), mlp.Settings(rate=0.1, mask_rate=constant(1.0), decay=1e3), 3)
    assert run[0].sparsity == 1
    assert all((w == 0).all() for w in run[-1].weights)
    assert all((w != 0).all() for w in run[-1].weight_variables)


@pytest.mark.parametrize("scale", mlp.SCALES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_budget_is_met_at_every_step_and_no_tensor_dies(scale: str, dtype: type) -> None:
    p = small_problem(dtype=dtype)
    ramp = [scl.ramp_budget(66, 0.2, (step + 1) / 30) for step in range(30)]
    settings = mlp.Settings(
        rate=0.1, mask_rate=constant(0.05), momentum=0.9, scale=scale, budget=ramp.__getitem__, floor=0.01
    )
    run = mlp.train(p, settings, 30)
    assert [sum(int(m.sum()) for m in state.masks) for state in run] == ramp
    assert ramp[-1] == 13
    assert run[-1].sparsity == pytest.approx(1 - 13 / 66)
    assert all(m.sum() >= 1 for state in run for m in state.masks)
    for state in run:
        for w, variable, mask in zip(state.weights, state.weight_variables, state.masks, strict=True):
            assert_array_equal(w, np.where(mask == 1, variable, 0))
            assert w.dtype == variable.dtype == mask.dtype == dtype


def test_scales_and_l2_reading_of_one_step() -> None:
    """One step of masks against sums written out over single samples and single weights."""
    p = small_problem()
    rows, l2 = p.batches[0], 0.05
    settings = mlp.Settings(rate=0.0, mask_rate=constant(1.0), weight_decay=2 * l2, l2_reaches_masks=True)
    w, b = leaves(p.weights), leaves(p.biases)
    singles = [
        [
            (g.numpy() + 2 * l2 * v) * v
            for g, v in zip(
                torch.autograd.grad(torch_loss(w, b, p.inputs[[r]], p.labels[[r]]), w), p.weights, strict=True
            )
        ]
        for r in rows
    ]
    batch = [sum(s[i] for s in singles) / len(rows) for i in range(3)]
    everything = np.concatenate([g.ravel() for g in batch])
    expected: dict[str, Callable[[int, int], float]] = {
        "none": lambda i, j: 1.0,
        "global": lambda i, j: float(np.sqrt((everything**2).mean())),
        "batch": lambda i, j: float(np.sqrt((batch[i][j] ** 2).mean())),
        "per_sample": lambda i, j: float(np.sqrt(np.mean([s[i][j] ** 2 for s in singles]))),
    }
    for name, scale in expected.items():
        after = mlp.train(p, replace(settings, scale=name), 1)[0].mask_variables
        for i, start in enumerate(p.mask_variables):
            for j in range(start.shape[0]):
                assert_allclose(start[j] - after[i][j], batch[i][j] / scale(i, j), rtol=1e-8, atol=1e-12)


def test_power_and_estimator_reach_the_masks() -> None:
    """A leaky slope on pruned connections and the square root of the scale, one row at a time."""
    p = small_problem()
    rows = p.batches[0]
    masks = tuple(np.where(np.abs(w) > 0.3, 1.0, -1.0) for w in p.weights)
    settings = mlp.Settings(
        rate=0.0, mask_rate=constant(1.0), scale="batch", power=0.5, estimator="leaky_relu", alpha=0.2
    )
    after = mlp.train(replace(p, mask_variables=masks), settings, 1)[0].mask_variables
    used = tuple(w * (m > 0) for w, m in zip(p.weights, masks, strict=True))
    gradients = mlp.backpropagate(used, p.biases, p.inputs[rows], p.labels[rows]).weights
    for g, w, m, new in zip(gradients, p.weights, masks, after, strict=True):
        for j in range(len(m)):
            raw = g[j] * w[j] * np.where(m[j] > 0, 1, 0.2)
            assert_allclose(m[j] - new[j], raw / max(np.sqrt((raw**2).mean()), 1e-300) ** 0.5, atol=1e-9)


def test_floor_keeps_a_tensor_that_would_have_died() -> None:
    p = small_problem()
    p = replace(p, mask_variables=(*p.mask_variables[:2], np.full((3, 4), -5.0)))
    settings = mlp.Settings(rate=0.1, mask_rate=constant(0.01), budget=lambda step: 20)
    assert mlp.train(p, settings, 2)[-1].masks[2].sum() == 0
    floored = mlp.train(p, replace(settings, floor=0.25), 2)[-1].masks
    assert floored[2].sum() == 3
    assert sum(m.sum() for m in floored) == 20


def test_settings_refuse_contradictions() -> None:
    with pytest.raises(ValueError, match=r"none, global, batch, per_sample.*'layer'"):
        mlp.Settings(rate=0.1, mask_rate=constant(0.1), scale="layer")
    with pytest.raises(ValueError, match=r"decay 0 beside a budget, got 0\.1"):
        mlp.Settings(rate=0.1, mask_rate=constant(0.1), decay=0.1, budget=lambda step: 3)


def realisable_problem(seed: int) -> tuple[mlp.Problem, Array]:
    """Labels drawn from a network whose first units have two inputs each; the student starts with all.

    All first-layer weights are of like size, so nothing but the loss tells the true connections. The
    teacher's class probabilities are the true ones, hence its mask is the optimum, with no gradient there.
    """
    rng = np.random.default_rng(seed)
    first = rng.choice([-1.0, 1.0], (6, 8)) * rng.uniform(0.5, 1, (6, 8))
    second = np.eye(6) + rng.uniform(-0.1, 0.1, (6, 6))
    third = 2 * np.eye(6) + rng.uniform(-0.2, 0.2, (6, 6))
    truth = np.zeros((6, 8))
    for row in truth:
        row[rng.choice(8, 2, replace=False)] = 1
    biases = (np.full(6, 3.0), np.zeros(6), np.zeros(6))  # the units stay on the rising side of ReLU
    inputs = rng.normal(size=(1500, 8))
    hidden = np.maximum(np.maximum(inputs @ (first * truth).T + biases[0], 0) @ second.T, 0)
    labels = (hidden @ third.T + rng.gumbel(size=(1500, 6))).argmax(axis=1)
    weights = (first, second, third)
    start = tuple(np.ones_like(w) for w in weights)
    return mlp.Problem(inputs, labels, (np.arange(1500),), weights, biases, start), truth


@pytest.mark.parametrize("scale", mlp.SCALES)
@pytest.mark.parametrize("seed", range(3))
def test_the_optimal_mask_of_a_realisable_problem_is_recovered(scale: str, seed: int) -> None:
    problem, truth = realisable_problem(seed)
    settings = mlp.Settings(
        rate=0.0,
        mask_rate=lambda step: scl.cosine_rate(0.1, step / 150),
        scale=scale,
        budget=lambda step: scl.ramp_budget(48, 0.25, min(1.0, (step + 1) / 75)),
        costs=(1, 0, 0),
    )
    last = mlp.train(problem, settings, 150)[-1]
    assert_array_equal(last.masks[0], truth)
    assert all((m == 1).all() for m in last.masks[1:])


def test_from_a_constant_start_the_budget_makes_masks_independent_of_their_rate() -> None:
    """The shift removes the common start and the ranking does not change with a factor on all gradients."""
    p = small_problem()
    p = replace(p, mask_variables=tuple(np.full_like(w, 0.7) for w in p.weights))
    slow, fast = (
        mlp.train(
            p,
            mlp.Settings(
                rate=0.1,
                mask_rate=constant(rate),
                budget=lambda step: scl.ramp_budget(66, 0.3, (step + 1) / 25),
            ),
            25,
        )
        for rate in (0.125, 1.0)
    )
    for a, b in zip(slow, fast, strict=True):
        for mask_a, mask_b in zip(a.masks, b.masks, strict=True):
            assert_array_equal(mask_a, mask_b)
