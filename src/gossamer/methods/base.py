"""The protocol of methods: a method is a rule on matrices with one row per run and one column per weight.

A row has all prunable weights of a network (`Layout` has the columns of each tensor). The same method therefore serves
one run, driven by `gossamer.Sparsifier` through the steps of any optimizer, and many runs at once, in batched training.
The calls around a step of the optimizer:

    update_masks      gets the gradient of the weights of the forward pass; updates the state of the method, and turns
                      the gradient, in place, into that of the dense weights w̃
    follow, settle    after the optimizer's step, for methods whose masks learn from that step instead of the gradient
    project           after the optimizer's step: a constraint on w̃, such as zeros where weights are pruned
                      (`add_penalty` and `project_others` are their counterparts for parameters that are not prunable)
    update_topology   at the steps given by `topology_due`: infrequent changes of the masks
    apply_masks       writes the weights of the next forward pass: w̃ ⊙ m, unless the method overrides it
    finalize          at the end of the mask phases: the final masks, which meet the budget exactly

`update_masks`, `project` and `apply_masks` consist of tensor operations that never synchronize with the device, in
place on tensors with fixed addresses, so that a whole step can be captured in a CUDA graph. `update_topology` and
`finalize` run outside it. Values that change from step to step come from the `Timeline`.

`register` makes a method available by name; `find` also takes "my_module:MyMethod".
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.patterns import Pattern
from gossamer.schedule import Phase, Plan, cosine, cubic_budget
from gossamer.target import Target, make_target

_LARGE = 1 << 24  # weights whose squares have room beside them


@dataclass(frozen=True)
class Options:
    """The settings of a method. Each method has its own fields, whose defaults are the best known values."""


S = TypeVar("S", bound=Options)


def expect(options: Options, **asked: tuple[bool, str]) -> None:
    """Raise on invalid settings: for each name, whether its value is valid, and what was expected."""
    wrong = [
        f"{name}: expected {what}, got {getattr(options, name)!r}" for name, (good, what) in asked.items() if not good
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def one_of(value: str, choices: Iterable[str]) -> tuple[bool, str]:
    """Whether the value is one of the choices, for `expect`."""
    known = list(choices)
    return value in known, f"one of {', '.join(known)}"


def is_rate(value: float) -> bool:
    """Whether the value is at least 0 and finite; False for NaN."""
    return 0 <= value < math.inf


# --- the layout of the weights ---


@dataclass(frozen=True)
class TensorView:
    """The view of one tensor in its columns, if these follow the memory of a parameter."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    feature_axis: int
    groups: int
    split: bool  # the weights of a feature are sharded over processes
    size: int  # weights of the tensor over all processes


@dataclass(frozen=True)
class Norm:
    """The gains and biases of a batch norm: their positions among the parameters that are not prunable."""

    gains: slice
    biases: slice


@dataclass(frozen=True)
class Layout:
    """The columns of each tensor. Output features come first in every shape."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    norms: tuple[Norm | None, ...] = ()
    """For each tensor, the batch norm that follows it."""
    views: tuple[TensorView, ...] = ()
    """Set if columns follow the memory of the parameters; features may then not come first."""

    @cached_property
    def sizes(self) -> list[int]:
        if self.views:
            return [math.prod(view.shape) for view in self.views]
        return [math.prod(shape) for shape in self.shapes]

    @property
    def count(self) -> int:
        return sum(self.sizes)

    def split(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """One view per tensor."""
        return torch.split(matrix, self.sizes, dim=1)

    def tensor_of_each(self, device: torch.device) -> Tensor:
        """The index of the tensor of each weight."""
        numbers = torch.arange(len(self.sizes), device=device)
        sizes = torch.tensor(self.sizes, device=device)
        return torch.repeat_interleave(numbers, sizes, output_size=self.count)

    def by_tensor(self, values: Tensor) -> Tensor:
        """One number per tensor, (runs, tensors), expanded to the weights. Not for a captured step."""
        return values.index_select(1, self.tensor_of_each(values.device))

    def keep(self, sparsity: float) -> int:
        """The number of weights to keep at a sparsity."""
        return self.count - math.floor(self.count * sparsity + 0.5)


def min_nonzeros(sizes: Sequence[int], min_density: float) -> list[int]:
    """The minimum number of kept weights of each tensor."""
    return [min(size, max(1, math.ceil(min_density * size))) if min_density else 0 for size in sizes]


# --- the inputs of a method ---


@dataclass(frozen=True)
class Request(Generic[S]):
    """The target and settings of one run. `target` is derived from `sparsity` unless it is given."""

    sparsity: float
    seed: int
    options: S
    target: Target | None = None
    patterns: tuple[Pattern | None, ...] | None = None
    """The pattern of each tensor, equal for all runs of one object; None if the run has no patterns."""

    def resolve(self, layout: Layout) -> Target:
        if self.target is not None:
            return self.target
        return make_target(layout.sizes, sparsity=self.sparsity, floors=[0] * len(layout.sizes))


class Series:
    """One number per run that changes over the steps of the mask phases."""

    def __init__(
        self, function: Callable[[int], Sequence[float]], like: Tensor, make_table: Callable[[], Tensor] | None = None
    ) -> None:
        """`make_table` computes the values of all steps, (steps, runs)."""
        self._function, self._like, self._make_table = function, like, make_table
        self.table = None if make_table is None else make_table().to(like.device, like.dtype)
        self.now = torch.tensor([list(function(0))], dtype=like.dtype, device=like.device).T.contiguous()

    def at(self, step: int) -> Tensor:
        """The value of each run at a step of the mask phases, as a column."""
        return torch.tensor([list(self._function(step))], dtype=self._like.dtype, device=self._like.device).T

    def set(self, step: int) -> None:
        values = self._function(step)
        if len(values) == 1:
            self.now.fill_(values[0])
        else:
            self.now.copy_(self.at(step))

    def refresh(self) -> None:
        """Compute the table again, in place."""
        if self.table is not None and self._make_table is not None:
            self.table.copy_(self._make_table())


class Timeline:
    """The phases of the runs, the clock of their mask phases, and the learning rate of the weights in this step.

    A `tabulated` timeline reads its values from tables on the device, indexed by the clock, so that a captured step
    needs nothing from the host. Other timelines are set before each step by `set`.

    Each run has a plan of its own, because it may leave the sparsify phase early; all begin with the same one, `plan`.
    """

    def __init__(
        self, plan: Plan, *, rows: int, device: torch.device, dtype: torch.dtype, epoch: int, tabulated: bool = True
    ) -> None:
        self.plan, self.epoch, self.device, self.dtype = plan, max(1, epoch), device, dtype
        self.plans = [plan] * rows
        self.length = plan.sparsify + plan.stabilise
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self.rate = torch.zeros(rows, 1, dtype=dtype, device=device)
        self._tabulated, self._series = tabulated, list[Series]()

    def set(self, step: int) -> None:
        """Move to a step of the mask phases."""
        self.clock.fill_(step)
        for series in self._series:
            series.set(step)

    def follow(self, row: int, plan: Plan) -> None:
        """Let a run follow a plan whose sparsify phase ended early. Tables change in place, where a captured step reads
        them."""
        self.plans[row] = plan
        for series in self._series:
            series.refresh()

    def now(self, series: Series) -> Tensor:
        """The current value, as a column: one number per run."""
        return series.now if series.table is None else series.table.index_select(0, self.clock).view(-1, 1)

    def series(
        self,
        function: Callable[[int], Sequence[float]],
        dtype: torch.dtype | None = None,
        *,
        table: Callable[[], Tensor] | None = None,
    ) -> Series:
        """A `Series` of the timeline. `table` computes all values, (steps, runs), faster than the function."""
        like = torch.empty(0, dtype=dtype or self.dtype, device=self.device)

        def by_step() -> Tensor:
            return torch.tensor([list(function(step)) for step in range(self.length)], dtype=like.dtype)

        found = Series(function, like, (table or by_step) if self._tabulated else None)
        self._series.append(found)
        return found

    def budgets(self, targets: Sequence[Target], ramp: str = "cubic") -> Series:
        """The budget of each run after each step: along the cubic ramp, or the final one "at_once"."""

        def at(step: int) -> list[int]:
            ramp_steps = self.plan.sparsify
            return [_budget(step, ramp_steps, target.total, target.final, ramp) for target in targets]

        def table() -> Tensor:
            ramp_steps = self.plan.sparsify
            columns = [_budgets(self.length, ramp_steps, target.total, target.final, ramp) for target in targets]
            return torch.stack(columns, dim=1)

        return self.series(at, torch.int64, table=table)

    def annealed(self, values: Sequence[float], kinds: Sequence[str] = ()) -> Series:
        """Values annealed over the mask phases: by a cosine to zero, or another kind of `schedule.ANNEALS`."""
        chosen = list(kinds) or ["cosine"] * len(values)

        def at(step: int) -> list[float]:
            plans = zip(values, self.plans, chosen, strict=True)
            return [value * _factor(plan, step, kind) for value, plan, kind in plans]

        def table() -> Tensor:
            plans = zip(self.plans, chosen, strict=True)
            factors = torch.stack([_factors(plan, self.length, kind) for plan, kind in plans], dim=1)
            return factors * torch.tensor(values, dtype=factors.dtype)

        return self.series(at, table=table)

    def often(self, steps: int) -> int:
        """An interval of this many steps, or less if the sparsify phase would otherwise have fewer than ten
        intervals."""
        return max(1, min(steps, self.plan.sparsify // 10))


def _budget(step: int, ramp_steps: int, total: int, final: int, ramp: str) -> int:
    if ramp == "at_once":
        return final
    # The last step of the ramp is the first one at the full target.
    return cubic_budget(min(1.0, (step + 1) / max(1, ramp_steps)), total, final)


def _factor(plan: Plan, step: int, kind: str) -> float:
    moment = plan.at(plan.warmup + step)
    if not moment.phase.masks_train:
        return 0.0
    if kind == "cosine":
        return cosine(moment.settling)
    return 0.1 if kind == "step" and moment.phase is Phase.STABILISE else 1.0


# Batched runs share their plan and many of their targets, and have many steps.


@lru_cache(maxsize=64)
def _budgets(steps: int, ramp_steps: int, total: int, final: int, ramp: str) -> Tensor:
    return torch.tensor([_budget(step, ramp_steps, total, final, ramp) for step in range(steps)])


@lru_cache(maxsize=64)
def _factors(plan: Plan, steps: int, kind: str) -> Tensor:
    return torch.tensor([_factor(plan, step, kind) for step in range(steps)], dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Context(Generic[S]):
    """The inputs of a method. `weights` are the dense weights at the first mask step, one row per run."""

    layout: Layout
    requests: Sequence[Request[S]]
    timeline: Timeline
    weights: Tensor
    min_density: float  # fraction of each tensor that is never pruned, for methods with one threshold for the network
    group: dist.ProcessGroup | None = None  # the processes that share each tensor

    @cached_property
    def targets(self) -> list[Target]:
        return [request.resolve(self.layout) for request in self.requests]

    @property
    def options(self) -> list[S]:
        return [request.options for request in self.requests]

    @property
    def patterns(self) -> tuple[Pattern | None, ...] | None:
        """The pattern of each tensor; None if the runs have no patterns."""
        return self.requests[0].patterns

    @property
    def keep(self) -> list[int]:
        """Final nonzeros of each run."""
        return [target.final for target in self.targets]

    @property
    def seeds(self) -> Tensor:
        return torch.tensor([request.seed for request in self.requests], device=self.weights.device)

    def values(self, name: str) -> list[Any]:
        """One setting of all runs."""
        return [getattr(options, name) for options in self.options]

    def column(self, name: str) -> Tensor:
        """One setting of all runs, as a column that broadcasts against a matrix."""
        return column(self.values(name), self.weights)

    def total(self, sums: Tensor) -> Tensor:
        """`sums`, reduced over the processes that share the tensors."""
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return sums

    @cached_property
    def size(self) -> int:
        """The number of weights of a run over all processes."""
        return sum(view.size for view in self.layout.views) if self.layout.views else self.layout.count

    def mean_squares(self, matrix: Tensor) -> Tensor:
        """The mean square of each row over the whole network, as a column."""
        if self.group is None and matrix.shape[1] <= _LARGE:
            return matrix.square().mean(1, keepdim=True)
        parts = [part.square().sum(1, keepdim=True) for part in torch.split(matrix, _LARGE, dim=1)]
        return self.total(torch.stack(parts).sum(0)) / self.size


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """One number per run, as a column that broadcasts against a matrix."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


# --- a step ---


@dataclass(frozen=True, eq=False)
class Block:
    """Some columns of all runs, small enough for the cache of a CPU. All tensors are (runs, columns)."""

    columns: slice
    gradient: Tensor | None  # None: these weights have no gradient in this step
    weight: Tensor
    work: Tensor  # scratch memory


@dataclass(frozen=True, eq=False)
class Part:
    """The blocks of one tensor, or one block with several tensors."""

    tensors: range
    blocks: Sequence[Block]


@dataclass(frozen=True, eq=False)
class SampleSums:
    """Sums over samples of the squared mask gradients, for the literal per-sample scale."""

    totals: Sequence[Tensor]  # one per tensor: one number per feature
    samples: int


class Step(ABC):
    """The gradients of one step and the dense weights, as a matrix or in blocks."""

    weights: Tensor
    unscale: Tensor | None = None  # factor that unscales the gradients, if they are still scaled
    found_inf: Tensor | None = None  # nonzero if a scaled gradient was not finite
    samples: SampleSums | None = None
    active: Tensor | None = None  # the share of positive outputs of each filter in this step, (runs, filters)

    @property
    @abstractmethod
    def gradient(self) -> Tensor:
        """The gradients as one matrix; the optimizer applies the values written to it."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """The gradients in blocks that cover all columns."""

    @property
    @abstractmethod
    def work_views(self) -> Sequence[Tensor]:
        """The scratch memory of the blocks by tensor, each (runs, *shape)."""

    @property
    def absent(self) -> Sequence[int]:
        """Tensors without a gradient in this step."""
        return ()

    def release(self, block: Block) -> None:
        """Call this after the last use of a block."""
        return

    @abstractmethod
    def segments(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor] | None] | None:
        """For fused GPU kernels: gradients as tensors in memory, one per tensor of a run or one per run, and the
        parameters that receive w̃; None if the kernels cannot read them."""


class MatrixStep(Step):
    """A step of batched training, where the gradients are a matrix already."""

    def __init__(self, gradient: Tensor, weights: Tensor, layout: Layout, active: Tensor | None = None) -> None:
        self._gradient, self.weights, self._layout, self.active = gradient, weights, layout, active

    @property
    def gradient(self) -> Tensor:
        return self._gradient

    @cached_property
    def parts(self) -> Sequence[Part]:
        work = torch.empty(self.weights.shape, dtype=self.weights.dtype, device=self.weights.device)
        return [Part(range(len(self._layout.sizes)), [Block(slice(None), self._gradient, self.weights, work)])]

    @property
    def work_views(self) -> Sequence[Tensor]:
        parts = zip(self._layout.split(self.parts[0].blocks[0].work), self._layout.shapes, strict=True)
        return [part.view(len(part), *shape) for part, shape in parts]

    def segments(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor] | None] | None:
        return list(self._gradient), None


@dataclass(frozen=True, eq=False)
class Outcome:
    """Figures of a step of mask learning, for diagnostics."""

    decay: Tensor  # λ1 of each run
    nonzeros: Tensor  # kept weights of each run, over all processes that share its tensors
    flips: Tensor  # masks that changed in each run, likewise
    squares: Tensor  # sums of squares of the mask gradient, (runs, tensors)
    finite: Tensor  # (runs,): False if gradients were not finite, so that masks did not change


class Method(ABC, Generic[S]):
    """A method for some runs, from the first mask step on."""

    name: ClassVar[str]
    title: ClassVar[str]  # in tables of results
    reference: ClassVar[str] = "–"
    options: ClassVar[type[Options]] = Options
    from_start: ClassVar[bool] = False  # sparse from the first step on, without a dense warm-up
    structured: ClassVar[bool] = False  # prunes whole filters
    exact: ClassVar[bool] = True  # the final masks meet the budget exactly; otherwise nobody checks them
    masked_forward: bool = True  # the forward pass uses w̃ ⊙ m; otherwise what apply_masks writes
    elementwise: bool = False  # `apply_to` writes the weights of the forward pass; nothing else does
    follows: bool = False  # masks learn from the step of the optimizer, in `follow` and `settle`
    penalizes: ClassVar[bool] = False  # changes parameters that are not prunable, or their gradient
    observes: ClassVar[bool] = False  # needs `Step.active`
    usual_phases: ClassVar[Mapping[str, str]] = MappingProxyType({})  # durations that suit it better than the default
    rewinds: ClassVar[bool] = False  # rewinds the learning rate after pruning
    needs_rate: ClassVar[bool] = False  # uses the learning rate of the weights
    shardable: ClassVar[bool] = False  # supports weights that are sharded over processes (FSDP2)
    solves_targets: ClassVar[bool] = False  # supports flops= and decay= besides sparsity=
    patterned: ClassVar[bool] = False  # supports pattern=: its budget is made by `make_budget`
    any_order: ClassVar[bool] = False  # columns may follow the memory of the parameters
    shared: ClassVar[tuple[str, ...]] = ()  # settings that must be equal for all runs of one object

    mask: Tensor
    """True for kept weights, (runs, weights)."""

    @abstractmethod
    def __init__(self, context: Context[S]) -> None: ...

    @classmethod
    def check(cls, layout: Layout, request: Request[S]) -> None:
        """Refuse a request that cannot be met, before training begins."""
        return

    @classmethod
    def resolve(cls, options: S, *, mask_steps: int, density: float | None) -> S:
        """The settings with values for those that are None, given the number of mask steps and the target density
        (None with a fixed decay)."""
        return options

    @classmethod
    def needs_samples(cls, options: S) -> bool:
        """Whether the method needs `Step.samples`, sums over the samples of a batch."""
        return False

    @classmethod
    def phases(cls, plan: Plan) -> Plan:
        """The phases of a run with this method: without warm-up if it is sparse from the start."""
        return replace(plan, warmup=0, sparsify=plan.warmup + plan.sparsify) if cls.from_start else plan

    @abstractmethod
    def update_masks(self, step: Step) -> Outcome | None:
        """Update the masks from a step; the outcome is for diagnostics."""

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        """Turn ∂L/∂w into the gradient of w̃, in place, as `update_masks` does. For optimizers that evaluate a closure
        several times per step."""
        return

    def apply_masks(self, weights: Tensor, out: Tensor) -> None:
        """Write the weights of the forward pass."""
        self.apply_to(slice(None), weights, out)

    def apply_to(self, columns: slice, weights: Tensor, out: Tensor) -> None:
        """Write the weights of the forward pass of some columns, of an `elementwise` method."""
        torch.where(self.mask[:, columns], weights, weights.new_zeros(()), out=out)

    def follow(self, columns: slice, before: Tensor, after: Tensor) -> None:
        """Learn from w̃ in some columns before and after the step of the optimizer, if the method `follows`."""
        raise TypeError(f"method={self.name!r} sets follows=True, so it has to define follow() and settle()")

    def settle(self) -> Outcome:
        """Update the masks after `follow` had all columns; the outcome is for diagnostics."""
        raise TypeError(f"method={self.name!r} sets follows=True, so it has to define follow() and settle()")

    def add_penalty(self, gradient: Tensor, others: Tensor) -> None:
        """Change the gradient of the parameters that are not prunable, in place."""
        return

    def project(self, weights: Tensor) -> None:
        return

    def project_others(self, others: Tensor) -> None:
        """A constraint on the parameters that are not prunable, after the optimizer's step. Needs `penalizes`."""
        return

    def topology_due(self, step: int) -> bool:
        """Whether to call `update_topology` after this many steps of the mask phases."""
        return False

    def update_topology(self, weights: Tensor, step: int) -> Tensor | None:
        """Returns the weights whose optimizer state is reset, or None."""
        return None

    @abstractmethod
    def finalize(self, weights: Tensor) -> Tensor:
        """The final masks. The caller zeroes the pruned weights."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All tensors that change, for checkpoints. Resuming copies into them."""

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Resume from the result of `state`."""
        for name, tensor in self.state().items():
            tensor.copy_(saved[name])


class PrunedAtZero(Method[S]):
    """Base of methods whose pruned weights are zero and get no gradient."""

    def update_masks(self, step: Step) -> Outcome | None:
        self.weight_gradient(step.gradient, step.weights)
        return None

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.masked_fill_(~self.mask, 0.0)

    def project(self, weights: Tensor) -> None:
        weights.masked_fill_(~self.mask, 0.0)


def scale_pruned_(gradient: Tensor, mask: Tensor, share: Tensor) -> None:
    """Multiply the gradient of pruned weights by this factor, one number per run."""
    gradient.mul_(torch.where(mask, torch.ones_like(share), share))
