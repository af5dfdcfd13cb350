"""What a method is: a rule on matrices with a row for each run and a column for each connection.

All prunable weights of a network lie side by side in a row (`Layout` knows which tensor is where), so one rule serves
many runs at once, as in a race, or one run, as with any model and optimizer (attach.py). Around a step of SGD:

    show_       writes the weights that the forward pass reads, made from the weight variables
    learn_      sees the gradient of the shown weights: updates what the method learns, and turns the gradient, in
                place, into the one that the weight variables shall follow
    settle_     after the optimizer has stepped, does to the weight variables what the method asks: zero what is removed
    refresh_    at the steps that `due` names: what is done now and then
    freeze_     at the end of the mask phases: the final masks, which meet the budget exactly; the weight variables are
                what is trained on

Everything in `show_`, `learn_` and `settle_` is tensor operations without a look at the host, in place on tensors that
stay where they are, so that a whole step can be captured in a CUDA graph; `refresh_` and `freeze_` run outside of it.
Numbers that change from step to step are read from tables at the clock of the `Timeline`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from gossamer import method
from gossamer.schedule import Moment, Phase, Plan, connections_left


@dataclass(frozen=True)
class Options:
    """The settings of a method; each method has its own fields, with the defaults that are its best known ones."""


S = TypeVar("S", bound=Options)


def expect(options: Options, **asked: tuple[bool, str]) -> None:
    """Refuse settings that make no sense: for each by name whether it is good, and what was expected of it."""
    wrong = [
        f"{name}: expected {what}, got {getattr(options, name)!r}" for name, (good, what) in asked.items() if not good
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def is_rate(value: float) -> bool:
    """Whether it is a number of at least 0 and below infinity; NaN is none."""
    return 0 <= value < math.inf


@dataclass(frozen=True)
class Layout:
    """Which columns are which tensor. Output features come first in every shape."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    gains: tuple[slice | None, ...] = ()
    """For each tensor, where among the other parameters the gains of the batch norm behind it lie."""

    @cached_property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def count(self) -> int:
        return sum(self.sizes)

    def split(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The part of each tensor: views."""
        return torch.split(matrix, self.sizes, dim=1)

    def tensor_of_each(self, device: torch.device) -> Tensor:
        """The number of the tensor of each connection."""
        numbers = torch.arange(len(self.sizes))
        return torch.repeat_interleave(numbers, torch.tensor(self.sizes), output_size=self.count).to(device)

    def by_tensor(self, values: Tensor) -> Tensor:
        """One number a tensor, (rows, tensors), laid out along the connections. Not for a captured step."""
        return values.index_select(1, self.tensor_of_each(values.device))

    def keep(self, sparsity: float) -> int:
        """How many connections a sparsity leaves."""
        return self.count - math.floor(self.count * sparsity + 0.5)

    def floors(self, share: float) -> list[int]:
        """How many connections of each tensor are never removed."""
        return [max(1, -int(-share * size // 1)) if share else 0 for size in self.sizes]


@dataclass(frozen=True)
class Request(Generic[S]):
    """What one run asks of a method."""

    sparsity: float
    seed: int
    settings: S


class Timeline:
    """The phases of the runs, the clock of their mask phases, and the learning rate of the weights in this step."""

    def __init__(self, plan: Plan, *, rows: int, device: torch.device, dtype: torch.dtype, epoch: int) -> None:
        self.plan, self.epoch, self.device, self.dtype = plan, max(1, epoch), device, dtype
        self.length = plan.sparsify + plan.stabilise
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self.rate = torch.zeros(rows, 1, dtype=dtype, device=device)

    def now(self, table: Tensor) -> Tensor:
        """The row of a table for this step, as a column: one number a run."""
        return table.index_select(0, self.clock).view(-1, 1)

    def budgets(self, total: int, keep: Sequence[int], ramp: str = "cubic") -> Tensor:
        """Connections that are left after each step, for each run: along the cubic ramp, or all pruned "at_once"."""
        columns = [_budgets(self.length, max(1, self.plan.sparsify), total, each, ramp) for each in keep]
        return torch.stack(columns, dim=1).to(self.device)

    def annealed(self, values: Sequence[float], kinds: Sequence[str] = ()) -> Tensor:
        """Numbers that go to zero on a cosine over the mask phases, or by another kind of gossamer.settings.ANNEALS."""
        columns = [_anneal(self.plan, kind) for kind in (kinds or ["cosine"] * len(values))]
        return (torch.stack(columns, dim=1) * torch.tensor(values)).to(self.device, self.dtype)

    def often(self, steps: int) -> int:
        """So many steps, or fewer where the phase in which connections go would else see less than ten of them."""
        return max(1, min(steps, self.plan.sparsify // 10))


# The runs of a race share their plan, and its steps are many.
@lru_cache(maxsize=4)
def _moments(plan: Plan) -> list[Moment]:
    return [plan.at(plan.warmup + step) for step in range(plan.sparsify + plan.stabilise)]


@lru_cache(maxsize=64)
def _budgets(steps: int, length: int, total: int, keep: int, ramp: str) -> Tensor:
    # The last step of the ramp is the first one at the full target.
    shares = [1.0 if ramp == "at_once" else min(1.0, (step + 1) / length) for step in range(steps)]
    return torch.tensor([connections_left(share, total, keep) for share in shares])


@lru_cache(maxsize=16)
def _anneal(plan: Plan, kind: str) -> Tensor:
    moments = _moments(plan)
    if kind == "step":
        return torch.tensor([0.1 if moment.phase is Phase.STABILISE else 1.0 for moment in moments])
    return torch.tensor([method.cosine(moment.settling) if kind == "cosine" else 1.0 for moment in moments])


class Rule(ABC, Generic[S]):
    """A method for the runs of some rows. It begins where masks begin: `weights` are the weight variables then."""

    name: ClassVar[str]
    title: ClassVar[str]  # in tables of results
    reference: ClassVar[str]
    options: ClassVar[type[Options]]
    from_start: ClassVar[bool] = False  # sparse from the first step on, instead of from a warmed-up trunk
    structured: ClassVar[bool] = False  # removes whole filters
    penalises: ClassVar[bool] = False  # changes the gradient of parameters that are no connections
    rewinds: ClassVar[bool] = False  # has the learning rate of a second training after its cut

    apart: ClassVar[tuple[str, ...]] = ()  # settings that all rows of one rule share; others may differ between rows

    @abstractmethod
    def __init__(
        self, layout: Layout, requests: Sequence[Request[S]], timeline: Timeline, weights: Tensor, *, floor: float
    ) -> None:
        """`floor` is the share of each tensor that is never removed, where a method chooses over the whole network."""

    @classmethod
    def phases(cls, plan: Plan) -> Plan:
        """The phases of a run with this method: without warm-up where it is sparse from the start."""
        return replace(plan, warmup=0, sparsify=plan.warmup + plan.sparsify) if cls.from_start else plan

    @property
    @abstractmethod
    def mask(self) -> Tensor:
        """True where there is a connection now."""

    @abstractmethod
    def show_(self, weights: Tensor, out: Tensor) -> None: ...

    @abstractmethod
    def learn_(self, gradient: Tensor, weights: Tensor) -> None: ...

    def penalise_(self, gradient: Tensor, others: Tensor) -> None:
        """Change, in place, the gradient of the parameters that are no connections."""
        return

    def settle_(self, weights: Tensor) -> None:
        return

    def due(self, step: int) -> bool:
        """Whether `refresh_` is called when this many steps of the mask phases are done."""
        return False

    def refresh_(self, weights: Tensor, step: int) -> Tensor | None:
        """What is done after so many steps of the mask phases; returns the connections whose momentum is forgotten."""
        return None

    @abstractmethod
    def freeze_(self, weights: Tensor) -> Tensor:
        """The final masks. What they remove the caller sets to zero."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All tensors that change, to be saved, or copied into to go on from a save."""


class DenseGradient(Rule[S]):
    """Rules whose removed connections go on training behind their masks: w̃ follows the gradient of w."""

    def show_(self, weights: Tensor, out: Tensor) -> None:
        torch.where(self.mask, weights, weights.new_zeros(()), out=out)


class RemovedIsZero(Rule[S]):
    """Rules whose removed connections are zero and get no gradient."""

    def show_(self, weights: Tensor, out: Tensor) -> None:
        out.copy_(weights)

    def settle_(self, weights: Tensor) -> None:
        weights.masked_fill_(~self.mask, 0.0)


def damp_removed_(gradient: Tensor, mask: Tensor, share: Tensor) -> None:
    """Leave removed connections this share of their gradient, one number a run."""
    gradient.mul_(torch.where(mask, torch.ones_like(share), share))


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """One number a run, to multiply a matrix with."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
