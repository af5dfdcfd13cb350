"""Automatic Sparse Connectivity Learning (SCL), the method of the paper, equation by equation.

This is the code that runs: in `gossamer.Sparsifier` for one run, and in batched training for many.

| paper | here             | meaning                                                        |
|-------|------------------|----------------------------------------------------------------|
| w̃     | `weight`         | weight variable: dense, always trained                         |
| m̃     | `mask_variable`  | mask variable: real, trained, starts positive                  |
| m     | `mask`           | H(m̃): True where the weight is kept                            |
| w     | masked weight    | w̃ ⊙ m: the weight in the forward pass                          |
| ∂L/∂w | `gradient`       | gradient that back-propagation delivers for w                  |
| s_j   | `scale`          | size of the mask gradient of output feature j                  |
| λ1    | `decay`          | connectivity decay: pushes every mask variable down            |
| λ2    | `l2`             | coefficient of the L2 term on w̃                                |

The first part has the equations, as functions of tensors. The second part, `SCL`, takes a step: the mask variables
follow the gradient of Eqs. (step_redefine), (grad_norm) and (connectivity) by gradient descent, and Eq. (step) gives
the masks. The user's optimizer updates w̃ with the gradient of Eq. (weight_redefine). Every `Eq. (name)` has the
paper's label and is tested.

Departures from the paper, all measured and all optional:
- λ1 is solved for instead of set, so that the budget is met exactly (budget.py).
- The scale is one number for the whole network (`global`) instead of one per feature (`batch`, `per_sample`).
- Mask variables start at |w̃| and decay towards it by the fraction `mask_decay` per step, so that they remember about
  1/`mask_decay` steps.
- The gradient of pruned weights is multiplied by `pruned_grad_scale`.
- The learning rate of the mask variables decays to zero.
- With `mask_speed`, mask variables learn from the steps that the optimizer takes on w̃ instead of from the gradient, and
  with `fade` weights enter and leave the network continuously. Both are the default under adaptive optimizers
  (settings.py).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.budget import has_triton, on_cpu
from gossamer.methods.base import (
    Block,
    Context,
    Layout,
    Options,
    Outcome,
    Part,
    Request,
    Step,
    TensorView,
    column,
    expect,
    is_rate,
    one_of,
)
from gossamer.methods.blocks import Blocks
from gossamer.methods.budgets import GlobalThreshold, magnitude
from gossamer.methods.patterned import make_budget, share_over_groups_, tied_groups
from gossamer.prunable import along_features, by_feature
from gossamer.schedule import ANNEALS

# Far below the smallest mask gradients seen in deep networks (about 1e-7 in ResNet-110).
EPSILON = 1e-12
SCALES = ("none", "global", "batch", "per_sample")
STARTS = ("magnitude", "constant")
Alpha: TypeAlias = float | Tensor
_PIECE = 1 << 20  # weights whose final values are computed together
_MANY = 64  # from this many tensors on, one pass over all is faster than a call per tensor


# --- the masks ------------------------------------------------------------------------------------------------------


def unit_step(mask_variable: Tensor, out: Tensor | None = None) -> Tensor:
    """Eq. (step): m = H(m̃), which is 0 at exactly 0."""
    return torch.gt(mask_variable, 0, out=out)


def masked_weight(weight: Tensor, mask: Tensor) -> Tensor:
    """Eq. (mask) and, after training, Eq. (sparseweights): w = w̃ ⊙ m. Pruned weights are exactly +0."""
    return torch.where(mask, weight, 0.0)


def faded_weight(
    weight: Tensor, mask_variable: Tensor, level: Tensor | float, *, power: float, out: Tensor | None = None
) -> Tensor:
    """w = w̃ · (1 − (T / (T + m̃))^power)^(1/power) where m̃ > 0, else 0 (ours; the curve is Feather's, for |w̃|).

    T, `level`, is how far connectivity decay has lowered all mask variables, so T + m̃ is what a mask variable has
    learned. The forward pass is continuous in m̃: a weight fades in from zero when its mask variable becomes positive.
    """
    shrunk = torch.add(mask_variable, level, out=out)
    shrunk = torch.div(level, shrunk, out=shrunk).pow_(power)
    shrunk = shrunk.neg_().add_(1.0).pow_(1.0 / power).mul_(weight)
    # Weights that min_density protects have the smallest positive mask variable; they are used as they are.
    protected = mask_variable <= 2.0 * torch.finfo(mask_variable.dtype).tiny
    result = torch.where(protected, weight, shrunk, out=shrunk)
    return torch.where(mask_variable > 0, result, result.new_zeros(()), out=result)


# --- the straight-through estimators: σ' stands in for the derivative of the unit step ------------------------------


def _identity(m: Tensor, alpha: Alpha) -> Tensor:
    """Eq. (identity): σ(x) = x. Also Eq. (step_redefine3)."""
    return torch.ones_like(m)


def _leaky_relu(m: Tensor, alpha: Alpha) -> Tensor:
    """Eq. (lrelu): σ(x) = max(x, αx)."""
    return torch.where(m > 0, torch.ones_like(m), alpha)


def _softplus(m: Tensor, alpha: Alpha) -> Tensor:
    """Eq. (softplus): σ(x) = log(1 + exp x)."""
    return torch.sigmoid(m)


def _relu(m: Tensor, alpha: Alpha) -> Tensor:
    """Eq. (relu): σ(x) = max(0, x). A mask variable that falls to 0 or below never moves again."""
    return (m > 0).to(m.dtype)


def _clipped_relu(m: Tensor, alpha: Alpha) -> Tensor:
    """Eq. (crelu): σ(x) = min(max(0, x), α). Dead below 0 and above α."""
    return ((m > 0) & (m <= alpha)).to(m.dtype)


ESTIMATORS: Mapping[str, Callable[[Tensor, Alpha], Tensor]] = MappingProxyType(
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


# --- the gradients, redefined ---------------------------------------------------------------------------------------


def weight_gradient_(gradient: Tensor, mask: Tensor, mask_variable: Tensor, *, pruned_scale: Tensor | float) -> Tensor:
    """∂L/∂w̃ from the ∂L/∂w of autograd, in place. `mask` is H(`mask_variable`).

    `pruned_scale` = 1, Eq. (weight_redefine): ∂L/∂w̃ := ∂L/∂w, so pruned weights continue to train. `pruned_scale` = 0,
    Eq. (w_gradient): ∂L/∂w̃ = ∂L/∂w ⊙ m, so they do not. Values in between are ours.
    """
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}.get(gradient.dtype)
    if isinstance(pruned_scale, Tensor):
        return torch.where(mask, gradient, gradient * pruned_scale, out=gradient)
    if pruned_scale == 0.0 and bits is not None and gradient.device.type == "cpu":
        gradient.view(bits).mul_(mask)  # as integers: twice as fast, and clears NaN
        return gradient
    if pruned_scale == 1.0:
        return gradient
    if pruned_scale and gradient.dtype == mask_variable.dtype:
        # The same product in one pass, as m = H(m̃). where() branches on each element, which a CPU takes long to do.
        torch.ops.aten.leaky_relu_backward.grad_input(gradient, mask_variable, pruned_scale, False, grad_input=gradient)
        return gradient
    return torch.where(mask, gradient, gradient * pruned_scale, out=gradient)


def mask_gradient(
    gradient: Tensor,
    weight: Tensor,
    mask_variable: Tensor,
    *,
    estimator: str = "identity",
    alpha: Alpha = 0.1,
    l2: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Eq. (step_redefine): ∂L/∂m̃ := (∂L/∂w ⊙ w̃) · σ'(m̃).

    With `l2`, the gradient of the L2 term of Eq. (loss) is included: (∂C/∂w + 2·λ2·w̃) ⊙ w̃. The paper says that this
    term pushes masks down, although as written, on w̃, it does not depend on m.
    """
    if l2:
        gradient = gradient + weight * (2.0 * l2)
    result = torch.mul(gradient, weight, out=out)
    if estimator != "identity":
        result.mul_(ESTIMATORS[estimator](mask_variable, alpha))
    return result


# --- the scale of the mask gradient ---------------------------------------------------------------------------------


def feature_scale(gradient: Tensor, axis: int = 0, groups: int = 1) -> Tensor:
    """The `batch` interpretation of Eq. (grad_norm): s_j = root mean square of the mini-batch mask gradient of feature
    j."""
    rows = by_feature(gradient, axis, groups)
    return rows.square().mean(dim=1).sqrt()


def sample_scale(total: Tensor, samples: int, weights: int) -> Tensor:
    """The literal Eq. (grad_norm), `per_sample`, from the Q_j = Σ_b Σ_k (g_bk w̃_k)² of the per_sample package.

    With a mean-reduced loss, g_b is already divided by |B|, hence |B|²·Q / (|B|·|w_j|).
    """
    return (total * (samples / weights)).sqrt()


def global_scale(sums_of_squares: Tensor, weights: int) -> Tensor:
    """One root mean square of the mask gradient for the whole network, from one sum of squares per tensor (ours)."""
    return (sums_of_squares.sum(-1, keepdim=True) / weights).sqrt()


def divisor(scale: Tensor) -> Tensor:
    """The divisor of the mask gradient, Eq. (grad_norm): s + ε.

    A feature without a gradient in this step (s = 0, such as a token that did not occur) is not scaled.
    """
    return torch.where(scale > 0, scale + EPSILON, 1.0)


# --- the update -----------------------------------------------------------------------------------------------------


def descent_direction_(scaled_gradient: Tensor, *, decay: Tensor | float | None) -> Tensor:
    """Eq. (connectivity): λ1·Σm adds λ1 to the gradient of every mask variable; it is never scaled."""
    return scaled_gradient if decay is None else scaled_gradient.add_(decay)


def update_mask_variable_(mask_variable: Tensor, direction: Tensor, *, learning_rate: Tensor | float) -> Tensor:
    """Gradient descent on m̃. `direction` is overwritten."""
    return mask_variable.sub_(direction.mul_(learning_rate))


def follow_step_(mask_variable: Tensor, before: Tensor, after: Tensor, *, speed: Tensor | float) -> Tensor:
    """Mask variables learn from the optimizer's step on w̃, from `before` to `after`; returns the increments (ours).

    With σ'(m̃) = 1/|w̃|, which is positive as the paper asks, Eq. (step_redefine) is ∂L/∂m̃ = ∂L/∂w · sgn(w̃): up to the
    sign, the gradient of w̃ itself. So the step of any optimizer on w̃, times sgn(w̃), is its step on m̃, in the same units
    and with the same momentum and the same adaptive rates. `speed` is the ratio of the two learning rates.
    """
    increment = torch.sub(after, before).mul_(before.sign()).mul_(speed)
    mask_variable.add_(increment)
    return increment


def decay_mask_variable_(mask_variable: Tensor, magnitude: Tensor, *, share: Tensor | float) -> Tensor:
    """Pull m̃ towards |w̃| by the fraction `share`, so that it remembers the last 1/share steps instead of all (ours).

    Only the order of the mask variables matters, not the amount by which λ1 has lowered all of them. `magnitude` is
    overwritten.
    """
    # Not lerp_, which is faster but rounds otherwise than the kernels of scl_triton.py.
    return mask_variable.add_(magnitude.sub_(mask_variable).mul_(share))


# --- defaults that depend on the run --------------------------------------------------------------------------------


def default_mask_lr(steps: int) -> float:
    """The default learning rate of mask variables, by the number of mask steps. Short runs need a larger one
    (section 28 of docs/lab-book.md)."""
    return min(max(0.003, 60.0 / max(1, steps)), 0.015)


def default_pruned_grad_scale(density: float | None) -> float:
    """The default factor on the gradient of pruned weights: smaller for sparser targets (a power law fitted to
    section 27 of docs/lab-book.md), and one half if the target is unknown."""
    return 0.5 if density is None else math.pow(density, 0.4)


# --- the method -----------------------------------------------------------------------------------------------------


# Settings without a meaning where masks follow the optimizer.
OF_GRADIENTS = (
    "estimator", "alpha", "scale", "mask_lr", "mask_momentum", "start", "start_value", "l2", "mask_decay",
    "mask_decay_cap",
)  # fmt: skip


@dataclass(frozen=True)
class SCLOptions(Options):
    """The settings of mask learning. The defaults follow our measurements and are the same for all networks."""

    estimator: str = "identity"  # straight-through estimator, one of ESTIMATORS
    alpha: float = 0.1  # slope of leaky_relu, upper bound of clipped_relu
    scale: str = "global"  # scale of the mask gradient: none, global, batch (per feature), per_sample
    mask_lr: float | None = None  # learning rate of the mask variables; None: default_mask_lr
    mask_momentum: float = 0.0
    # Schedule of mask_lr: cosine to zero over the mask phases; step: a tenth while stabilising; constant.
    anneal: str = "cosine"
    start: str = "magnitude"  # of the mask variables: |w̃| of the warmed-up weights, or a constant
    start_value: float | None = None  # that constant; None: 1 if start="constant"
    l2: float = 0.0  # λ2 in the mask gradient, for the interpretation in which the L2 term acts on the masks
    # Fraction by which each step pulls mask variables towards |w̃|; 0: they remember all steps.
    mask_decay: float = 0.001
    mask_decay_cap: float = 3.0  # cap on |w̃|, as a multiple of the threshold or the usual magnitude; 0: no cap
    # Factor on the gradient of pruned weights: 1 as in the paper; None: by the target density.
    pruned_grad_scale: float | None = None
    min_density: float | None = None  # fraction of each tensor that is never pruned, at least one weight; 0 disables it
    # Mask variables follow the optimizer's steps, at first this many times as fast as the weights (see `anneal`); 0:
    # they learn from gradients.
    mask_speed: float = 0.0
    fade: float = 0.0  # power of the curve along which weights fade in and out; 0: masks switch them on and off

    def __post_init__(self) -> None:
        expect(
            self,
            estimator=one_of(self.estimator, ESTIMATORS),
            scale=one_of(self.scale, SCALES),
            start=one_of(self.start, STARTS),
            anneal=one_of(self.anneal, ANNEALS),
            alpha=(0 < self.alpha < math.inf, "a number above 0"),
            mask_lr=(self.mask_lr is None or 0 < self.mask_lr < math.inf, "a number above 0, or none"),
            mask_momentum=(0 <= self.mask_momentum < 1, "a number of at least 0 and below 1"),
            mask_decay=(0 <= self.mask_decay < 1, "a number of at least 0 and below 1"),
            mask_decay_cap=(
                1 <= self.mask_decay_cap < math.inf or self.mask_decay_cap == 0,
                "a number of at least 1, or 0",
            ),
            pruned_grad_scale=(0 <= (self.pruned_grad_scale or 0) <= 1, "a number from 0 to 1, or none"),
            start_value=(self.start_value is None or 0 < self.start_value < math.inf, "a number above 0, or none"),
            l2=(
                is_rate(self.l2) and not (self.l2 and self.scale == "per_sample"),
                "a number of at least 0, and 0 with scale='per_sample'",
            ),
            min_density=(
                self.min_density is None or 0 <= self.min_density < 1,
                "a number of at least 0 and below 1, or none",
            ),
            mask_speed=(
                is_rate(self.mask_speed) and (not self.mask_speed or self._follows_only()),
                "a number of at least 0, and 0 with settings of learning from gradients ("
                + ", ".join(OF_GRADIENTS)
                + ")",
            ),
            fade=(self.fade == 0 or 1 <= self.fade < math.inf, "a number of at least 1, or 0"),
        )

    def _follows_only(self) -> bool:
        """Whether all settings that only matter where masks learn from gradients have their defaults."""
        return all(getattr(self, each.name) == each.default for each in fields(self) if each.name in OF_GRADIENTS)

    @property
    def constant_start(self) -> float | None:
        if self.start == "constant" and self.start_value is None:
            return 1.0
        return self.start_value


class SCL(GlobalThreshold[SCLOptions]):
    name, title, options = "scl", "gossamer (learned masks)", SCLOptions
    reference = "Tang et al., Automatic Sparse Connectivity Learning for Neural Networks"
    shared = ("scale", "estimator", "alpha", "l2", "min_density", "mask_momentum", "mask_speed", "fade")
    shardable = solves_targets = any_order = patterned = True

    def __init__(self, context: Context[SCLOptions]) -> None:
        self._context, timeline, weights = context, context.timeline, context.weights
        chosen = [
            self.resolve(request.options, mask_steps=timeline.length, density=target.density)
            for request, target in zip(context.requests, context.targets, strict=True)
        ]
        self._options = chosen[0]
        decays = [target.decay for target in context.targets]
        if (decays[0] is None) != (None in decays):
            raise ValueError("expected a fixed λ1 for all runs of one method object or for none, got both")
        self._decay = None if decays[0] is None else column([each or 0.0 for each in decays], weights)
        self._pushes = any(decays)
        self._rate = timeline.annealed([each.mask_lr or 0.0 for each in chosen], [each.anneal for each in chosen])
        self._speed = timeline.annealed([each.mask_speed for each in chosen], [each.anneal for each in chosen])
        self._mask_lr = column([each.mask_lr or 0.0 for each in chosen], weights)[:, 0]
        self.follows, self.elementwise = self._options.mask_speed > 0, self._options.fade > 0
        self.masked_forward = not self.elementwise
        self._mask_decay = None
        if not self.follows and any(each.mask_decay for each in chosen):
            # With a fixed λ1, the pull falls with the learning rate, like the push of λ1; otherwise all masks would
            # return.
            kinds = ["constant" if self._decay is None else each.anneal for each in chosen]
            self._mask_decay = timeline.annealed([each.mask_decay for each in chosen], kinds)
        self._cap = column([each.mask_decay_cap for each in chosen], weights) if self._mask_decay is not None else None
        pruned_scale = [1.0 if each.pruned_grad_scale is None else each.pruned_grad_scale for each in chosen]
        self._pruned_scale = pruned_scale[0] if len(set(pruned_scale)) == 1 else column(pruned_scale, weights)
        start = magnitude(weights)
        for row, options in enumerate(chosen):
            if options.constant_start is not None:
                start[row] = options.constant_start
        own = self._options.min_density
        self._begin(make_budget(context, start, min_density=context.min_density if own is None else own))
        self.mask_variable = self._budget.score
        self._velocity = torch.zeros_like(start) if self._options.mask_momentum else None
        # Of |w̃|: the threshold below which weights are pruned by magnitude, and the usual magnitude.
        self._level = start.new_zeros(len(chosen), 1)
        self._lengths = torch.tensor(context.layout.sizes, device=weights.device)
        self._usual = context.mean_squares(weights).sqrt()
        self._ends = list(accumulate(context.layout.sizes))
        # Sums of squares of the increments in `follow`: by tensor in one run, of each run in several.
        self._squares = start.new_zeros(len(chosen), len(self._ends) if len(chosen) == 1 else 1)
        self._healthy = torch.ones(len(chosen), dtype=torch.bool, device=weights.device)  # before the optimizer's step
        usual = self._options.estimator == "identity" and self._options.scale in ("none", "global")
        self._can_fuse = usual and not self._options.l2 and self._velocity is None and self._budget.costs is None
        self._can_fuse = self._can_fuse and context.group is None
        self._tied = tied_groups(context)
        self._can_fuse = self._can_fuse and not self._tied and not self.follows
        self._blocks = self._lay_out_blocks() if self._can_fuse and _on_gpu(self.mask_variable) else None

    @classmethod
    def check(cls, layout: Layout, request: Request[SCLOptions]) -> None:
        options, target = request.options, request.target
        scale = options.scale
        if (options.mask_speed or options.fade) and (
            request.patterns is not None or (target is not None and (target.decay, target.costs) != (None, None))
        ):
            raise ValueError("mask_speed and fade need a target of sparsity= without a pattern: set both to 0")
        if scale == "per_sample" and not layout.views:
            raise ValueError('scale="per_sample" needs the layers of a model: train this run alone, not batched')
        if scale == "batch":
            for name, view in zip(layout.names, layout.views, strict=False):
                if view.split and view.groups > 1:
                    raise ValueError(
                        f'scale="batch" does not support the sharded features of {name}: use scale="global"'
                    )

    @classmethod
    def resolve(cls, options: SCLOptions, *, mask_steps: int, density: float | None) -> SCLOptions:
        return replace(
            options,
            mask_lr=default_mask_lr(mask_steps)
            if options.mask_lr is None and not options.mask_speed
            else options.mask_lr,
            pruned_grad_scale=(
                default_pruned_grad_scale(density) if options.pruned_grad_scale is None else options.pruned_grad_scale
            ),
        )

    @classmethod
    def needs_samples(cls, options: SCLOptions) -> bool:
        return options.scale == "per_sample"

    def update_masks(self, step: Step) -> Outcome | None:
        if self.follows:
            self._healthy = _finite(self._squares, step, self._context.group)
            self._scale_gradients(step)
            return None
        rate = self._context.timeline.now(self._rate)
        mask_decay = None if self._mask_decay is None else self._context.timeline.now(self._mask_decay)
        caps = self._caps()
        segments = step.segments() if self._blocks is not None else None
        if segments is not None:
            squares, finite = self._descend_fused(step, segments, rate, mask_decay, caps)
        else:
            squares, finite = self._descend(step, rate, mask_decay, caps)
        if mask_decay is not None:  # the offset of the mask variables, which are sums of gradients and magnitudes
            self._level.copy_(torch.where(finite[:, None], self._level * (1.0 - mask_decay), self._level))
        decay, flips = self._set_masks(rate, finite)
        by_count = self._decay is None and self._budget.costs is None
        nonzeros = self._budget.met if by_count else self._context.total(torch.count_nonzero(self.mask, dim=1))
        return Outcome(decay=decay, nonzeros=nonzeros, flips=self._context.total(flips), squares=squares, finite=finite)

    def _scale_gradients(self, step: Step) -> None:
        """Turn the gradients into those of w̃, where masks learn nothing from them."""
        if isinstance(self._pruned_scale, float) and self._pruned_scale == 1.0:
            return
        for part in step.parts:
            for block in part.blocks:
                if block.gradient is not None:
                    self._weight_gradient(block.gradient, block.columns)
                step.release(block)

    def follow(self, columns: slice, before: Tensor, after: Tensor) -> None:
        speed = self._context.timeline.now(self._speed)
        increment = follow_step_(self.mask_variable[:, columns], before, after, speed=speed)
        if len(increment) > 1:
            self._squares.add_(increment.square_().sum(1, keepdim=True))
            return
        first, end, _ = columns.indices(self._ends[-1])
        these = range(bisect_right(self._ends, first), bisect_left(self._ends, end) + 1)
        ends = [min(self._ends[index], end) - first for index in these]
        sizes = [right - left for left, right in pairwise([0, *ends])]
        norms = torch.stack(torch._foreach_norm(torch.split_with_sizes(increment[0], sizes)))
        self._squares[0, these.start : these.stop].add_(norms.square_())

    def settle(self) -> Outcome:
        squares = self._context.total(self._squares.clone())
        self._squares.zero_()
        finite = self._healthy & (squares.sum(1) < torch.inf)  # also False for NaN
        threshold, flips = self._budget.meet_(finite)
        self._level.add_(threshold[:, None])
        rate = (self._context.timeline.rate * self._context.timeline.now(self._speed))[:, 0]
        decay = torch.where(rate > 0, threshold / rate, 0.0)
        flips = self._context.total(flips)
        return Outcome(decay=decay, nonzeros=self._budget.met, flips=flips, squares=squares, finite=finite)

    def apply_to(self, columns: slice, weights: Tensor, out: Tensor) -> None:
        if self.masked_forward:
            super().apply_to(columns, weights, out)
        else:
            level = self._level.clamp_min(0.0)
            faded_weight(weights, self.mask_variable[:, columns], level, power=self._options.fade, out=out)

    # Two passes over the blocks: the mask gradient and its scale, then everything else.

    def _descend(
        self, step: Step, rate: Tensor, mask_decay: Tensor | None, caps: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the sums of squares of the mask gradient, (runs, tensors), and whether each run had finite
        gradients."""
        options, group = self._options, self._context.group
        squares = torch.cat([self._mask_gradients(part, step) for part in step.parts], dim=1)
        if self._tied:  # the gradient of the mask variable of a group, divided by its size
            share_over_groups_(step.work_views, self._tied)
            squares = torch.stack([view.flatten(1).square().sum(1) for view in step.work_views], dim=1)
        self._context.total(squares)
        finite = _finite(squares, step, group)
        divide = None
        if options.scale == "global":
            divide = divisor(global_scale(squares, self._context.size))
        elif options.scale != "none":
            self._scale_features(step)
        gate: Tensor | None = finite[:, None]
        if on_cpu(squares):
            everything, nothing = bool(finite.all()), not bool(finite.any())
            gate = None if everything else gate
        else:
            nothing = False  # known only on the device, where such a step has length zero
        for part in step.parts:
            for block in part.blocks:
                if not nothing:
                    self._move(block, part, step, divide, rate, mask_decay, caps, gate)
                step.release(block)
        return squares, finite

    def _mask_gradients(self, part: Part, step: Step) -> Tensor:
        """Write the mask gradient to the scratch memory of the blocks, and turn their gradients into those of w̃."""
        norms = []
        for block in part.blocks:
            if block.gradient is None:
                block.work.zero_()
            else:
                gradient = block.gradient
                if step.unscale is not None:
                    # First, because the L2 term is not scaled, and in a dtype in which the product cannot overflow.
                    gradient = block.work.copy_(gradient).mul_(step.unscale)
                mask_gradient(
                    gradient,
                    block.weight,
                    self.mask_variable[:, block.columns],
                    estimator=self._options.estimator,
                    alpha=self._options.alpha,
                    l2=self._options.l2,
                    out=block.work,
                )
                if not isinstance(self._pruned_scale, float) or self._pruned_scale != 1.0:
                    self._weight_gradient(block.gradient, block.columns)
            if len(part.tensors) == 1:
                norms.append(torch.linalg.vector_norm(block.work, dim=1))
        if len(part.tensors) == 1:
            return torch.stack(norms).square().sum(0)[:, None]
        for index in step.absent:
            if self._options.l2 and index in part.tensors:
                step.work_views[index].zero_()  # no gradient, no step, as in optimizers with weight decay
        work = part.blocks[0].work
        if len(work) > 1:
            return work.square().sum(1, keepdim=True)
        if len(part.tensors) > _MANY:
            lengths = self._lengths[part.tensors.start : part.tensors.stop]
            return torch.segment_reduce(work[0].square(), "sum", lengths=lengths, unsafe=True)[None]
        return torch.stack(torch._foreach_norm([step.work_views[index] for index in part.tensors])).square()[None]

    def _scale_features(self, step: Step) -> None:
        """Eq. (grad_norm) per feature."""
        layout, group = self._context.layout, self._context.group
        for index, work in enumerate(step.work_views):
            if not layout.views:
                rows = work.reshape(*work.shape[:2], -1)
                rows.div_(divisor(rows.square().mean(2, keepdim=True).sqrt()))
                continue
            view = layout.views[index]
            if step.samples is not None:
                total = step.samples.totals[index].to(work.dtype)
                scale = sample_scale(total, step.samples.samples, view.size // total.numel())
            else:
                scale = _feature_scale(work[0], view, group)
            work[0].div_(along_features(divisor(scale), work[0], view.feature_axis, view.groups))

    def _move(
        self,
        block: Block,
        part: Part,
        step: Step,
        divide: Tensor | None,
        rate: Tensor,
        mask_decay: Tensor | None,
        caps: Tensor | None,
        gate: Tensor | None,
    ) -> None:
        """A step of gradient descent on the mask variables of a block, of length zero if `gate` is False."""
        variable, work = self.mask_variable[:, block.columns], block.work
        if divide is not None and not self._pushes and self._velocity is None:
            rate = rate / divide  # one pass less, as nothing is added to the scaled gradient
        elif divide is not None:
            work.div_(divide)
        if gate is not None:
            work = torch.where(gate, work, 0.0)
            rate = torch.where(gate, rate, 0.0)
        direction = descent_direction_(work, decay=self._decay if self._pushes else None)
        if self._velocity is not None:
            velocity = self._velocity[:, block.columns]
            direction = velocity * self._options.mask_momentum + direction
            velocity.copy_(direction if gate is None else torch.where(gate, direction, velocity))
        update_mask_variable_(variable, direction, learning_rate=rate)
        if mask_decay is None:
            return
        size = torch.abs(block.weight, out=block.work)
        if caps is not None and caps.shape[1] == 1:
            size.clamp_max_(caps) if len(caps) == 1 else torch.minimum(size, caps, out=size)
        elif caps is not None and len(part.tensors) == 1:
            size.clamp_max_(caps[:, part.tensors.start : part.tensors.stop])
        elif caps is not None:
            for index in part.tensors:
                step.work_views[index].clamp_max_(caps[0, index])
        decay_mask_variable_(variable, size, share=mask_decay if gate is None else torch.where(gate, mask_decay, 0.0))

    def _descend_fused(
        self,
        step: Step,
        segments: tuple[Sequence[Tensor | None], Sequence[Tensor] | None],
        rate: Tensor,
        mask_decay: Tensor | None,
        caps: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The same in fused GPU kernels, for the usual settings."""
        from gossamer.methods.scl_triton import descend_on_gpu_, judge_on_gpu, sums_of_squares_on_gpu  # needs Triton

        gradients, parameters = segments
        assert self._blocks is not None
        squares = sums_of_squares_on_gpu(self._blocks, gradients, step.weights, step.unscale)
        squares = squares.view(len(self.mask), -1)
        finite, divide = judge_on_gpu(squares, step.found_inf, self._context.size)
        descend_on_gpu_(
            self._blocks,
            gradients,
            parameters,
            step.weights,
            self.mask_variable,
            self.mask,
            unscale=step.unscale,
            divide=divide if self._options.scale == "global" else None,
            finite=finite,
            rate=rate,
            decay=self._decay if self._pushes else None,
            mask_decay=mask_decay,
            caps=caps,
            pruned_scale=self._pruned_scale,
        )
        return squares, finite

    def _caps(self) -> Tensor | None:
        """The cap on |w̃| for the pull on mask variables, one per run or, with costs, one per tensor.

        If no weight of a feature varies any more, batch norm multiplies the gradient of pruned weights by hundreds.
        Without a cap, such weights would displace all others.
        """
        if self._cap is None:
            return None
        level = self._level
        if self._budget.costs is not None:
            level = level * self._budget.costs.of_tensors()
        caps = torch.maximum(level, self._usual) * self._cap
        return torch.where(self._cap > 0, caps, torch.inf)

    def _set_masks(self, rate: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """Set the masks by the budget or, with a fixed λ1, by the sign of the mask variables. Returns λ1 and the
        number of masks that changed."""
        if self._decay is None:
            threshold, flips = self._budget.meet_(finite)
            self._level.add_(threshold[:, None])
            if self._mask_decay is not None:  # such masks are pushed down, however small their learning rate has become
                return threshold / self._mask_lr, flips
            return torch.where(rate[:, 0] > 0, threshold / rate[:, 0], 0.0), flips
        self._level.add_(rate * self._decay)
        self._budget.raise_protected_()
        before = self.mask.clone()
        unit_step(self.mask_variable, out=self.mask)
        return self._decay[:, 0].clone(), torch.count_nonzero(before.bitwise_xor_(self.mask), dim=1)

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        self._weight_gradient(gradient, slice(None))

    def _weight_gradient(self, gradient: Tensor, columns: slice) -> None:
        mask, mask_variable = self.mask[:, columns], self.mask_variable[:, columns]
        weight_gradient_(gradient, mask, mask_variable, pruned_scale=self._pruned_scale)

    def finalize(self, weights: Tensor) -> Tensor:
        if self._decay is None and not self._budget.is_final():
            self._level.add_(self._budget.cut_().threshold[:, None])
        if self.elementwise:
            smallest = torch.finfo(weights.dtype).tiny * 2.0  # a kept weight at the threshold itself stays nonzero
            for start in range(0, weights.shape[1], _PIECE):
                columns = slice(start, start + _PIECE)
                part, mask = weights[:, columns], self.mask[:, columns]
                used = torch.empty_like(part)
                self.apply_to(columns, part, used)
                part.copy_(torch.where(mask & (used == 0), part.sign() * smallest, used))
        return self.mask

    def state(self) -> dict[str, Tensor]:
        found = super().state() | {"level": self._level, "usual": self._usual}
        found["mask_variable"] = found.pop("score")
        return found if self._velocity is None else {**found, "velocity": self._velocity}

    def _lay_out_blocks(self) -> Blocks:
        """The blocks of the fused kernels: tensor by tensor in one run, or run by run."""
        layout, weights = self._context.layout, self._context.weights
        if layout.views:
            offsets = list(accumulate(layout.sizes, initial=0))[:-1]
            return Blocks.of(layout.sizes, offsets, weights.device)
        rows = range(len(weights))
        places = [row * weights.stride(0) for row in rows]
        sizes = [layout.count] * len(rows)
        return Blocks.of(sizes, [row * layout.count for row in rows], weights.device, places=places, runs=rows)


def _on_gpu(matrix: Tensor) -> bool:
    return matrix.is_cuda and matrix.dtype == torch.float32 and has_triton()


def _finite(squares: Tensor, step: Step, group: dist.ProcessGroup | None) -> Tensor:
    """Whether each run can learn from this step; the same in all processes that share the tensors."""
    finite = squares.sum(1) < torch.inf  # also False for NaN
    if step.samples is not None:
        finite = finite & torch.isfinite(torch.stack([total.sum() for total in step.samples.totals]).sum())
    found_inf = step.found_inf
    if found_inf is None:
        return finite
    if group is not None:
        found_inf = found_inf.clone()
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
    return finite & (found_inf == 0).reshape(1)


def _feature_scale(work: Tensor, view: TensorView, group: dist.ProcessGroup | None) -> Tensor:
    if group is None or not view.split:
        return feature_scale(work, view.feature_axis, view.groups)
    # Each process has a shard of every feature.
    sums = by_feature(work, view.feature_axis, view.groups).square().sum(dim=1)
    dist.all_reduce(sums, group=group)
    return (sums * (sums.numel() / view.size)).sqrt()
