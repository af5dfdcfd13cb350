"""A network with two hidden layers, differentiated by hand and trained whole with the method.

One step: forward and backward with w = w̃ ⊙ H(m̃); w̃ and the biases follow SGD with momentum and weight decay on the
gradient ∂C/∂w, of which removed weights get a share; m̃ follows its scaled gradient and the fixed decay λ1, or its
scaled gradient alone and then the shift to an exact budget.
Both updates start from the same old w̃ and m̃.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from . import scl
from .scl import Array

IntArray = npt.NDArray[np.int64]
Tensors = tuple[Array, ...]

SCALES = ("none", "global", "batch", "per_sample")


@dataclass(frozen=True)
class Problem:
    """The data, the mini-batches (rows of the data, taken in turn) and where training starts."""

    inputs: Array
    labels: IntArray
    batches: tuple[IntArray, ...]
    weights: Tensors
    biases: Tensors
    mask_variables: Tensors


@dataclass(frozen=True)
class Settings:
    """Numbers of one run. `mask_rate` and `budget` are functions of the step, counted from 0.

    Without a `budget` the fixed `decay` λ1 acts; with one, λ1 is solved for and `decay` has to stay 0.
    """

    rate: float
    mask_rate: Callable[[int], float]
    momentum: float = 0.0
    weight_decay: float = 0.0
    removed: float = 1.0  # share of their gradient that removed weights follow
    cap: float = 0.0  # |w̃| is capped at this multiple of the total decay; 0: no cap
    mask_momentum: float = 0.0
    anchor: Callable[[int], float] = lambda step: 0.0  # share by which m̃ goes back to |w̃|
    estimator: str = "identity"
    alpha: float = 0.1
    scale: str = "none"
    power: float = 1.0
    l2_reaches_masks: bool = False
    decay: float = 0.0
    budget: Callable[[int], int] | None = None
    costs: tuple[int, ...] = (1, 1, 1)
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"expected a scale among {', '.join(SCALES)}, got {self.scale!r}")
        if self.budget is not None and self.decay != 0:
            raise ValueError(f"expected decay 0 beside a budget, got {self.decay}: give one of the two")


@dataclass(frozen=True)
class Snapshot:
    """The state after one step, the `loss` its batch had before it, and the budget's `shift` θ (else 0)."""

    weights: Tensors
    weight_variables: Tensors
    biases: Tensors
    mask_variables: Tensors
    masks: Tensors
    sparsity: float
    loss: float
    shift: float


@dataclass(frozen=True)
class Gradients:
    """The mean loss of a batch and its gradients; `per_sample` (|B|, out, in) of each sample's own."""

    loss: float
    weights: Tensors
    biases: Tensors
    per_sample: Tensors


def backpropagate(weights: Tensors, biases: Tensors, inputs: Array, labels: IntArray) -> Gradients:
    """Mean cross-entropy of softmax(W3·ReLU(W2·ReLU(W1·x + b1) + b2) + b3) and all its gradients."""
    activations = [inputs]
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        activations.append(scl.relu(activations[-1] @ weight.T + bias))
    logits = activations[-1] @ weights[-1].T + biases[-1]
    logits = logits - logits.max(axis=1, keepdims=True)
    log_probability = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    samples = np.arange(len(labels))
    loss = -float(log_probability[samples, labels].mean())

    delta = np.exp(log_probability)  # ∂L(x_b)/∂(pre-activation), layer after layer from the top
    delta[samples, labels] -= 1
    per_sample: list[Array] = []
    bias_gradients: list[Array] = []
    for weight, activation in zip(weights[::-1], activations[::-1], strict=True):
        per_sample.insert(0, delta[:, :, None] * activation[:, None, :])
        bias_gradients.insert(0, delta.mean(axis=0))
        delta = (delta @ weight) * (activation > 0)
    mean_gradients = tuple(g.mean(axis=0) for g in per_sample)
    return Gradients(loss, mean_gradients, tuple(bias_gradients), tuple(per_sample))


def scaled_mask_gradients(
    gradients: Gradients, weight_variables: Tensors, mask_variables: Tensors, settings: Settings
) -> Tensors:
    """ĝ of every tensor. Where L2 reaches the masks it is in each sample's loss, hence in every scale."""
    sigma = scl.estimator(settings.estimator, settings.alpha)
    l2 = settings.weight_decay / 2 if settings.l2_reaches_masks else 0.0
    raw = tuple(
        scl.mask_gradient(g, w, m, sigma=sigma, l2=l2)
        for g, w, m in zip(gradients.weights, weight_variables, mask_variables, strict=True)
    )
    if settings.scale == "none":
        return raw
    rows = scl.Layout()
    scales: list[Array | float]
    if settings.scale == "global":
        scales = [scl.global_scale(raw)] * len(raw)
    elif settings.scale == "batch":
        scales = [scl.batch_scale(g, rows) for g in raw]
    else:
        scales = [
            scl.per_sample_scale(g + 2 * l2 * w, w, rows)
            for g, w in zip(gradients.per_sample, weight_variables, strict=True)
        ]
    return tuple(scl.normalise(g, s, power=settings.power) for g, s in zip(raw, scales, strict=True))


def sgd_step(
    value: Array, velocity: Array, gradient: Array, *, rate: float, momentum: float, weight_decay: float
) -> tuple[Array, Array]:
    """v ← μ·v + gradient + weight decay·value, value ← value − rate·v; no dampening, no Nesterov."""
    velocity = momentum * velocity + gradient + weight_decay * value
    return value - rate * velocity, velocity


def train(problem: Problem, settings: Settings, steps: int) -> tuple[Snapshot, ...]:
    """Train for that many steps and return the state after each."""
    weights, biases, masks = list(problem.weights), list(problem.biases), list(problem.mask_variables)
    weight_velocity, bias_velocity, mask_velocity = (
        [np.zeros_like(tensor) for tensor in group] for group in (weights, biases, masks)
    )
    trajectory: list[Snapshot] = []
    level, usual = 0.0, np.sqrt(np.mean(np.concatenate([each.ravel() for each in weights]) ** 2))
    for step in range(steps):
        rows = problem.batches[step % len(problem.batches)]
        used, kept = tuple(map(scl.masked_weight, weights, masks)), [scl.unit_step(mask) for mask in masks]
        gradients = backpropagate(used, tuple(biases), problem.inputs[rows], problem.labels[rows])
        mask_gradients = scaled_mask_gradients(gradients, tuple(weights), tuple(masks), settings)
        sgd = partial(sgd_step, rate=settings.rate, momentum=settings.momentum, weight_decay=settings.weight_decay)
        decay = partial(
            scl.decay_step,
            rate=settings.mask_rate(step),
            decay=settings.decay,
            momentum=settings.mask_momentum,
        )
        for i in range(len(weights)):
            masks[i], mask_velocity[i] = decay(masks[i], mask_velocity[i], mask_gradients[i])
            size = np.minimum(np.abs(weights[i]), settings.cap * max(level, usual) if settings.cap else np.inf)
            masks[i] = masks[i] + settings.anchor(step) * (size - masks[i])
            share = np.where(kept[i] > 0, 1.0, settings.removed).astype(kept[i].dtype)
            weights[i], weight_velocity[i] = sgd(weights[i], weight_velocity[i], share * gradients.weights[i])
            biases[i], bias_velocity[i] = sgd(biases[i], bias_velocity[i], gradients.biases[i])
        level = level * (1.0 - settings.anchor(step)) + settings.mask_rate(step) * settings.decay
        shift = 0.0
        if settings.budget is not None:
            protected = scl.floor_positions(masks, settings.floor)
            outcome = scl.exact_budget(masks, settings.costs, settings.budget(step), protected=protected)
            masks, shift = list(outcome.mask_variables), outcome.shift
            level += shift
        trajectory.append(snapshot(tuple(weights), tuple(biases), tuple(masks), gradients.loss, shift))
    return tuple(trajectory)


def snapshot(variables: Tensors, biases: Tensors, mask_variables: Tensors, loss: float, shift: float) -> Snapshot:
    masks = tuple(map(scl.unit_step, mask_variables))
    connections = sum(int(m.sum()) for m in masks)
    return Snapshot(
        weights=tuple(map(scl.masked_weight, variables, mask_variables)),
        weight_variables=variables,
        biases=biases,
        mask_variables=mask_variables,
        masks=masks,
        sparsity=1 - connections / sum(m.size for m in masks),
        loss=loss,
        shift=shift,
    )
