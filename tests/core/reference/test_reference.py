"""The equations of the reference, checked by numbers worked out by hand and by exhaustive search."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from . import scl
from .scl import Array

TINY = float(np.finfo(np.float32).tiny)
ROWS = scl.Layout()


def array(*numbers: float) -> Array:
    return np.array(numbers, dtype=np.float64)


def test_only_numpy_is_imported() -> None:
    for file in Path(__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        packages = {name.split(".")[0] for name in names}
        assert "gossamer" not in packages, file.name
        assert "torch" not in packages or file.name.startswith("test_"), file.name


# ---- Masks and estimators ------------------------------------------------------------------------


def test_unit_step_is_zero_at_zero() -> None:
    assert_array_equal(scl.unit_step(array(-1, -0.0, 0, 1e-300, 2)), array(0, 0, 0, 1, 1))
    assert_array_equal(scl.masked_weight(array(3, -4, 5), array(1, 2, 0)), array(3, -4, 0))


@pytest.mark.parametrize(
    ("name", "values", "slopes"),
    [
        ("identity", (-2, 0, 0.5, 3), (1, 1, 1, 1)),
        ("leaky_relu", (-0.5, 0, 0.5, 3), (0.25, 0.25, 1, 1)),
        (
            "softplus",
            (0.126928011, 0.693147181, 0.974076984, 3.048587352),
            (0.119202922, 0.5, 0.622459331, 0.952574127),
        ),
        ("relu", (0, 0, 0.5, 3), (0, 0, 1, 1)),
        ("clipped_relu", (0, 0, 0.25, 0.25), (0, 0, 0, 0)),
    ],
)
def test_estimators_by_hand(name: str, values: tuple[float, ...], slopes: tuple[float, ...]) -> None:
    sigma = scl.estimator(name, alpha=0.25)
    points = array(-2, 0, 0.5, 3)
    assert_allclose(sigma.function(points), values, atol=1e-9)
    assert_allclose(sigma.derivative(points), slopes, atol=1e-9)
    assert sigma.derivative(points.astype(np.float32)).dtype == np.float32


@pytest.mark.parametrize("name", ["identity", "leaky_relu", "softplus", "relu", "clipped_relu"])
def test_estimators_are_derivatives_of_their_functions(name: str) -> None:
    sigma = scl.estimator(name, alpha=0.7)
    points = np.linspace(-3.03, 3.01, 41)  # misses the kinks
    slope = (sigma.function(points + 1e-6) - sigma.function(points - 1e-6)) / 2e-6
    assert_allclose(sigma.derivative(points), slope, atol=1e-8)


def test_clipped_relu_rises_up_to_its_bound() -> None:
    assert_array_equal(scl.estimator("clipped_relu", 1.0).derivative(array(0, 0.5, 1, 1.5)), array(0, 1, 1, 0))


def test_softplus_does_not_overflow() -> None:
    sigma = scl.estimator("softplus")
    assert_allclose(sigma.derivative(array(-1000, 1000)), array(0, 1))
    assert_allclose(sigma.function(array(-1000, 1000)), array(0, 1000))


@pytest.mark.parametrize(
    ("name", "stuck"),
    [("identity", ()), ("leaky_relu", ()), ("softplus", ()), ("relu", (0,)), ("clipped_relu", (0, 3))],
)
def test_positive_proxies_reach_the_optimal_mask_and_the_others_have_dead_zones(
    name: str, stuck: tuple[int, ...]
) -> None:
    """The paper's realisable case ½(H(m̃) − m*)²: ReLU is dead below 0, the clipped one above α as well."""
    optimum, start = array(1, 0, 1, 0), array(-0.5, -0.5, 1.5, 1.5)
    sigma = scl.estimator(name, alpha=0.5)
    m = start.copy()
    for _ in range(400):
        m = m - 0.05 * (scl.unit_step(m) - optimum) * sigma.derivative(m)
    wrong = np.flatnonzero(scl.unit_step(m) != optimum)
    assert tuple(wrong) == stuck
    assert_array_equal(m[wrong], start[wrong])


def test_mask_gradient_by_hand() -> None:
    g, w, m = array(1, -2, 3), array(2, 3, -1), array(1, -1, 0)
    identity, leaky = scl.estimator("identity"), scl.estimator("leaky_relu", 0.5)
    assert_allclose(scl.mask_gradient(g, w, m, sigma=identity), array(2, -6, -3))
    assert_allclose(scl.mask_gradient(g, w, m, sigma=leaky), array(2, -3, -1.5))
    # (g + 2·0.25·w̃) ⊙ w̃ = (1 + 1)·2, (−2 + 1.5)·3, (3 − 0.5)·(−1)
    assert_allclose(scl.mask_gradient(g, w, m, sigma=identity, l2=0.25), array(4, -1.5, -2.5))


# ---- Scales --------------------------------------------------------------------------------------


def test_scales_by_hand() -> None:
    g = np.array([[3.0, 4.0], [0.0, 0.0], [1.0, 1.0]])
    assert_allclose(scl.batch_scale(g, ROWS), np.array([[12.5**0.5] * 2, [0, 0], [1, 1]]))
    assert scl.global_scale([g, array(5, 8)]) == pytest.approx(((25 + 2 + 89) / 8) ** 0.5)
    # two samples: products 1·2, 0·3 and 3·2, 2·3 -> s² = (4 + 0 + 36 + 36) / (2·2)
    per_sample = np.array([[[1.0, 0.0]], [[3.0, 2.0]]])
    assert_allclose(scl.per_sample_scale(per_sample, np.array([[2.0, 3.0]]), ROWS), np.full((1, 2), 19**0.5))


def test_normalised_features_have_unit_mean_square_and_empty_ones_are_left_alone() -> None:
    g = np.array([[3.0, 4.0], [0.0, 0.0], [1e-7, -1e-7]])
    normalised = scl.normalise(g, scl.batch_scale(g, ROWS))
    assert_allclose((normalised**2).mean(axis=1), array(1, 0, 1), rtol=1e-4)
    assert_array_equal(np.sign(normalised), np.sign(g))
    assert_array_equal(scl.normalise(g, scl.batch_scale(g, ROWS), power=0.0), g)
    assert_allclose(scl.normalise(array(6), array(4), power=0.5), array(3))
    assert_allclose(scl.normalise(array(6, 8), array(0, 4)), array(6, 2))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_features_of_convolutions_are_the_weights_an_output_channel_depends_on(transposed: bool, groups: int) -> None:
    """Autograd says which weights reach a channel; the scale is the root mean square over just those."""
    layer: torch.nn.Module
    if transposed:
        layer = torch.nn.ConvTranspose2d(4, 6, 3, groups=groups, bias=False, dtype=torch.float64)
    else:
        layer = torch.nn.Conv2d(4, 6, 3, groups=groups, bias=False, dtype=torch.float64)
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    g = np.random.default_rng(0).normal(size=tuple(weight.shape))
    scale = scl.batch_scale(g, scl.Layout(transposed=transposed, groups=groups))
    output = layer(torch.ones(1, 4, 5, 5, dtype=torch.float64))
    members_seen = 0
    for channel in range(6):
        (reached,) = torch.autograd.grad(output[:, channel].sum(), weight, retain_graph=True)
        members = reached.numpy() != 0
        assert_allclose(scale[members], np.sqrt((g[members] ** 2).mean()))
        members_seen += int(members.sum())
    assert members_seen == g.size


# ---- Decay and budget ----------------------------------------------------------------------------


def test_decay_step_by_hand() -> None:
    m, v = scl.decay_step(array(1, 0.5), array(0, 0), array(2, -1), rate=0.1, decay=0.5, momentum=0.9)
    assert_allclose(m, array(1 - 0.25, 0.5 + 0.05))
    m, v = scl.decay_step(m, v, array(0, 0), rate=0.1, decay=0.5, momentum=0.9)
    assert_allclose(v, array(0.9 * 2.5 + 0.5, 0.9 * -0.5 + 0.5))
    assert_allclose(m, array(0.75 - 0.275, 0.55 - 0.005))


def kept(outcome: scl.BudgetStep) -> list[int]:
    return [int(i) for i in np.flatnonzero(np.concatenate([m.ravel() for m in outcome.mask_variables]) > 0)]


def test_budget_shifts_by_the_largest_dropped_value() -> None:
    outcome = scl.exact_budget([np.array([[5.0, 1.0], [3.0, 4.0]]), array(2, -1)], [1, 1], 3)
    assert outcome.shift == 2
    assert_array_equal(outcome.mask_variables[0], np.array([[3.0, -1.0], [1.0, 2.0]]))
    assert_array_equal(outcome.mask_variables[1], array(0, -3))


def test_budget_below_zero_brings_connections_back() -> None:
    outcome = scl.exact_budget([array(1, -2, -1, -5)], [1], 3)
    assert outcome.shift == -5
    assert_array_equal(outcome.mask_variables[0], array(6, 3, 4, 0))


def test_ties_go_to_the_earlier_position() -> None:
    outcome = scl.exact_budget([array(1, 1), array(1, 1)], [1, 1], 3)
    assert_array_equal(outcome.mask_variables[0], array(TINY, TINY))
    assert_array_equal(outcome.mask_variables[1], array(TINY, 0))


def test_everything_and_nothing() -> None:
    m = array(3, -1)
    outcome = scl.exact_budget([m], [1], 2)
    assert_array_equal(outcome.mask_variables[0], array(3, TINY))
    assert outcome.shift == 0
    assert kept(scl.exact_budget([m], [1], 0)) == []
    assert kept(scl.exact_budget([array(7)], [1], 1)) == [0]


def test_costs_weigh_the_decay_and_the_run_ends_at_the_first_that_does_not_fit() -> None:
    # m̃/c: 4, 1 | 3, 2.5 -> order 0, 2, 3, 1 with costs 1, 4, 4, 1: a budget of 5 takes 0 and 2
    tensors = [array(4, 1), array(12, 10)]
    outcome = scl.exact_budget(tensors, [1, 4], 5)
    assert outcome.shift == 2.5
    assert_array_equal(outcome.mask_variables[0], array(1.5, -1.5))
    assert_array_equal(outcome.mask_variables[1], array(2, 0))
    assert kept(scl.exact_budget(tensors, [1, 4], 8)) == [0, 2]  # 3 does not fit; 1 would, but comes later
    assert kept(scl.exact_budget(tensors, [1, 4], 9)) == [0, 2, 3]


def test_free_connections_are_kept_and_not_decayed() -> None:
    outcome = scl.exact_budget([array(0.1, -3), array(9, 8)], [0, 1], 1)
    assert_array_equal(outcome.mask_variables[0], array(0.1, TINY))
    assert_array_equal(outcome.mask_variables[1], array(1, 0))


def test_protected_connections_count_first() -> None:
    outcome = scl.exact_budget([array(9, 8, 7, 1)], [1], 2, protected={3})
    assert_array_equal(outcome.mask_variables[0], array(1, 0, -1, TINY))
    with pytest.raises(ValueError, match=r"at least 2.*got 1"):
        scl.exact_budget([array(9, 8, 7, 1)], [1], 1, protected={0, 3})


def test_floor_takes_the_top_of_every_tensor() -> None:
    tensors = [array(1, 3, 3, 2), np.arange(11.0)]
    assert scl.floor_positions(tensors, 0.25) == {1, 4 + 8, 4 + 9, 4 + 10}  # ⌈0.25·4⌉ = 1, ⌈0.25·11⌉ = 3
    assert scl.floor_positions(tensors, 1e-6) == {1, 14}
    assert scl.floor_positions(tensors, 0.0) == set()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", range(5))
def test_budget_agrees_with_searching_the_decay(seed: int, dtype: type) -> None:
    """Distinct values: kept is {m̃ − λc > 0} for the smallest λ that fits, found by trying them all."""
    rng = np.random.default_rng(seed)
    tensors: list[Array] = [rng.normal(size=shape).astype(dtype) for shape in ((3, 4), (5,), (2, 2, 2))]
    costs = [3, 1, 7]
    cost = np.repeat(costs, [t.size for t in tensors])
    value = np.concatenate([t.ravel() for t in tensors]) / cost.astype(dtype)
    for budget in range(0, int(cost.sum()), 7):
        candidates = [threshold for threshold in value if cost[value > threshold].sum() <= budget]
        threshold = min(candidates)
        outcome = scl.exact_budget(tensors, costs, budget)
        assert kept(outcome) == list(np.flatnonzero(value > threshold))
        assert outcome.shift == threshold
        assert all(m.dtype == dtype for m in outcome.mask_variables)


def test_schedules_by_hand() -> None:
    # κ(½) = 0.1 + 0.9/8 = 0.2125
    assert [scl.ramp_budget(1000, 0.1, t) for t in (0.0, 0.5, 1.0)] == [1000, 213, 100]
    assert scl.ramp_budget(5, 0.5, 1.0) == 3  # 2.5 rounds up, where rounding to even would give 2
    assert [scl.cosine_rate(2.0, t) for t in (0.0, 0.5, 1.0)] == pytest.approx([2.0, 1.0, 0.0])
