"""The target of a run: a sparsity, a fraction of the FLOPs, or a fixed connectivity decay."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.schedule import cubic_budget

_EXAMPLES = {"sparsity": 0.95, "flops": 0.1, "decay": 0.03}


@dataclass(frozen=True)
class Target:
    """The target as integers. `total` and `final` count weights or, with costs, multiply-adds."""

    decay: float | None  # fixed λ1; None if it is solved for
    total: int
    final: int
    costs: tuple[int, ...] | None  # multiply-adds per weight of each tensor, for a FLOPs budget

    def __str__(self) -> str:
        if self.decay is not None:
            return f"decay={self.decay}"
        return f"{self.final:,} of {self.total:,} {'weights' if self.costs is None else 'multiply-adds'}"

    @property
    def density(self) -> float | None:
        """The fraction of weights (of multiply-adds with `flops=`) to keep; None with a fixed decay."""
        return None if self.decay is not None else self.final / self.total

    def budget(self, ramp: float) -> int:
        return cubic_budget(ramp, self.total, self.final)


def make_target(
    sizes: Sequence[int],
    *,
    sparsity: float | None = None,
    flops: float | None = None,
    decay: float | None = None,
    positions: Sequence[int] | None = None,
    floors: Sequence[int],
) -> Target:
    """Validate the request and convert it to integers. Per tensor, `sizes` is the number of weights, `positions` the
    multiply-adds per weight, and `floors` the minimum number of kept weights."""
    given: dict[str, object] = {
        name: value for name, value in (("sparsity", sparsity), ("flops", flops), ("decay", decay)) if value is not None
    }
    if len(given) != 1:
        raise ValueError(
            "expected one of sparsity= (fraction of zeros), flops= (fraction of FLOPs to keep) and decay= (fixed λ1), "
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
            raise ValueError(f"expected sparsity to be at least 0 and below 1, such as 0.95, got {sparsity}")
        target = Target(None, total, total - math.floor(total * sparsity + 0.5), None)
        return _checked(target, sum(floors), f"sparsity={sparsity}", "weights")
    assert flops is not None
    if not 0 < flops <= 1:
        raise ValueError(f"expected flops to be the fraction to keep, above 0 and at most 1, such as 0.1, got {flops}")
    if positions is None:
        raise ValueError(
            "flops= needs example_input=, one batch as the model takes it, to count the multiply-adds of each weight"
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
            f"{request} keeps {target.final} of {target.total} {unit}, but min_density requires {least}: ask for less, "
            "lower min_density= (with 0, whole tensors may be pruned), or exclude tensors"
        )
    return target
