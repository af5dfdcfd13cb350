"""A recipe is a value: a run, and the numbers that the paper prints for it."""

from dataclasses import dataclass, replace

from gossamer.lab.training.run import Run


@dataclass(frozen=True)
class Published:
    """A published number. An accuracy is a fraction: 0.9008 is 90.08 %."""

    table: str
    accuracy: float | None = None
    perplexity: float | None = None
    sparsity: float | None = None
    decay: float | None = None  # the λ1 that it belongs to, if the paper gives one
    flops_reduction: float | None = None

    @property
    def value(self) -> float:
        found = self.accuracy if self.accuracy is not None else self.perplexity
        if found is None:
            raise ValueError(f"{self.table}: expected an accuracy or a perplexity, got neither")
        return found


@dataclass(frozen=True)
class Recipe:
    """A run with a name, a description, and the published numbers to compare with.

    A result agrees if it is at most `tolerance` worse than the published value, in accuracy as a fraction or in
    perplexity.
    """

    name: str
    about: str
    run: Run
    published: tuple[Published, ...] = ()
    tolerance: float = 0.005

    @property
    def exhibit(self) -> str:
        """The short name of its network and data set, which all its recipes share: resnet20, cifar100-wrn28-10, …"""
        return self.name.removeprefix("cifar10-").removesuffix("-paper").removesuffix("-dense")

    def expected(self) -> Published | None:
        """The published number for the sparsity or λ1 of this run, if the paper has one.

        A run that leaves the sparsify phase at some sparsity aims at the next one of the paper.
        """
        if self.run.leave_at is not None:
            above = [each for each in self.published if (each.sparsity or 0.0) >= self.run.leave_at]
            return min(above, key=lambda each: each.sparsity or 0.0, default=None)
        wanted = 0.0 if self.run.method == "dense" else self.run.sparsity
        for each in self.published:
            if self.run.decay is not None and each.decay == self.run.decay:
                return each
            if self.run.decay is None and wanted is not None and each.sparsity == wanted:
                return each
        return None

    def agrees(self, metric: str, value: float) -> bool | None:
        """Whether a result matches the paper within the tolerance; None if the paper has no number."""
        expected = self.expected()
        if expected is None:
            return None
        worse = value - expected.value if metric == "perplexity" else expected.value - value
        return worse <= self.tolerance


def share(epochs: int, *, of: int) -> str:
    """A duration of `epochs` out of `of`, as a fraction of the run."""
    return f"{epochs / of:.9f}".rstrip("0").rstrip(".") + "run"


def variants(
    base: Run, name: str, about: str, *, sparsity: float, paper: Run, published: tuple[Published, ...], tolerance: float
) -> tuple[Recipe, ...]:
    """The three runs of one network: dense, with our default method, and with the settings of the paper."""
    return (
        Recipe(f"{name}-dense", f"{about}, dense", base, published, tolerance),
        Recipe(
            name,
            f"{about}, {sparsity:.0%} sparse, our defaults",
            replace(base, method="scl", sparsity=sparsity),
            published,
            tolerance,
        ),
        Recipe(f"{name}-paper", f"{about}, the paper's settings", paper, published, tolerance),
    )
