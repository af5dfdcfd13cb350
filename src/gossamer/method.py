"""Automatic Sparse Connectivity Learning, the method of the paper, as functions of tensors.

| paper | here             | meaning                                                        |
|-------|------------------|----------------------------------------------------------------|
| w̃     | `weight`         | weight variable: dense, always trained                         |
| m̃     | `mask_variable`  | mask variable: real, trained, starts positive                  |
| m     | `mask`           | H(m̃): True where there is a connection                         |
| w     | masked weight    | w̃ ⊙ m: what the layer uses                                     |
| ∂L/∂w | `gradient`       | gradient that back-propagation delivers for w                  |
| s_j   | `scale`          | size of the mask gradient of output feature j                  |
| λ1    | `decay`          | connectivity decay: pushes every mask variable down            |
| λ2    | `l2`             | coefficient of the L2 term on w̃                                |

One step of the method: masks and weights of the forward pass by Eqs. (step) and (mask); the weight variable is
updated with the gradient of Eq. (weight_redefine) by whatever optimizer the user has; the mask variable with that
of Eqs. (step_redefine), (grad_norm) and (connectivity) by gradient descent. Every `Eq. (name)` carries the
paper's label and is claimed by a test.

Departures, all measured and all optional: the scale may be one number for the whole network (`global`) instead of one a
feature; λ1 may be solved for instead of chosen (see budget.py); mask variables may go back to the size of their weights
by a share a step, and removed weights follow only a part of their gradient.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

# Far below the smallest mask gradients seen in deep networks (about 1e-7 in ResNet-110).
EPSILON = 1e-12


def unit_step(mask_variable: Tensor) -> Tensor:
    """Eq. (step): m = H(m̃), which is 0 at exactly 0."""
    return mask_variable > 0


def masked_weight(weight: Tensor, mask: Tensor) -> Tensor:
    """Eq. (mask) and, after training, Eq. (sparseweights): w = w̃ ⊙ m. Pruned weights are exactly +0."""
    return torch.where(mask, weight, 0.0)


# --- the straight-through estimators: σ' stands in for the derivative of the unit step ------------------------------


def _identity(m: Tensor, alpha: float) -> Tensor:
    """Eq. (identity): σ(x) = x. Also Eq. (step_redefine3)."""
    return torch.ones_like(m)


def _leaky_relu(m: Tensor, alpha: float) -> Tensor:
    """Eq. (lrelu): σ(x) = max(x, αx)."""
    return torch.where(m > 0, torch.ones_like(m), alpha)


def _softplus(m: Tensor, alpha: float) -> Tensor:
    """Eq. (softplus): σ(x) = log(1 + exp x)."""
    return torch.sigmoid(m)


def _relu(m: Tensor, alpha: float) -> Tensor:
    """Eq. (relu): σ(x) = max(0, x). A mask variable that falls to 0 or below never moves again."""
    return (m > 0).to(m.dtype)


def _clipped_relu(m: Tensor, alpha: float) -> Tensor:
    """Eq. (crelu): σ(x) = min(max(0, x), α). Dead below 0 and above α."""
    return ((m > 0) & (m <= alpha)).to(m.dtype)


ESTIMATORS: Mapping[str, Callable[[Tensor, float], Tensor]] = MappingProxyType(
    {
        "identity": _identity,
        "leaky_relu": _leaky_relu,
        "softplus": _softplus,
        "relu": _relu,
        "clipped_relu": _clipped_relu,
    }
)
"""Proxy derivatives σ'(m̃). The paper's principle, Eq. (ste_l2_gradient_0): only a positive σ' moves every mask
variable towards its optimum; identity, leaky ReLU and softplus satisfy it."""


# --- the gradients, redefined ---


def weight_gradient(gradient: Tensor, mask: Tensor, *, removed: float, out: Tensor | None = None) -> Tensor:
    """∂L/∂w̃ from ∂L/∂w, which is what autograd gives.

    `removed` = 1, Eq. (weight_redefine): ∂L/∂w̃ := ∂L/∂w, so that removed weights go on training. `removed` = 0,
    Eq. (w_gradient): ∂L/∂w̃ = ∂L/∂w ⊙ m, with which they rest. Between the two: ours.
    """
    return torch.where(mask, gradient, gradient * removed, out=out)


def mask_rate(steps: int) -> float:
    """The learning rate of mask variables that we take where none is asked for, by the steps in which they learn: in
    few steps they could not get anywhere with that of long runs (section 28 of docs/lab-book.md)."""
    return min(max(0.003, 60.0 / max(1, steps)), 0.015)


def removed_share(left: float | None) -> float:
    """The share `removed` above that we take where none is asked for: the smaller, the fewer connections shall be left
    (a power law through what section 27 of docs/lab-book.md has measured); half, where that is not known."""
    return 0.5 if left is None else math.pow(left, 0.4)


def settled(mask_lr: float | None, removed: float | None, *, steps: int, left: float | None) -> dict[str, float]:
    """Both by the names of their settings: as asked for, or as above."""
    return {
        "mask_lr": mask_rate(steps) if mask_lr is None else mask_lr,
        "removed_gradient": removed_share(left) if removed is None else removed,
    }


def mask_gradient(
    gradient: Tensor,
    weight: Tensor,
    mask_variable: Tensor,
    *,
    estimator: str = "identity",
    alpha: float = 0.1,
    l2: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Eq. (step_redefine): ∂L/∂m̃ := (∂L/∂w ⊙ w̃) · σ'(m̃).

    With `l2` the gradient of the L2 term of Eq. (loss) counts too: (∂C/∂w + 2·λ2·w̃) ⊙ w̃. The paper says that this
    term pushes masks down, although as it is written, on w̃, it does not depend on m.
    """
    if l2:
        gradient = gradient + weight * (2.0 * l2)
    result = torch.mul(gradient, weight, out=out)
    if estimator != "identity":
        result.mul_(ESTIMATORS[estimator](mask_variable, alpha))
    return result


# --- the scale of the mask gradient ---


def by_feature(tensor: Tensor, axis: int = 0, groups: int = 1) -> Tensor:
    """View `tensor` as (output features, connections of the feature).

    The features of a transposed convolution lie on axis 1, once for each group of input channels.
    """
    if axis == 0:
        return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    inputs, size = tensor.shape[0] // groups, math.prod(tensor.shape[2:])
    grouped = tensor.reshape(groups, inputs, tensor.shape[1], size)
    return grouped.transpose(1, 2).reshape(groups * tensor.shape[1], inputs * size)


def along_features(scale: Tensor, tensor: Tensor, axis: int = 0, groups: int = 1) -> Tensor:
    """Lay one number a feature out so that it multiplies `tensor`: the inverse of `by_feature`."""
    ones = [1] * (tensor.dim() - 2)
    if axis == 0:
        return scale.reshape(-1, 1, *ones)
    rows = scale.reshape(groups, 1, -1).expand(groups, tensor.shape[0] // groups, -1)
    return rows.reshape(tensor.shape[0], tensor.shape[1], *ones)


def feature_scale(gradient: Tensor, axis: int = 0, groups: int = 1) -> Tensor:
    """The `batch` reading of Eq. (grad_norm): s_j = root mean square of the mini-batch mask gradient of feature j."""
    rows = by_feature(gradient, axis, groups)
    return rows.square().mean(dim=1).sqrt()


def sample_scale(total: Tensor, samples: int, connections: int) -> Tensor:
    """The literal Eq. (grad_norm), `per_sample`, from Q_j = Σ_b Σ_k (g_bk w̃_k)² as the moments package sums it.

    A mean-reduced loss delivers g_b already divided by |B|, hence |B|²·Q / (|B|·|w_j|).
    """
    return (total * (samples / connections)).sqrt()


def global_scale(sums_of_squares: Tensor, connections: int) -> Tensor:
    """One root mean square of the mask gradient for the whole network, from one sum of squares a tensor (ours)."""
    return (sums_of_squares.sum() / connections).sqrt()


def divisor(scale: Tensor) -> Tensor:
    """What the mask gradient is divided by, Eq. (grad_norm): s + ε.

    A feature without any gradient in this step (s = 0, such as a token that did not occur) is left alone.
    """
    return torch.where(scale > 0, scale + EPSILON, 1.0)


# --- the update ---


def descent_direction_(scaled_gradient: Tensor, *, decay: float) -> Tensor:
    """Eq. (connectivity): λ1·Σm adds λ1 to the gradient of every mask variable; it is never scaled."""
    return scaled_gradient.add_(decay) if decay else scaled_gradient


def update_mask_variable_(mask_variable: Tensor, direction: Tensor, *, learning_rate: Tensor) -> Tensor:
    """Gradient descent on m̃. `direction` is used up."""
    return mask_variable.sub_(direction.mul_(learning_rate))


def anchor_mask_variable_(mask_variable: Tensor, magnitude: Tensor, *, share: Tensor | float) -> Tensor:
    """m̃ goes back to |w̃| by a share each step, so that it remembers the last 1/share steps and not all of them (ours).

    The order of the masks is what counts, so it does not matter by how much λ1 has lowered all of them before.
    `magnitude` is used up.
    """
    return mask_variable.add_(magnitude.sub_(mask_variable).mul_(share))


def cosine(progress: float) -> float:
    """Factor of the mask learning rate: 1 at the beginning of the mask phases, 0 at their end (ours)."""
    return 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
