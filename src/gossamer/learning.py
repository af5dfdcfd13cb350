"""One step of mask learning over a whole network: the equations of method.py, in place and in few kernels.

On an accelerator all tensors are treated as one vector; on a CPU each tensor by itself, with the parameter's own memory
as scratch space, because there memory that was not touched lately is what costs time. The common case on a CUDA GPU has
kernels of its own (learning_kernels.py), which pass 7 times over memory of the size of the weights instead of 18 times.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer import method
from gossamer.budget import triton_is_there
from gossamer.prunable import Weight
from gossamer.settings import Settings
from gossamer.sharding import shard_axis
from gossamer.state import Store

_FUSED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_PIECE = 1 << 20  # connections treated together on a CPU: 4 MiB of each kind


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
class Moves:
    """What moves masks in a step, beside their gradient, and removed weights after it."""

    learning_rate: Tensor  # of the mask variables
    decay: float  # λ1, where it is not solved for
    anchor: Tensor | float  # share by which mask variables go back to |w̃|
    caps: Tensor | None  # up to which |w̃| counts for that: one for all, or one a tensor
    removed: float  # share of their gradient that removed weights follow


@dataclass(frozen=True, eq=False)
class _Block:
    gradient: Tensor | None
    weight: Tensor
    mask_variable: Tensor
    mask: Tensor
    velocity: Tensor | None
    work: Tensor


_KINDS = tuple(field.name for field in fields(_Block))


def learn_masks_(
    store: Store,
    weights: Sequence[Weight],
    gradients: Sequence[Tensor | None],
    scratch: Sequence[Tensor],
    settings: Settings,
    moves: Moves,
    *,
    connections: int,
    unscale: Tensor | None = None,
    found_inf: Tensor | None = None,
    moments: Moments | None = None,
    group: dist.ProcessGroup | None = None,
) -> Outcome:
    """Update the mask variables from the gradients of the weights. Leaves w̃ in `scratch`, and in the gradients what
    the optimizer should apply to it."""
    common = settings.scale in ("none", "global") and settings.estimator == "identity" and not settings.l2
    plain = store.velocity is None and moments is None and group is None
    plain = plain and (moves.caps is None or len(moves.caps) == 1)
    if common and plain and has_kernels(store, scratch) and _alike(store, gradients):
        return _learn_in_two_passes_(
            store, gradients, scratch, settings, moves, connections=connections, unscale=unscale, found_inf=found_inf
        )
    parts, views = _lay_out(store, gradients, scratch)
    blocks = [block for part in parts for block in part]
    if _in_pieces(store):
        squares = torch.stack([_sum_of_squares(part, settings, moves.removed, unscale) for part in parts])
    else:
        for block in blocks:
            _mask_gradient_(block, settings, unscale)
        damp_removed_(store, gradients, moves.removed)
        if settings.l2:
            for view, gradient in zip(views, gradients, strict=True):
                if gradient is None:
                    view.zero_()  # no gradient, no step: as optimizers do with weight decay
        squares = torch.stack(torch._foreach_norm(views)).square()
    if group is not None:
        dist.all_reduce(squares, group=group)
    divisor = _global_divisor(squares, connections, settings)
    if divisor is None and settings.scale != "none":
        _rescale_features_(views, weights, settings, moments, group)
    healthy = _healthy(squares, found_inf, moments, group)
    if _in_pieces(store):
        for part, cap in zip(parts, _one_a_part(moves.caps, len(parts)), strict=True):
            for block in part:
                if healthy:
                    if divisor is not None:
                        block.work.div_(divisor)
                    _descend_(block, block.work, settings, moves.decay, moves.learning_rate)
                    if settings.anchor:
                        _anchor_(block, moves.anchor, [(block.work, cap)])
                block.work.copy_(block.weight)  # here, while this piece of memory is in the cache
        _leave_weights([(tensor, work) for tensor, work in zip(scratch, views, strict=True) if tensor is not work])
        return Outcome(squares, healthy)
    for block in blocks:
        if divisor is not None:
            block.work.div_(divisor)
        # No look at the host: where gradients were not finite, the accelerator takes a step of length zero.
        velocity = None if block.velocity is None else block.velocity.clone()
        rate = torch.where(healthy, moves.learning_rate, 0.0)
        _descend_(block, torch.where(healthy, block.work, 0.0), settings, moves.decay, rate)
        if settings.anchor:
            share = healthy.to(store.dtype) * moves.anchor  # torch.where would make a number float32
            pieces = views if moves.caps is not None and len(moves.caps) > 1 else [block.work]
            _anchor_(block, share, list(zip(pieces, _one_a_part(moves.caps, len(pieces)), strict=True)))
        if block.velocity is not None and velocity is not None:
            torch.where(healthy, block.velocity, velocity, out=block.velocity)
    _leave_weights(list(zip(scratch, store.dense_views, strict=True)))
    return Outcome(squares, healthy)


def has_kernels(store: Store, tensors: Sequence[Tensor]) -> bool:
    """Whether kernels of learning_kernels.py treat these tensors, all that the store has."""
    return _on_gpu(store) and store.dtype == torch.float32 and _alike(store, tensors)


def _in_pieces(store: Store) -> bool:
    """Whether tensors are treated one by one, a piece at a time."""
    return store.device.type == "cpu"


def _on_gpu(store: Store) -> bool:
    return store.mask.is_cuda and triton_is_there()


def _alike(store: Store, tensors: Sequence[Tensor | None]) -> bool:
    types = {tensor.dtype for tensor in tensors if tensor is not None}
    return len(types) == 1 and types.issubset(_FUSED_TYPES) and store.is_laid_out_like(tensors)


def _learn_in_two_passes_(
    store: Store,
    gradients: Sequence[Tensor | None],
    scratch: Sequence[Tensor],
    settings: Settings,
    moves: Moves,
    *,
    connections: int,
    unscale: Tensor | None,
    found_inf: Tensor | None,
) -> Outcome:
    """The same with fused kernels: a pass for the scale of the mask gradient and one for everything else."""
    from gossamer.learning_triton import descend_on_gpu_, judge_on_gpu, sums_of_squares_on_gpu  # needs Triton

    squares = sums_of_squares_on_gpu(store, gradients, unscale)
    divisor: Tensor | None = None
    if settings.scale == "global":
        healthy, divisor = judge_on_gpu(squares, found_inf, connections)
    else:
        healthy = _healthy(squares, found_inf, None, None)
    descend_on_gpu_(
        store,
        gradients,
        scratch,
        unscale=unscale,
        divisor=divisor,
        healthy=healthy,
        learning_rate=moves.learning_rate,
        decay=moves.decay,
        anchor=moves.anchor if settings.anchor else None,
        cap=moves.caps,
        removed_gradient=moves.removed,
    )
    return Outcome(squares, healthy)


def _global_divisor(squares: Tensor, connections: int, settings: Settings) -> Tensor | None:
    if settings.scale != "global":
        return None
    return method.divisor(method.global_scale(squares, connections))


def _sum_of_squares(blocks: Sequence[_Block], settings: Settings, removed: float, unscale: Tensor | None) -> Tensor:
    """The mask gradient of a tensor, left in its blocks, and the gradient of what is removed: all that the first pass
    over memory can do while a block is in the cache of a CPU."""
    norms = []
    for block in blocks:
        _mask_gradient_(block, settings, unscale)
        if block.gradient is not None:
            _damp_(block.gradient, block.mask, removed)
        norms.append(torch.linalg.vector_norm(block.work))
    return torch.stack(norms).square().sum()


def damp_removed_(store: Store, gradients: Sequence[Tensor | None], share: float) -> None:
    """Leave removed weights only that share of their gradient, by the masks of the forward pass."""
    pairs = [(each, mask) for each, mask in zip(gradients, store.mask_views, strict=True) if each is not None]
    if share == 1.0 or not pairs:
        return
    if _in_pieces(store):
        for gradient, mask in pairs:
            _damp_(gradient, mask, share)
        return
    one = store.mask.new_ones((), dtype=store.dtype)  # of two numbers torch.where makes float32
    factors = store.views(torch.where(store.mask, one, share))
    chosen = [factor for factor, each in zip(factors, gradients, strict=True) if each is not None]
    torch._foreach_mul_([gradient for gradient, _ in pairs], chosen)


def _damp_(gradient: Tensor, mask: Tensor, share: float) -> None:
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}.get(gradient.dtype)
    if share == 0.0 and bits is not None:
        gradient.view(bits).mul_(mask)  # as integers, in half the time; what is not a number is gone as well
    elif share != 1.0:
        method.weight_gradient(gradient, mask, removed=share, out=gradient)


def _leave_weights(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([tensor for tensor, _ in pairs], [weights for _, weights in pairs])


def _healthy(
    squares: Tensor, found_inf: Tensor | None, moments: Moments | None, group: dist.ProcessGroup | None
) -> Tensor:
    """Whether this step can be learned from; the same answer in all the processes that share the tensors."""
    healthy = squares.sum() < torch.inf  # which what is not a number is not either
    if moments is not None:
        healthy = healthy & torch.isfinite(torch.stack([total.sum() for total in moments.totals.values()]).sum())
    if found_inf is None:
        return healthy
    if group is not None:
        found_inf = found_inf.clone()
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
    return healthy & (found_inf == 0).squeeze()


def _descend_(block: _Block, work: Tensor, settings: Settings, decay: float, learning_rate: Tensor) -> None:
    direction = method.descent_direction_(work, decay=decay)
    if block.velocity is not None:
        direction = block.velocity.mul_(settings.mask_momentum).add_(direction).clone()
    method.update_mask_variable_(block.mask_variable, direction, learning_rate=learning_rate)


def _one_a_part(caps: Tensor | None, parts: int) -> Sequence[Tensor | None]:
    return [None] * parts if caps is None else list(caps.expand(parts))


def _anchor_(block: _Block, share: Tensor | float, caps: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Towards |w̃|, which is written where `caps` names parts of it with the largest size that counts there."""
    magnitude = torch.abs(block.weight, out=block.work)
    for part, cap in caps:
        if cap is not None:
            part.clamp_max_(cap)
    method.anchor_mask_variable_(block.mask_variable, magnitude, share=share)


def _lay_out(
    store: Store, gradients: Sequence[Tensor | None], scratch: Sequence[Tensor]
) -> tuple[list[list[_Block]], list[Tensor]]:
    """The blocks of each tensor (on an accelerator one for all), and where their work lies, a view a tensor."""
    if store.device.type != "cpu":
        work = store.vector()
        views = store.views(work)
        present = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
        torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
        return [[_Block(work, store.dense, store.mask_variable, store.mask, store.velocity, work)]], views
    works = [
        tensor if tensor.dtype == store.dtype else torch.empty_like(view)
        for tensor, view in zip(scratch, store.dense_views, strict=True)
    ]
    velocities = [None] * len(works) if store.velocity is None else store.views(store.velocity)
    kinds = (gradients, store.dense_views, store.mask_variable_views, store.mask_views, velocities, works)
    return [list(_pieces(_Block(*parts))) for parts in zip(*kinds, strict=True)], works


def _pieces(block: _Block) -> Iterator[_Block]:
    """A block in parts that stay in the cache from one operation to the next."""
    tensors: dict[str, Any] = {name: getattr(block, name) for name in _KINDS}
    size = block.work.numel()
    if size <= _PIECE or not all(tensor is None or tensor.is_contiguous() for tensor in tensors.values()):
        yield block
        return
    flat: dict[str, Any] = {name: None if tensor is None else tensor.view(-1) for name, tensor in tensors.items()}
    for start in range(0, size, _PIECE):
        part = slice(start, start + _PIECE)
        pieces: dict[str, Any] = {name: None if tensor is None else tensor[part] for name, tensor in flat.items()}
        yield _Block(**pieces)


def _mask_gradient_(block: _Block, settings: Settings, unscale: Tensor | None) -> None:
    if block.gradient is None:
        block.work.zero_()
        return
    gradient = block.gradient
    if unscale is not None:
        # First of all, as the L2 term is not scaled; and in the type of the work, where half precision has no room.
        gradient = block.work.copy_(gradient).mul_(unscale)
    method.mask_gradient(
        gradient,
        block.weight,
        block.mask_variable,
        estimator=settings.estimator,
        alpha=settings.alpha,
        l2=settings.l2,
        out=block.work,
    )


def _rescale_features_(
    views: Sequence[Tensor],
    weights: Sequence[Weight],
    settings: Settings,
    moments: Moments | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Eq. (grad_norm), feature by feature."""
    for view, weight in zip(views, weights, strict=True):
        axis, groups = weight.feature_axis, weight.groups
        if moments is None:
            scale = _feature_scale(view, weight, group)
        else:
            total = moments.totals[weight.name].to(view.dtype)
            scale = method.sample_scale(total, moments.samples, view.numel() // total.numel())
        divisor = method.divisor(scale)
        view.div_(method.along_features(divisor, view, axis, groups))


def _feature_scale(view: Tensor, weight: Weight, group: dist.ProcessGroup | None) -> Tensor:
    if group is None or shard_axis(weight.parameter) == weight.feature_axis:
        return method.feature_scale(view, weight.feature_axis, weight.groups)
    # Each process has a part of every feature.
    sums = method.by_feature(view, weight.feature_axis, weight.groups).square().sum(dim=1)
    dist.all_reduce(sums, group=group)
    return (sums * (sums.numel() / weight.parameter.numel())).sqrt()
