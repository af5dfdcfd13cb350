"""What a user asks for: a sparsity, a share of the FLOPs, or a fixed connectivity decay."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gossamer.budget import Costs
from gossamer.schedule import nonzeros_left

_EXAMPLES = {"sparsity": 0.95, "flops": 0.1, "decay": 0.03}


@dataclass(frozen=True)
class Target:
    """The request in whole numbers. `total` and `final` count connections or, with costs, multiply-adds."""

    decay: float | None  # fixed λ1; None where it is solved for
    total: int
    final: int
    costs: tuple[int, ...] | None  # multiply-adds of one connection of each tensor, for a FLOPs budget

    def __str__(self) -> str:
        if self.decay is not None:
            return f"decay={self.decay}"
        return f"{self.final:,} of {self.total:,} {'connections' if self.costs is None else 'multiply-adds'}"

    @property
    def left(self) -> float | None:
        """The share of connections, or of multiply-adds, that shall be left; None where that is what comes out."""
        return None if self.decay is not None else self.final / self.total

    def budget(self, ramp: float) -> int:
        return nonzeros_left(ramp, self.total, self.final)

    def costs_on(self, sizes: Sequence[int], device: torch.device) -> Costs | None:
        return None if self.costs is None else Costs.of(sizes, self.costs, device)


def make_target(
    sizes: Sequence[int],
    *,
    sparsity: float | None = None,
    flops: float | None = None,
    decay: float | None = None,
    positions: Sequence[int] | None = None,
    floors: Sequence[int],
) -> Target:
    """Check the request and turn it into numbers. `sizes` are the connections of each tensor, `positions` the
    multiply-adds of one connection of each, `floors` how many connections of each tensor must stay."""
    given: dict[str, object] = {
        name: value for name, value in (("sparsity", sparsity), ("flops", flops), ("decay", decay)) if value is not None
    }
    if len(given) != 1:
        raise ValueError(
            "expected one of sparsity= (share of zeros), flops= (share of the FLOPs left) and decay= (fixed λ1), "
            f"got {', '.join(given) or 'none of them'}"
        )
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"expected {name} to be a number, such as {_EXAMPLES[name]}, got {value!r}")
    total = sum(sizes)
    if decay is not None:
        if not 0 <= decay < math.inf:
            raise ValueError(f"expected decay to be a number of at least 0, such as 0.03, got {decay}")
        return Target(decay, total, 0, None)
    if sparsity is not None:
        if not 0 <= sparsity < 1:
            raise ValueError(f"expected sparsity to be a share from 0 to below 1, such as 0.95, got {sparsity}")
        target = Target(None, total, total - math.floor(total * sparsity + 0.5), None)
        return _checked(target, sum(floors), f"sparsity={sparsity}", "connections")
    assert flops is not None
    if not 0 < flops <= 1:
        raise ValueError(f"expected flops to be the share that is left, above 0 and up to 1, such as 0.1, got {flops}")
    if positions is None:
        raise ValueError(
            "flops= needs example_input=, one batch as the model takes it, to count what each connection costs"
        )
    total = sum(size * cost for size, cost in zip(sizes, positions, strict=True))
    if total == 0:
        raise ValueError("flops= cannot be met: no selected weight takes part in a multiplication of this input")
    target = Target(None, total, math.floor(total * flops), tuple(positions))
    least = sum(floor * cost for floor, cost in zip(floors, positions, strict=True))
    return _checked(target, least, f"flops={flops}", "multiply-adds")


def _checked(target: Target, least: int, request: str, unit: str) -> Target:
    if least > target.final:
        raise ValueError(
            f"{request} leaves {target.final} {unit}, but min_density keeps {least} of them: ask for less, "
            "lower min_density= (0 lets whole tensors die), or exclude tensors"
        )
    return target
