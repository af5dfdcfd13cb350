"""A race: runs that differ in seed, method and settings, from one warmed-up trunk a seed, over the same epochs."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import method
from gossamer.data.sets import ImageSet, Labelled
from gossamer.schedule import Phase, Plan, connections_left
from gossamer.side_by_side.capture import Captured
from gossamer.side_by_side.feed import Feed
from gossamer.side_by_side.learner import Columns, StackedLearner, Tables
from gossamer.side_by_side.stack import NetworkStack

METHODS = ("dense", "scl", "magnitude", "gradual", "one_shot")


@dataclass(frozen=True)
class Member:
    """One run of a race."""

    seed: int
    # dense; scl: learned masks; magnitude: the largest |w̃| of the network, re-chosen every step, with dense gradients
    # (DPF); gradual: the same, but what is removed never returns (Zhu & Gupta, global); one_shot: all at once, for good
    # (Han), and fine-tuning from then on
    method: str = "scl"
    sparsity: float = 0.95
    mask_lr: float = 0.01
    global_power: float = 1.0
    feature_power: float = 0.0
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"expected a method out of {', '.join(METHODS)}, got {self.method!r}")


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
    train_loss: float  # of the last epoch
    connections_by_tensor: tuple[int, ...]


def run_race(
    race: Race,
    members: Sequence[Member],
    data: ImageSet,
    make_network: Callable[[], nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Train all members side by side: the warm-up once for each seed, then every member from its seed's trunk."""
    seeds = sorted({member.seed for member in members})
    networks = []
    for seed in seeds:
        torch.manual_seed(seed)
        networks.append(make_network())
    stack = NetworkStack(networks, device=device, dtype=dtype)
    feed = Feed(data, seeds, race.batch_size, device=device, dtype=dtype)
    plan = Plan(*(epochs * feed.steps for epochs in (race.warmup, race.sparsify, race.stabilise, race.finetune)))
    trunk = [Member(seed, "dense") for seed in seeds]
    learner = StackedLearner(stack, _columns(trunk, device), momentum=race.momentum, floor=race.floor)
    tables = _tables(race, plan, trunk, stack, feed.steps)
    which = torch.arange(len(seeds), device=device)
    losses = torch.zeros(len(seeds), device=device)
    train_loss, captured, phase = losses, None, None
    started = time.perf_counter()
    for epoch in range(race.epochs):
        moment = plan.at(epoch * feed.steps)
        if moment.phase is not phase:
            if moment.phase is Phase.SPARSIFY:
                learner.branch([seeds.index(member.seed) for member in members], _columns(members, device))
                learner.begin_masks()
                tables = _tables(race, plan, members, stack, feed.steps)
                which = torch.tensor([seeds.index(member.seed) for member in members], device=device)
                losses = torch.zeros(len(members), device=device)
            if phase is None or moment.phase is not Phase.STABILISE:
                captured = Captured(_step(moment.phase, learner, feed, tables, which, losses, race), device)
            phase = moment.phase
        assert captured is not None
        feed.begin_epoch(epoch)
        losses.zero_()
        for step in range(feed.steps):
            if phase.masks_train and (epoch * feed.steps + step - plan.warmup) % 100 == 0:
                learner.choose_floor()
            captured()
        train_loss = losses / feed.steps
        if epoch % max(1, race.epochs // 20) == 0 or epoch == race.epochs - 1:
            took = time.perf_counter() - started
            loss = [round(value, 3) for value in train_loss.tolist()]
            progress(f"epoch {epoch + 1}/{race.epochs} {phase} {took:.1f}s loss {loss}")
    test = evaluate(stack, feed, data.test)
    validation = None if data.validation is None else evaluate(stack, feed, data.validation)
    assert learner.mask is not None
    by_tensor = [part.sum(1) for part in torch.split(learner.mask, stack.connection_sizes, dim=1)]
    return [
        Outcome(
            member=member,
            sparsity=learner.sparsity()[row],
            accuracy=test[row],
            validation_accuracy=None if validation is None else validation[row],
            train_loss=float(train_loss[row]),
            connections_by_tensor=tuple(int(counts[row]) for counts in by_tensor),
        )
        for row, member in enumerate(members)
    ]


def evaluate(stack: NetworkStack, feed: Feed, part: Labelled) -> list[float]:
    """The accuracy of each network, in percent."""
    stack.template.eval()
    right = torch.zeros(len(stack), device=stack.device)
    with torch.no_grad():
        for images, labels in feed.evaluation(part):
            right += (stack.on_same_images(images).argmax(-1) == labels).sum(1)
    stack.template.train()
    return (100.0 * right / len(part)).tolist()


def _step(
    phase: Phase, learner: StackedLearner, feed: Feed, tables: Tables, which: Tensor, losses: Tensor, race: Race
) -> Callable[[], None]:
    update = {Phase.WARMUP: learner.dense_step, Phase.FINETUNE: learner.frozen_step}.get(phase, learner.mask_step)
    stack = learner.stack

    def step() -> None:
        images, labels = feed.take()
        images, labels = images.index_select(0, which), labels.index_select(0, which)
        logits = stack(images).float()
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=race.label_smoothing
        )
        loss = loss.view(labels.shape).mean(1)
        for leaf in stack.leaves.values():
            leaf.grad = None
        loss.sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            losses.add_(loss.detach())
            update(tables)

    return step


def _columns(members: Sequence[Member], device: torch.device) -> Columns:
    def column(*values: float) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    return Columns(
        weight_decay=column(*(member.weight_decay for member in members)),
        global_power=column(*(member.global_power for member in members)),
        feature_power=column(*(member.feature_power for member in members)),
        by_magnitude=column(*(float(member.method in ("magnitude", "gradual", "one_shot")) for member in members)),
        for_good=column(*(float(member.method in ("gradual", "one_shot")) for member in members)),
    )


def _tables(race: Race, plan: Plan, members: Sequence[Member], stack: NetworkStack, steps: int) -> Tables:
    total, count = plan.total, stack.connections
    moments = [plan.at(step) for step in range(total)]
    settling = torch.tensor([method.cosine(moment.settling) for moment in moments])
    rates = torch.tensor([race.rate(step / steps) for step in range(total)])
    targets = [0.0 if member.method == "dense" else member.sparsity for member in members]
    keep = [count - math.floor(count * target + 0.5) for target in targets]
    ramps = [1.0 if member.method == "one_shot" else None for member in members]
    budgets = torch.tensor(
        [
            [
                connections_left(moment.ramp if at is None else at, count, each)
                for each, at in zip(keep, ramps, strict=True)
            ]
            for moment in moments
        ]
    )
    mask_rates = settling[:, None] * torch.tensor([member.mask_lr for member in members])
    device = stack.device
    return Tables(rates[:, None].to(device), mask_rates.to(device), budgets.to(device))
