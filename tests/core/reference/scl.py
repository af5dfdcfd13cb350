"""Sparse connectivity learning, equation by equation, on plain arrays.

    w̃   weight variable, dense, always trained     m̃   mask variable, real-valued
    m    mask, H(m̃)                                 w   weight the layer uses, w̃ ⊙ m
    g    mask gradient, (∂L/∂w ⊙ w̃)·σ'(m̃)           s   its scale, one number a feature or one for the network
    λ1   connectivity decay                         λ2  L2 penalty λ2 Σ w̃², which is weight decay 2λ2 in SGD

Every function keeps the precision of its inputs. Clarity goes before speed: the budget is a walk along a
sorted list.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]

EPSILON = 1e-12
SMALLEST_POSITIVE = float(np.finfo(np.float32).tiny)


# ---- Masks and estimators ------------------------------------------------------------------------


def unit_step(mask_variable: Array) -> Array:
    """H(m̃): 1 where m̃ > 0, else 0, so 0 at exactly 0."""
    return (mask_variable > 0).astype(mask_variable.dtype)


def masked_weight(weight_variable: Array, mask_variable: Array) -> Array:
    """w = w̃ ⊙ H(m̃)."""
    return weight_variable * unit_step(mask_variable)


@dataclass(frozen=True)
class Estimator:
    """A function σ that stands in for H in the backward pass, with its derivative.

    At a kink the derivative is that of the left side, as H(0) = 0 demands: ReLU is flat at 0, and the
    clipped ReLU, which is ReLU(m̃) − ReLU(m̃ − α), still rises at its bound α.
    """

    function: Callable[[Array], Array]
    derivative: Callable[[Array], Array]


def relu(x: Array) -> Array:
    return x * unit_step(x)


def sigmoid(x: Array) -> Array:
    decaying = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1 / (1 + decaying), decaying / (1 + decaying)).astype(x.dtype)


def estimator(name: str, alpha: float = 0.1) -> Estimator:
    """The estimator of that name; `alpha` is the slope of `leaky_relu` and the bound of `clipped_relu`."""
    estimators = {
        "identity": Estimator(lambda m: m, np.ones_like),
        "leaky_relu": Estimator(
            lambda m: np.where(m > 0, m, alpha * m),
            lambda m: np.where(m > 0, m.dtype.type(1), m.dtype.type(alpha)),
        ),
        "softplus": Estimator(lambda m: np.logaddexp(m.dtype.type(0), m), sigmoid),
        "relu": Estimator(relu, unit_step),
        "clipped_relu": Estimator(lambda m: relu(m) - relu(m - alpha), lambda m: unit_step(m) - unit_step(m - alpha)),
    }
    return estimators[name]


def mask_gradient(
    weight_gradient: Array,
    weight_variable: Array,
    mask_variable: Array,
    *,
    sigma: Estimator,
    l2: float = 0.0,
) -> Array:
    """g = (∂C/∂w + 2λ2 w̃) ⊙ w̃ · σ'(m̃); with `l2` (λ2) at 0, L2 does not reach the masks."""
    return (weight_gradient + 2 * l2 * weight_variable) * weight_variable * sigma.derivative(mask_variable)


# ---- Scales of the mask gradient -----------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where a weight keeps its output features: axis 0; in transposed convolutions axis 1 of each group."""

    transposed: bool = False
    groups: int = 1


def feature_mean(values: Array, layout: Layout) -> Array:
    """The mean over all weights of the same output feature, repeated for each of them."""
    if layout.transposed:  # (in, out / groups, …): the groups are consecutive blocks of input channels
        blocks = values.reshape(layout.groups, values.shape[0] // layout.groups, *values.shape[1:])
        inside_a_feature = (1, *range(3, blocks.ndim))
    else:
        blocks = values
        inside_a_feature = tuple(range(1, blocks.ndim))
    means = blocks.mean(axis=inside_a_feature, keepdims=True)
    return np.broadcast_to(means, blocks.shape).reshape(values.shape)


def global_scale(gradients: Sequence[Array]) -> float:
    """One root mean square over the mask gradients of all tensors."""
    return math.sqrt(sum(float((g**2).sum()) for g in gradients) / sum(g.size for g in gradients))


def batch_scale(gradient: Array, layout: Layout) -> Array:
    """Per feature, the root mean square over its weights of the mini-batch mask gradient."""
    return np.sqrt(feature_mean(gradient**2, layout))


def per_sample_scale(per_sample_gradients: Array, weight_variable: Array, layout: Layout) -> Array:
    """Per feature, s = √( Σ_b Σ_k (∂L(x_b)/∂w_k · w̃_k)² / (|B|·|w_j|) ), as the paper prints it (without σ').

    `per_sample_gradients` has the shape (|B|, *weight) and holds the gradient of each sample's own loss, not
    1/|B| of it.
    """
    return np.sqrt(feature_mean(((per_sample_gradients * weight_variable) ** 2).mean(axis=0), layout))


def normalise(gradient: Array, scale: Array | float, *, power: float = 1.0) -> Array:
    """ĝ = g / (s + ε)^power; where s is 0 the gradient is left as it is."""
    scale = np.asarray(scale, dtype=gradient.dtype)
    return gradient / np.where(scale > 0, (scale + EPSILON) ** power, gradient.dtype.type(1))


# ---- Connectivity decay --------------------------------------------------------------------------


def decay_step(
    mask_variable: Array,
    velocity: Array,
    gradient: Array,
    *,
    rate: float,
    decay: float,
    momentum: float = 0.0,
) -> tuple[Array, Array]:
    """m̃ ← m̃ − rate·v with v ← μ·v + ĝ + λ1: λ1 is never normalised, masks have no weight decay."""
    velocity = momentum * velocity + gradient + decay
    return mask_variable - rate * velocity, velocity


# ---- The exact budget ----------------------------------------------------------------------------


@dataclass(frozen=True)
class BudgetStep:
    """The shifted mask variables; `shift` θ is the rate·λ1 of the decay that would have done the same."""

    mask_variables: tuple[Array, ...]
    shift: float


def by_decreasing_value(values: Array) -> list[int]:
    """Positions from the largest value to the smallest, the earlier position first among equals."""
    return sorted(range(values.size), key=lambda i: (-values[i], i))


def floor_positions(mask_variables: Sequence[Array], share: float) -> set[int]:
    """Flat positions of each tensor's top max(1, ⌈share·n⌉) mask variables; a share of 0 protects nothing."""
    protected: set[int] = set()
    start = 0
    for tensor in mask_variables:
        count = max(1, math.ceil(share * tensor.size)) if share > 0 else 0
        protected.update(start + i for i in by_decreasing_value(tensor.ravel())[:count])
        start += tensor.size
    return protected


def exact_budget(
    mask_variables: Sequence[Array], costs: Sequence[int], budget: int, *, protected: set[int] | None = None
) -> BudgetStep:
    """Shift all mask variables by one common θ, times their cost, so that the positive ones fit the budget.

    Kept are the protected positions, everything that costs nothing, and then the longest run of the others
    by decreasing m̃/cost that still fits; it ends at the first that does not. θ is the largest m̃/cost that is
    dropped (0 if none is, below 0 if masks have to come back). A kept variable that the shift leaves at or
    below 0 (a tie with θ, or a protected one) is lifted to the smallest positive normal float32; a dropped
    one that rounding leaves above 0 becomes 0. Free connections are not shifted at all.
    """
    flat = np.concatenate([tensor.ravel() for tensor in mask_variables])
    cost = [c for tensor, c in zip(mask_variables, costs, strict=True) for _ in range(tensor.size)]
    kept = {i for i in range(flat.size) if cost[i] == 0} | (protected or set())
    spent = sum(cost[i] for i in kept)
    if spent > budget:
        raise ValueError(
            f"expected a budget of at least {spent}, the cost of the protected connections, got {budget}: "
            "raise the budget or lower the floor"
        )
    value = flat / np.maximum(cost, 1).astype(flat.dtype)
    candidates = [i for i in by_decreasing_value(value) if i not in kept]
    dropped_from = len(candidates)
    for place, i in enumerate(candidates):
        if spent + cost[i] > budget:
            dropped_from = place
            break
        spent += cost[i]
        kept.add(i)
    theta = value[candidates[dropped_from]] if dropped_from < len(candidates) else flat.dtype.type(0)

    shifted = flat.copy()
    for i in range(flat.size):
        shifted[i] = flat[i] - theta * cost[i]
        if i in kept and shifted[i] <= 0:
            shifted[i] = SMALLEST_POSITIVE
        if i not in kept and shifted[i] > 0:
            shifted[i] = 0
    ends = np.cumsum([tensor.size for tensor in mask_variables])
    pieces = np.split(shifted, ends[:-1])
    return BudgetStep(tuple(p.reshape(t.shape) for p, t in zip(pieces, mask_variables, strict=True)), float(theta))


# ---- Schedules, t from 0 at the start of the sparsify phase to 1 at its end ----------------------


def ramp_budget(total: int, target: float, t: float) -> int:
    """κ(t)·total with κ(t) = target + (1 − target)(1 − t)³, rounded half up to a whole number."""
    share = target + (1 - target) * (1 - t) ** 3
    return math.floor(share * total + 0.5)


def cosine_rate(start: float, t: float) -> float:
    """A learning rate that falls from `start` to 0 along half a cosine."""
    return start * 0.5 * (1 + math.cos(math.pi * t))
