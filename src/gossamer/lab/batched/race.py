"""Many runs as one stacked network while they are trained.

Runs that are still the same dense network share a row, the trunk, and branch off it where their masks begin to learn
(lanes.py says who sits where). Methods that are sparse from the first step on have rows of their own from the start.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.lab.batched.averaging import averaging_rates, recalibrate_
from gossamer.lab.batched.checkpoint import fill_, random_state, read_newest, set_random_state, write
from gossamer.lab.batched.feed import Feed
from gossamer.lab.batched.lanes import Common, Lane, Outcome, Seats, seats, turns
from gossamer.lab.batched.learner import StackedLearner, Tables, Team
from gossamer.lab.batched.stack import NetworkStack
from gossamer.lab.batched.teaching import FrozenTrunks, Lessons, check_teachers, taught_by_trunks
from gossamer.lab.batched.training import Training
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.training.capture import Captured
from gossamer.methods.base import Context, Timeline
from gossamer.methods.dense import Dense
from gossamer.methods.frozen import Frozen
from gossamer.schedule import Plan, sparse_weight_decay

_RECALIBRATION = 200  # training batches whose statistics batch norms get anew


class Running:
    """Runs while they are trained: `epoch` after `epoch`, then `outcomes`."""

    def __init__(
        self,
        common: Common,
        lanes: Sequence[Lane],
        data: ImageSet,
        make_network: Callable[[], nn.Module],
        *,
        device: torch.device,
        dtype: torch.dtype,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.common, self.lanes, self._data, self.stop = common, list(lanes), data, stop
        self.done = 0  # steps
        self._started, self._seconds_before = time.perf_counter(), 0.0
        check_teachers(self.lanes)
        self._frozen_trunks: FrozenTrunks | None = None
        self._seeds = sorted({lane.seed for lane in lanes})
        self.feed = Feed(data, self._seeds, common.batch_size, device=device, dtype=dtype)
        self.steps = common.epochs * self.feed.steps
        wrong = [lane.name for lane in lanes if len(lane.rates) != self.steps]
        if wrong:
            raise ValueError(f"expected {self.steps} steps of every run, got another number for {', '.join(wrong)}")
        self._seats, self._turns = seats(self.lanes, 0), frozenset(turns(self.lanes))
        networks = []
        for row in self._seats.rows:
            torch.manual_seed(self.lanes[row[0]].seed)
            networks.append(make_network())
        self.learner = StackedLearner(NetworkStack(networks, device=device, dtype=dtype))
        self._try_methods()
        self._losses = torch.zeros(len(lanes), device=device)  # a lane, not a row
        self.train_loss = torch.zeros_like(self._losses)
        self._teams: dict[tuple[Any, ...], Team] = {}
        self.turn(0)

    def _try_methods(self) -> None:
        """Create the method of every kind of run once: what it refuses is refused before the first step."""
        stack = self.learner.stack
        kinds = {(lane.team, lane.sparsity, lane.options): lane for lane in reversed(self.lanes)}
        for lane in kinds.values():
            if lane.plan is None:
                continue
            weights, timeline = stack.variables[:1, : stack.connections].clone(), self._timeline(lane.plan, 1)
            try:
                lane.method_type(self._context([lane], timeline, weights))
            except ValueError as error:
                raise ValueError(f"run {lane.name}: {error}") from error

    def epoch(self, number: int) -> None:
        """Train all runs for one epoch, for what is left of it where they go on, or until they shall `stop`."""
        first, end = number * self.feed.steps, (number + 1) * self.feed.steps
        begun = self.done if first < self.done < end else first
        self.feed.begin_epoch(number, begun - first)
        if begun == first:
            self._losses.zero_()
        for step in range(begun, end):
            if step in self._turns and step > 0:
                self.turn(step)
            self.captured()
            self.learner.refresh(step + 1)
            self.done = step + 1
            if self.done < end and self.stop():
                return
        self.train_loss.copy_(self._losses / self.feed.steps)

    def turn(self, step: int) -> None:
        """Let runs whose masks begin with this step branch off their trunks, and freeze masks that are done."""
        old, self._seats = self._seats.row_of_lanes(), seats(self.lanes, step)
        self._keep_teachers(old, step)
        rows = [old[lanes[0]] for lanes in self._seats.rows]
        if rows != list(range(len(self.learner.stack))):
            self.learner.branch(rows)
        averages = any(lane.training.averages for lane in self.lanes)
        self.learner.seat(self._seat_teams(self._seats, step), averages=averages)
        self._look_up(self._seats, step)
        self.captured = Captured(self._step(), self.learner.stack.device)

    def save(self, path: Path) -> None:
        """Write all that is needed to go on."""
        seconds = self._seconds_before + time.perf_counter() - self._started
        about = {"steps": self.done, "seconds": seconds, **self._identity()}
        write(path, {**self._tensors(), **random_state(self.learner.stack.device)}, about)

    def go_on_from(self, path: Path) -> int:
        """Be where the runs were when they were written; returns the whole epochs that are done, 0 if nothing was."""
        found = read_newest(path)
        if found is None:
            return 0
        tensors, about = found
        if {name: about.get(name) for name in self._identity()} != self._identity():
            raise ValueError(f"the checkpoint in {path} is of another race: delete it, or choose another file")
        done = about.get("steps")
        if type(done) is not int or not 0 < done <= self.steps:
            raise ValueError(f"expected 1 to {self.steps} steps in the checkpoint {path}, got {done!r}: delete it")
        seconds = about.get("seconds")
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(f"expected the seconds of training in the checkpoint {path}, got {seconds!r}: delete it")
        self._seconds_before = float(seconds)
        self.turn(done - 1)
        self.done = done
        fill_(self._tensors(), tensors, path)
        self.learner.show()
        set_random_state(tensors, self.learner.stack.device)
        return done // self.feed.steps

    def _tensors(self) -> dict[str, Tensor]:
        found = {**self.learner.tensors(), "train_loss": self.train_loss}
        if self.done % self.feed.steps:  # in the middle of an epoch
            found["losses"] = self._losses
        return found if self._frozen_trunks is None else {**found, **self._frozen_trunks.tensors()}

    def _identity(self) -> dict[str, Any]:
        return {"common": asdict(self.common), "runs": [lane.identity for lane in self.lanes]}

    def phases(self, epoch: int) -> str:
        """The phases in which runs are at the end of an epoch."""
        last = (epoch + 1) * self.feed.steps - 1
        return ", ".join(dict.fromkeys(lane.phase(last) for lane in self.lanes))

    def outcomes(self) -> list[Outcome]:
        """What has come of every lane, in their order; to be asked once, when all is over."""
        if any(not lane.is_frozen(self.steps - 1) for lane in self.lanes):
            self.turn(self.steps)
        stack = self.learner.stack
        test, held_out = last = self._accuracies()
        if any(lane.training.fresh_statistics for lane in self.lanes):
            self._take_averages()
            test, held_out = self._accuracies()
        by_tensor = [part.sum(1).tolist() for part in torch.split(self.learner.left, stack.connection_sizes, dim=1)]
        sparsity, loss = self.learner.sparsity(), self.train_loss.tolist()
        return [
            Outcome(
                sparsity=sparsity[row],
                accuracy=test[row],
                validation_accuracy=None if held_out is None else held_out[row],
                train_loss=loss[number],
                connections_by_tensor=tuple(counts[row] for counts in by_tensor),
                mask_steps=self.lanes[number].mask_steps,
                seconds_before=self._seconds_before,
                **_plain(self.lanes[number], *last, row),
            )
            for number, row in enumerate(self._seats.row_of_lanes())
        ]

    def _accuracies(self) -> tuple[list[float], list[float] | None]:
        """On the test set, and on the images held out."""
        stack, held_out = self.learner.stack, self._data.validation
        test = evaluate(stack, self.feed, self._data.test)
        return test, None if held_out is None else evaluate(stack, self.feed, held_out)

    def _take_averages(self) -> None:
        """Averaged weights, and statistics of their own, for the runs that ask for them."""
        if self.learner.average is not None:
            self.learner.take_average()
        stack, epoch = self.learner.stack, self.common.epochs  # the epoch after the last: images as never seen
        fresh = torch.tensor([training.fresh_statistics for training in self._trainings(self._seats)])
        chosen = fresh.to(stack.device)
        recalibrate_(stack, self.feed, self._seed_of_row, chosen, epoch=epoch, batches=_RECALIBRATION)

    def networks(self) -> Iterator[tuple[int, nn.Module]]:
        """Every lane with the network that its forward pass uses now, a plain one on the CPU."""
        stack = self.learner.stack
        for number, row in enumerate(self._seats.row_of_lanes()):
            yield number, stack.network(row, stack.variables).cpu().eval()

    def _keep_teachers(self, old: Sequence[int], step: int) -> None:
        """Keep the trunks as they are now, where the runs that branch off shall learn from them."""
        pupils = [number for number in taught_by_trunks(self.lanes) if self.lanes[number].has_masks(step)]
        if self._frozen_trunks is not None or not pupils:
            return
        rows = list(dict.fromkeys(old[number] for number in pupils))
        seeds = [self._seeds.index(next(self.lanes[n].seed for n in pupils if old[n] == row)) for row in rows]
        which = {number: rows.index(old[number]) for number in pupils}
        self._frozen_trunks = FrozenTrunks(self.learner.stack, rows, seeds, which)

    def _trainings(self, now: Seats) -> list[Training]:
        """How each row trains; a trunk plainly."""
        return [self.lanes[lanes[0]].training if row < now.begun else Training() for row, lanes in enumerate(now.rows)]

    def _seat_teams(self, now: Seats, step: int) -> list[Team]:
        teams, start = [], 0
        for numbers in now.teams:
            rows = slice(start, start + len(numbers))
            teams.append(self._team([self.lanes[number] for number in numbers], rows, step))
            start = rows.stop
        if now.trunks:
            rows = slice(start, start + len(now.trunks))
            timeline = self._timeline(Plan(0, self.steps, 0, 0), len(now.trunks))
            weights = self.learner.stack.variables[rows, : self.learner.stack.connections]
            teams.append(Team(rows, Dense(self._context([], timeline, weights)), timeline))
        return teams

    def _team(self, lanes: Sequence[Lane], rows: slice, step: int) -> Team:
        """The team of these lanes as it goes on from this step."""
        first, stack = lanes[0], self.learner.stack
        assert first.plan is not None
        weights = stack.variables[rows, : stack.connections]
        before = self._teams.get(first.team)
        if before is None:
            timeline = self._timeline(first.plan, len(lanes))
            method = first.method_type(self._context(lanes, timeline, weights))
        else:
            timeline, method = before.timeline, before.method
        if first.is_frozen(step) and not isinstance(method, Frozen):
            method = Frozen(method.finalize(weights))
        self._teams[first.team] = Team(rows, method, timeline)
        return self._teams[first.team]

    def _look_up(self, now: Seats, step: int) -> None:
        """What the step looks up for its rows."""
        stack, first, trainings = self.learner.stack, [self.lanes[row[0]] for row in now.rows], self._trainings(now)
        place: dict[str, Any] = {"dtype": stack.precise, "device": stack.device}
        starts = [lane.average_from for lane in first]
        averaging = averaging_rates(trainings, first=starts, total=self.steps)
        removed = [[training.removed_weight_decay] for training in trainings]
        self._tables = Tables(
            torch.stack([lane.rates for lane in first], dim=1).to(**place),
            torch.tensor([[_weight_decay(*each, step)] for each in zip(first, trainings, strict=True)], **place),
            torch.tensor([[lane.momentum] for lane in first], **place),
            removed_decay=None if all(each == [1.0] for each in removed) else torch.tensor(removed, **place),
            averaging=None if averaging is None else averaging.to(**place),
        )
        taught = any(training.distil for training in trainings)
        self._lessons = Lessons(self.lanes, now, self._frozen_trunks).on(stack.device) if taught else None
        self._seed_of_row = torch.tensor([self._seeds.index(lane.seed) for lane in first], device=stack.device)
        self._row_of_lane = torch.tensor(now.row_of_lanes(), device=stack.device)

    def _timeline(self, plan: Plan, rows: int) -> Timeline:
        stack = self.learner.stack
        return Timeline(plan, rows=rows, device=stack.device, dtype=stack.precise, epoch=self.feed.steps)

    def _context(self, lanes: Sequence[Lane], timeline: Timeline, weights: Tensor) -> Context[Any]:
        layout = self.learner.stack.layout
        requests = [lane.request(layout) for lane in lanes]
        density = lanes[0].min_density if lanes else 0.0
        return Context(layout, requests, timeline, weights, min_density=density)

    def _step(self) -> Callable[[], None]:
        learner, tables, feed, stack = self.learner, self._tables, self.feed, self.learner.stack
        which, rows, losses, smoothing = self._seed_of_row, self._row_of_lane, self._losses, self.common.label_smoothing
        lessons = self._lessons

        def step() -> None:
            of_seeds, labels = feed.take()
            images, labels = of_seeds.index_select(0, which), labels.index_select(0, which)
            logits = stack(images).to(stack.precise)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing)
            loss = loss.view(labels.shape).mean(1)
            wanted = loss if lessons is None else lessons.loss(loss, logits, of_seeds)
            gradients = stack.gradients(wanted.sum())
            with torch.no_grad():
                losses.add_(loss.detach().index_select(0, rows))
                learner.update(gradients, tables)

        return step


def evaluate(stack: NetworkStack, feed: Feed, part: Labelled) -> list[float]:
    """The accuracy of each network, in percent."""
    stack.template.eval()
    right = torch.zeros(len(stack), device=stack.device)
    with torch.no_grad():
        for images, labels in feed.evaluation(part):
            right += (stack.on_same_images(images).argmax(-1) == labels).sum(1)
    stack.template.train()
    return (100.0 * right / len(part)).tolist()


def _weight_decay(lane: Lane, training: Training, step: int) -> float:
    later = training.finetune_weight_decay
    if later is not None and lane.is_frozen(step):
        return later
    left = 1.0 - lane.sparsity
    return sparse_weight_decay(
        lane.weight_decay, density=left, power=training.weight_decay_power
    )  # a trunk has power 0


def _plain(lane: Lane, test: list[float], held_out: list[float] | None, row: int) -> dict[str, float | None]:
    """The accuracies of the last weights, where others are what counts."""
    if not lane.training.fresh_statistics:
        return {}
    validation = None if held_out is None else held_out[row]
    return {"plain_accuracy": test[row], "plain_validation_accuracy": validation}
