# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, override"
"""`HealthLog.write` of diagnostics.py in one kernel, for CUDA GPUs.

A dozen separate operations on scalars would take a GPU as long as the masks of a small network themselves.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from gossamer.diagnostics import HealthLog

_BLOCK = 128  # tensors together


@triton.jit
def _write(
    decay,
    nonzeros,
    flips,
    squares,
    healthy,
    trace,
    slot,
    all_flips,
    gradient_squares,
    gradient_weight,
    skipped,
    tensors,
    fresh,
    block: tl.constexpr,
):
    good = tl.load(healthy) != 0
    so_far = tl.load(all_flips) + tl.load(flips).to(tl.float64)
    tl.store(all_flips, so_far)
    row = trace + tl.load(slot) * 3
    tl.store(row, tl.load(decay).to(tl.float64))
    tl.store(row + 1, tl.load(nonzeros).to(tl.float64))
    tl.store(row + 2, so_far)
    share = tl.where(good, fresh, 0.0)
    for start in range(0, tensors, block):
        place = start + tl.arange(0, block)
        inside = place < tensors
        old = tl.load(gradient_squares + place, mask=inside, other=0.0)
        new = tl.where(good, tl.load(squares + place, mask=inside, other=0.0), 0.0)
        tl.store(gradient_squares + place, old + share * (new - old), mask=inside)
    weight = tl.load(gradient_weight)
    tl.store(gradient_weight, weight + share * (1.0 - weight))
    tl.store(skipped, tl.load(skipped) + tl.where(good, 0, 1))


def write_on_gpu_(
    log: "HealthLog",
    *,
    decay: Tensor,
    nonzeros: Tensor,
    flips: Tensor,
    squares: Tensor,
    healthy: Tensor,
    fresh: float,
) -> None:
    """Write to the tensors of a log on a CUDA device. `fresh` is the weight of a finite step in the running means."""
    with torch.cuda.device_of(log.trace):
        _write[(1,)](
            decay,
            nonzeros,
            flips,
            squares,
            healthy.view(torch.uint8),
            log.trace,
            log.slot,
            log.flips,
            log.gradient_squares,
            log.gradient_weight,
            log.skipped,
            len(squares),
            fresh,
            _BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
