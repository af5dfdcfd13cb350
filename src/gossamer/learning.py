"""One step of mask learning over a whole network: the equations of method.py, in place and in few kernels.

On an accelerator all tensors are treated as one vector; on a CPU each tensor by itself, with the parameter's own memory
as scratch space, because there memory that was not touched lately is what costs time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer import method
from gossamer.select import Weight
from gossamer.settings import Settings
from gossamer.store import Store


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a step of mask learning saw."""

    sums_of_squares: Tensor  # of the mask gradient, one a tensor
    healthy: Tensor  # False where gradients were not finite, so that masks were left as they were


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over samples of the squared mask gradients, for the literal per-sample scale."""

    totals: Mapping[str, Tensor]
    samples: int


@dataclass(frozen=True, eq=False)
class _Block:
    gradient: Tensor | None
    weight: Tensor
    mask_variable: Tensor
    velocity: Tensor | None
    work: Tensor


def learn_masks_(
    store: Store,
    weights: Sequence[Weight],
    gradients: Sequence[Tensor | None],
    scratch: Sequence[Tensor],
    settings: Settings,
    *,
    decay: float,
    learning_rate: Tensor,
    connections: int,
    unscale: Tensor | None = None,
    found_inf: Tensor | None = None,
    moments: Moments | None = None,
    group: dist.ProcessGroup | None = None,
) -> Outcome:
    """Update the mask variables from the gradients of the weights. The contents of `scratch` are lost."""
    blocks, views = _lay_out(store, gradients, scratch)
    for block in blocks:
        _mask_gradient_(block, settings)
        if unscale is not None:
            block.work.mul_(unscale)
    squares = torch.stack(torch._foreach_norm(views)).square()
    if group is not None:
        dist.all_reduce(squares, group=group)
    _rescale_(blocks, views, weights, squares, settings, connections, moments)
    healthy = torch.isfinite(squares.sum())
    if moments is not None:
        healthy = healthy & torch.isfinite(torch.stack([total.sum() for total in moments.totals.values()]).sum())
    if found_inf is not None:
        healthy = healthy & (found_inf == 0)
    on_cpu = store.device.type == "cpu"
    if on_cpu and not healthy:
        return Outcome(squares, healthy)
    for block in blocks:
        # Without a look at the host the accelerator learns from nothing where gradients were not finite.
        work = block.work if on_cpu else torch.where(healthy, block.work, 0.0)
        direction = method.descent_direction_(work, decay=decay)
        if block.velocity is not None:
            direction = block.velocity.mul_(settings.mask_momentum).add_(direction).clone()
        method.update_mask_variable_(block.mask_variable, direction, learning_rate=learning_rate)
    return Outcome(squares, healthy)


def _lay_out(
    store: Store, gradients: Sequence[Tensor | None], scratch: Sequence[Tensor]
) -> tuple[list[_Block], list[Tensor]]:
    if store.device.type != "cpu":
        work = store.vector()
        views = store.views(work)
        present = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
        torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
        return [_Block(work, store.dense, store.mask_variable, store.velocity, work)], views
    works = [
        tensor if tensor.dtype == store.dtype else torch.empty_like(view)
        for tensor, view in zip(scratch, store.dense_views, strict=True)
    ]
    velocities = [None] * len(works) if store.velocity is None else store.views(store.velocity)
    blocks = [
        _Block(*parts)
        for parts in zip(gradients, store.dense_views, store.mask_variable_views, velocities, works, strict=True)
    ]
    return blocks, works


def _mask_gradient_(block: _Block, settings: Settings) -> None:
    if block.gradient is None:
        block.work.zero_()
        return
    method.mask_gradient(
        block.gradient,
        block.weight,
        block.mask_variable,
        estimator=settings.estimator,
        alpha=settings.alpha,
        l2=settings.l2,
        out=block.work,
    )


def _rescale_(
    blocks: Sequence[_Block],
    views: Sequence[Tensor],
    weights: Sequence[Weight],
    squares: Tensor,
    settings: Settings,
    connections: int,
    moments: Moments | None,
) -> None:
    """Eq. (grad_norm) in the reading that was asked for."""
    if settings.scale == "none" or settings.power == 0:
        return
    if settings.scale == "global":
        divisor = method.divisor(method.global_scale(squares, connections), settings.power)
        for block in blocks:
            block.work.div_(divisor)
        return
    for view, weight in zip(views, weights, strict=True):
        axis, groups = weight.feature_axis, weight.groups
        if moments is None:
            scale = method.feature_scale(view, axis, groups)
        else:
            total = moments.totals[weight.name].to(view.dtype)
            scale = method.sample_scale(total, moments.samples, view.numel() // total.numel())
        divisor = method.divisor(scale, settings.power)
        view.div_(method.along_features(divisor, view, axis, groups))
