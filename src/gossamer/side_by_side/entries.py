"""What is raced: the epochs and learning rates that all runs share, the runs, and what comes out of each."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from gossamer import method
from gossamer.methods import Options, Rule, find, make_options
from gossamer.side_by_side.training import NAMES, Training


@dataclass(frozen=True)
class Member:
    """One run of a race. `settings` are those of its method (gossamer.methods), `training` those that any can have."""

    seed: int
    method: str = "scl"
    sparsity: float = 0.95
    weight_decay: float = 1e-4
    settings: Options | None = None  # None: the defaults of the method
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        rule = find(self.method)
        settings = rule.options() if self.settings is None else self.settings
        if type(settings) is not rule.options:
            raise ValueError(
                f"expected {rule.options.__name__} as the settings of {rule.name}, got {type(settings).__name__}"
            )
        object.__setattr__(self, "method", rule.name)
        object.__setattr__(self, "settings", settings)

    @staticmethod
    def of(
        seed: int, method: str = "scl", sparsity: float = 0.95, weight_decay: float = 1e-4, **settings: Any
    ) -> "Member":
        """A run with settings of its method, and of its training, by name."""
        training = Training(**{name: settings.pop(name) for name in NAMES if name in settings})
        return Member(seed, method, sparsity, weight_decay, make_options(find(method), settings), training)

    @property
    def rule(self) -> type[Rule[Any]]:
        return find(self.method)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Runs of the same kind follow one rule together."""
        return self.method, *(getattr(self.settings, name) for name in self.rule.apart)

    def to_dict(self) -> dict[str, Any]:
        """Everything that was asked, as plain values in one level; of the training what differs from the defaults."""
        assert self.settings is not None
        told = {"seed": self.seed, "method": self.method, "sparsity": self.sparsity, "weight_decay": self.weight_decay}
        return {**told, **asdict(self.settings), **self.training.changes()}


@dataclass(frozen=True)
class Race:
    """What all runs of a race share. Durations in epochs."""

    warmup: int
    sparsify: int
    stabilise: int
    finetune: int
    batch_size: int = 64
    learning_rate: float = 0.1
    schedule: str = "cosine"  # to zero over all epochs; staged: the paper's steps, with a cosine in the mask phases
    momentum: float = 0.9
    floor: float = 0.001
    label_smoothing: float = 0.0

    @property
    def epochs(self) -> int:
        return self.warmup + self.sparsify + self.stabilise + self.finetune

    def rate(self, epoch: float) -> float:
        """The learning rate of the weights at a (fractional) epoch."""
        if self.schedule == "cosine":
            return self.learning_rate * method.cosine(epoch / self.epochs)
        masks = self.sparsify + self.stabilise
        if epoch < self.warmup:
            return self.learning_rate
        if epoch < self.warmup + masks:
            return self.learning_rate * (0.1 + 0.9 * method.cosine((epoch - self.warmup) / masks))
        return self.learning_rate * (0.1 if epoch < self.warmup + masks + self.finetune / 2 else 0.01)


@dataclass(frozen=True)
class Outcome:
    """One finished run."""

    member: Member
    sparsity: float
    accuracy: float  # on the test set, at the last epoch
    validation_accuracy: float | None
    train_loss: float  # cross-entropy in the last epoch
    connections_by_tensor: tuple[int, ...]
    plain_accuracy: float | None = None  # of the last weights, where `accuracy` is of averaged or recalibrated ones
    plain_validation_accuracy: float | None = None


def by_kind(members: Sequence[Member]) -> list[list[int]]:
    """The numbers of the members, those of one kind together, in the order in which kinds first appear."""
    kinds = list(dict.fromkeys(member.kind for member in members))
    order = sorted(range(len(members)), key=lambda index: kinds.index(members[index].kind))
    return [list(group) for _, group in groupby(order, key=lambda index: members[index].kind)]
