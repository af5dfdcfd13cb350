"""A race: runs that differ in seed, method and settings, from one warmed-up trunk a seed, over the same epochs.

Methods that are sparse from the first step on have rows of their own from the beginning; all others branch off the
dense trunk of their seed where masks begin to learn.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gossamer.data.sets import ImageSet, Labelled
from gossamer.methods import Layout, Request, Timeline
from gossamer.methods.dense import Dense
from gossamer.methods.filters import gains_of
from gossamer.methods.lottery import rewound
from gossamer.schedule import Phase, Plan
from gossamer.side_by_side.averaging import averaging_rates, recalibrate_
from gossamer.side_by_side.capture import Captured
from gossamer.side_by_side.checkpoint import random_state, read, set_random_state, write
from gossamer.side_by_side.entries import Member, Outcome, Race, by_kind
from gossamer.side_by_side.feed import Feed
from gossamer.side_by_side.learner import StackedLearner, Tables, Team
from gossamer.side_by_side.stack import NetworkStack
from gossamer.side_by_side.teaching import FrozenTrunks, Lessons, check_teachers

_RECALIBRATION = 200  # training batches whose statistics batch norms get anew


def run_race(
    race: Race,
    members: Sequence[Member],
    data: ImageSet,
    make_network: Callable[[], nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[str], None] = lambda line: None,
    checkpoint: Path | None = None,
    checkpoint_minutes: float = 5.0,
    keep: Callable[[Member, nn.Module], None] | None = None,
) -> list[Outcome]:
    """Train all members side by side: the warm-up once for each seed, then every member from its seed's trunk.

    With a `checkpoint` the race is written there now and then, after an epoch, and goes on from there if it is cut
    short; who calls removes it once the outcomes are safe. `keep` is handed every finished network.
    """
    run = Running(race, members, data, make_network, device=device, dtype=dtype)
    first = 0 if checkpoint is None else run.go_on_from(checkpoint)
    if first:
        progress(f"goes on after epoch {first} of {race.epochs}")
    started = written = time.perf_counter()
    for epoch in range(first, race.epochs):
        run.epoch(epoch)
        if checkpoint is not None and time.perf_counter() - written >= 60 * checkpoint_minutes:
            run.save(checkpoint, epoch + 1)
            written = time.perf_counter()
        if epoch % max(1, race.epochs // 20) == 0 or epoch == race.epochs - 1:
            took = time.perf_counter() - started
            loss = [round(value, 3) for value in run.train_loss.tolist()]
            progress(f"epoch {epoch + 1}/{race.epochs} {run.phase} {took:.1f}s loss {loss}")
    outcomes = run.outcomes()
    if keep is not None:
        for member, network in run.networks():
            keep(member, network)
    return outcomes


class Running:
    """A race while it is run: `epoch` after `epoch`, then `outcomes`.

    The rows are the members that are sparse from the start, method by method, then during the warm-up one dense trunk
    for each seed of the others, and after it these others, method by method.
    """

    def __init__(
        self,
        race: Race,
        members: Sequence[Member],
        data: ImageSet,
        make_network: Callable[[], nn.Module],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.race, self._members, self._data = race, list(members), data
        check_teachers(self._members)
        self._frozen_trunks: FrozenTrunks | None = None
        groups = by_kind(self._members)
        self._early = [group for group in groups if self._members[group[0]].rule.from_start]
        self._late = [group for group in groups if not self._members[group[0]].rule.from_start]
        self._order = [index for group in (*self._early, *self._late) for index in group]  # row -> member
        late_seeds = {self._members[index].seed for group in self._late for index in group}
        self._trunks = [Member(seed, "dense") for seed in sorted(late_seeds)]
        self._rows = [self._members[index] for group in self._early for index in group] + self._trunks
        seeds = sorted({member.seed for member in self._members})
        networks = []
        for member in self._rows:
            torch.manual_seed(member.seed)
            networks.append(make_network())
        stack = NetworkStack(networks, device=device, dtype=dtype)
        self.feed = Feed(data, seeds, race.batch_size, device=device, dtype=dtype)
        self._seeds = seeds
        lengths = [epochs * self.feed.steps for epochs in (race.warmup, race.sparsify, race.stabilise, race.finetune)]
        self.plan = Plan(*lengths)
        self._early_plan = Plan(0, lengths[0] + lengths[1], lengths[2], lengths[3])
        self.learner = StackedLearner(stack, momentum=race.momentum)
        self.phase = Phase.WARMUP
        self.captured: Captured | None = None
        teams = [self._team(group, start, self._early_plan) for group, start in _starts(self._early, 0)]
        if self._trunks:
            teams.append(self._trunk_team(len(self._rows) - len(self._trunks)))
        self._seat(teams)

    def epoch(self, number: int) -> None:
        """Train all runs for one epoch."""
        first = number * self.feed.steps
        phase = self.plan.at(first).phase
        if phase is not self.phase or self.captured is None:
            self.enter(phase)
        assert self.captured is not None
        self.feed.begin_epoch(number)
        self._losses.zero_()
        for step in range(first, first + self.feed.steps):
            self.captured()
            if not self.learner.frozen:
                self.learner.refresh([step + 1 - team.timeline.plan.warmup for team in self.learner.teams])
        self.train_loss.copy_(self._losses / self.feed.steps)

    def save(self, path: Path, epochs: int) -> None:
        """Write all that is needed to go on after so many epochs."""
        tensors = self._tensors()
        about = {"epochs": epochs, **self._identity()}
        write(path, {**tensors, **random_state(self.learner.stack.device)}, about)

    def go_on_from(self, path: Path) -> int:
        """Be where the race was when it was written; returns the epochs that are done, 0 where nothing was written."""
        found = read(path)
        if found is None:
            return 0
        tensors, about = found
        if {name: about.get(name) for name in self._identity()} != self._identity():
            raise ValueError(f"the checkpoint in {path} is of another race: delete it, or choose another file")
        phase = self.plan.at(about["epochs"] * self.feed.steps - 1).phase
        if phase is not Phase.WARMUP:
            self.enter(Phase.SPARSIFY)
        self.enter(phase)
        for name, tensor in self._tensors().items():
            tensor.copy_(tensors[name])
        self.learner.show()
        set_random_state(tensors, self.learner.stack.device)
        return int(about["epochs"])

    def _tensors(self) -> dict[str, torch.Tensor]:
        trunks = {} if self._frozen_trunks is None else self._frozen_trunks.tensors()
        return {**self.learner.tensors(), **trunks, "train_loss": self.train_loss}

    def _identity(self) -> dict[str, Any]:
        return {"race": asdict(self.race), "members": [member.to_dict() for member in self._members]}

    def enter(self, phase: Phase) -> None:
        """Go to a phase from the one before it."""
        if phase.masks_train and self.phase is Phase.WARMUP:
            self._branch()
        if phase is Phase.FINETUNE:
            self.learner.freeze()
        if self.captured is None or phase is not Phase.STABILISE or not self.phase.masks_train:
            self.captured = Captured(self._step(), self.learner.stack.device)
        self.phase = phase

    def outcomes(self) -> list[Outcome]:
        """What has come of every member, in their order; to be asked once, when the race is over."""
        if not self.learner.frozen:
            self.learner.freeze()
        stack = self.learner.stack
        test, held_out = self._accuracies()
        last = (test, held_out)
        if any(member.training.fresh_statistics for member in self._rows):
            self._take_averages()
            test, held_out = self._accuracies()
        by_tensor = [part.sum(1).tolist() for part in torch.split(self.learner.mask, stack.connection_sizes, dim=1)]
        sparsity, loss = self.learner.sparsity(), self.train_loss.tolist()
        found = {
            index: Outcome(
                member=self._members[index],
                sparsity=sparsity[row],
                accuracy=test[row],
                validation_accuracy=None if held_out is None else held_out[row],
                train_loss=loss[row],
                connections_by_tensor=tuple(counts[row] for counts in by_tensor),
                **_plain(self._members[index], *last, row),
            )
            for row, index in enumerate(self._order)
        }
        return [found[index] for index in range(len(self._members))]

    def _accuracies(self) -> tuple[list[float], list[float] | None]:
        """On the test set, and on the images held out."""
        stack, held_out = self.learner.stack, self._data.validation
        test = evaluate(stack, self.feed, self._data.test)
        return test, None if held_out is None else evaluate(stack, self.feed, held_out)

    def _take_averages(self) -> None:
        """Averaged weights, and statistics of their own, for the runs that ask for them."""
        if self.learner.average is not None:
            self.learner.take_average()
        fresh = torch.tensor([member.training.fresh_statistics for member in self._rows], device=self._which.device)
        stack, epoch = self.learner.stack, self.race.epochs  # the epoch after the last: images as they were never seen
        recalibrate_(stack, self.feed, self._which, fresh, epoch=epoch, batches=_RECALIBRATION)

    def networks(self) -> Iterator[tuple[Member, nn.Module]]:
        """Every member with its network as it is now, a plain one."""
        stack = self.learner.stack
        for row, member in enumerate(self._rows):
            yield member, stack.network(row, stack.variables).cpu().eval()

    def _branch(self) -> None:
        """Every member that is not sparse from the start becomes a copy of its seed's trunk."""
        early = len(self._rows) - len(self._trunks)
        trunks = [trunk.seed for trunk in self._trunks]
        if any(member.training.distil and member.training.teacher == "trunk" for member in self._members):
            places = [self._seeds.index(seed) for seed in trunks]
            rows = range(early, early + len(trunks))
            self._frozen_trunks = FrozenTrunks(self.learner.stack, rows, places)
        self._rows = [self._members[index] for index in self._order]
        self.learner.branch([*range(early), *(early + trunks.index(member.seed) for member in self._rows[early:])])
        kept = self.learner.teams[: len(self._early)]
        begun = [self._team(group, start, self.plan) for group, start in _starts(self._late, early)]
        self._seat([*kept, *begun])

    def _seat(self, teams: Sequence[Team]) -> None:
        device = self.learner.stack.device
        averaging = averaging_rates(
            [member.training for member in self._rows], first=self.plan.warmup, total=self.plan.total
        )
        self.learner.seat(teams, averages=averaging is not None)
        shared = torch.tensor([self._shared_rate(step) for step in range(self.plan.total)])
        again = [
            rewound(self.plan, step, shared=self._shared_rate, peak=self.race.learning_rate)
            for step in range(self.plan.total if any(member.rule.rewinds for member in self._rows) else 0)
        ]
        columns = [torch.tensor(again) if member.rule.rewinds else shared for member in self._rows]
        decay = torch.tensor([[member.weight_decay] for member in self._rows], device=device)
        self._tables = Tables(
            torch.stack(columns, dim=1).to(device),
            decay,
            frozen_weight_decay=_column(self._rows, "finetune_weight_decay", device),
            removed_decay=_column(self._rows, "removed_weight_decay", device),
            averaging=None if averaging is None else averaging.to(device, self.learner.stack.precise),
        )
        taught = any(member.training.distil for member in self._rows)
        seeds = [trunk.seed for trunk in self._trunks]
        self._lessons = Lessons(self._rows, self._frozen_trunks, seeds).on(device) if taught else None
        self._which = torch.tensor([self._seeds.index(member.seed) for member in self._rows], device=device)
        self._losses = torch.zeros(len(self._rows), device=device)
        self.train_loss = torch.zeros_like(self._losses)
        self.captured = None

    def _shared_rate(self, step: int) -> float:
        return self.race.rate(step / self.feed.steps)

    def _team(self, group: Sequence[int], start: int, plan: Plan) -> Team:
        members = [self._members[index] for index in group]
        requests: list[Request[Any]] = []
        for member in members:
            assert member.settings is not None
            requests.append(Request(member.sparsity, member.seed, member.settings))
        stack, rows = self.learner.stack, slice(start, start + len(members))
        timeline = self._timeline(plan, len(members))
        weights = stack.variables[rows, : stack.connections]
        rule = members[0].rule(layout_of(stack), requests, timeline, weights, floor=self.race.floor)
        return Team(rows, rule, timeline)

    def _trunk_team(self, start: int) -> Team:
        stack, rows = self.learner.stack, slice(start, start + len(self._trunks))
        timeline = self._timeline(self.plan, len(self._trunks))
        rule = Dense(layout_of(stack), [], timeline, stack.variables[rows, : stack.connections], floor=0.0)
        return Team(rows, rule, timeline)

    def _timeline(self, plan: Plan, rows: int) -> Timeline:
        stack = self.learner.stack
        return Timeline(plan, rows=rows, device=stack.device, dtype=stack.precise, epoch=self.feed.steps)

    def _step(self) -> Callable[[], None]:
        learner, tables, which, losses = self.learner, self._tables, self._which, self._losses
        feed, smoothing, stack = self.feed, self.race.label_smoothing, self.learner.stack
        update = learner.frozen_step if learner.frozen else learner.mask_step
        lessons = self._lessons

        def step() -> None:
            of_seeds, labels = feed.take()
            images, labels = of_seeds.index_select(0, which), labels.index_select(0, which)
            logits = stack(images).float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing)
            loss = loss.view(labels.shape).mean(1)
            wanted = loss if lessons is None else lessons.loss(loss, logits, of_seeds)
            gradients = stack.gradients(wanted.sum())
            with torch.no_grad():
                losses.add_(loss.detach())
                update(gradients, tables)

        return step


def layout_of(stack: NetworkStack) -> Layout:
    """Which columns of the stack are which tensor."""
    tensors = len(stack.connection_sizes)
    names, others = stack.names[:tensors], zip(stack.names[tensors:], stack.sizes[tensors:], strict=True)
    shapes = tuple(tuple(stack.shapes[name]) for name in names)
    return Layout(tuple(names), shapes, gains_of(stack.template, names, list(others)))


def evaluate(stack: NetworkStack, feed: Feed, part: Labelled) -> list[float]:
    """The accuracy of each network, in percent."""
    stack.template.eval()
    right = torch.zeros(len(stack), device=stack.device)
    with torch.no_grad():
        for images, labels in feed.evaluation(part):
            right += (stack.on_same_images(images).argmax(-1) == labels).sum(1)
    stack.template.train()
    return (100.0 * right / len(part)).tolist()


def _column(members: Sequence[Member], name: str, device: torch.device) -> torch.Tensor | None:
    """A setting of the training that replaces weight decay or scales it; None where all runs have the default."""
    if not any(name in member.training.changes() for member in members):
        return None
    found = [getattr(member.training, name) for member in members]
    values = [member.weight_decay if value is None else value for member, value in zip(members, found, strict=True)]
    return torch.tensor(values, device=device)[:, None]


def _plain(member: Member, test: list[float], held_out: list[float] | None, row: int) -> dict[str, float | None]:
    """The accuracies of the last weights, where others are what counts."""
    if not member.training.fresh_statistics:
        return {}
    validation = None if held_out is None else held_out[row]
    return {"plain_accuracy": test[row], "plain_validation_accuracy": validation}


def _starts(groups: Sequence[Sequence[int]], first: int) -> list[tuple[Sequence[int], int]]:
    """Each group with the row at which it starts."""
    starts = []
    for group in groups:
        starts.append((group, first))
        first += len(group)
    return starts
