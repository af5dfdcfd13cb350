"""Many runs as one stacked network while they are trained.

Runs that are still the same dense network share a row, and branch off where their masks begin to learn (see rows.py).
Methods that are sparse from the first step have rows of their own from the start.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.lab.batched.distillation import Teachers
from gossamer.lab.batched.loader import BatchLoader
from gossamer.lab.batched.optimizer import BatchedOptimizer, Hyperparameters, MethodGroup
from gossamer.lab.batched.rows import BatchedRun, Outcome, row_changes, rows_at
from gossamer.lab.batched.stack import NetworkStack
from gossamer.lab.batched.supported import leave_sparsify
from gossamer.lab.checkpoint import (
    Checkpoints,
    machine,
    random_states,
    set_random_states,
    warn_of_another_machine,
)
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.training.capture import Captured
from gossamer.lab.training.optimise import weight_decay
from gossamer.methods.base import Context, Timeline
from gossamer.methods.dense import Dense
from gossamer.methods.frozen import Frozen
from gossamer.schedule import Plan

_FORMAT = 3  # of a checkpoint; earlier ones were safetensors files


class BatchedTraining:
    """Runs while they are trained: `train_epoch` for each epoch, then `outcomes`."""

    def __init__(
        self,
        runs: Sequence[BatchedRun],
        data: ImageSet,
        make_network: Callable[[], nn.Module],
        *,
        device: torch.device,
        dtype: torch.dtype,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """The runs agree in all but the settings in which the runs of a batch may differ (see supported.py)."""
        self.runs, self._data, self.stop = list(runs), data, stop
        self._shared = self.runs[0].run
        self.epochs = self._shared.epochs
        self.done = 0  # steps
        self._started, self._seconds_before = time.perf_counter(), 0.0
        self._seeds = sorted({each.run.seed for each in runs})
        self.loader = BatchLoader(data, self._seeds, self._shared.batch_size, device=device, dtype=dtype)
        self.steps = self.epochs * self.loader.steps
        wrong = [each.run.run_id for each in runs if len(each.rates) != self.steps]
        if wrong:
            raise ValueError(f"expected {self.steps} steps of every run, got another number for {', '.join(wrong)}")
        self._rows, self._row_changes = rows_at(self.runs, 0), frozenset(row_changes(self.runs))
        networks = []
        for numbers in self._rows.runs:
            torch.manual_seed(self.runs[numbers[0]].run.seed)
            networks.append(make_network())
        self.optimizer = BatchedOptimizer(NetworkStack(networks, device=device, dtype=dtype), self._shared.optimizer)
        self._teachers = Teachers(self.runs, self._seeds, device)
        self._try_methods()
        self._losses = torch.zeros(len(runs), device=device)  # one per run, not per row
        self.train_loss = torch.zeros_like(self._losses)
        self._groups: dict[tuple[Any, ...], MethodGroup] = {}
        self.sparsity_by_epoch: list[list[float]] = [[] for _ in runs]
        """Of each run with a fixed λ1, at the end of every epoch in which its masks learned."""
        self.arrange_rows(0)

    def _try_methods(self) -> None:
        """Create the method of every kind of run once: what it refuses is refused before the first step."""
        stack = self.optimizer.stack
        kinds = {(each.group, each.run.sparsity, each.options): each for each in reversed(self.runs)}
        for each in kinds.values():
            if each.plan is None:
                continue
            weights, timeline = stack.variables[:1, : stack.prunable].clone(), self._timeline(each.plan, 1)
            try:
                each.method_type(self._context([each], timeline, weights))
            except ValueError as error:
                raise ValueError(f"run {each.run.run_id}: {error}") from error

    def train_epoch(self, number: int) -> None:
        """Train all runs for one epoch, for what is left of it after a resume, or until `stop`."""
        first, end = number * self.loader.steps, (number + 1) * self.loader.steps
        begun = self.done if first < self.done < end else first
        self.loader.begin_epoch(number, begun - first)
        if begun == first:
            self._losses.zero_()
        for step in range(begun, end):
            self._leave_sparsify(step)
            if step in self._row_changes and step > 0:
                self.arrange_rows(step)
            self.captured()
            self.optimizer.update_topology(step + 1)
            self.done = step + 1
            if self.done < end and self.stop():
                return
        self.train_loss.copy_(self._losses / self.loader.steps)
        self._note_sparsity(end - 1)

    def _leave_sparsify(self, step: int) -> None:
        """End the sparsify phase of the runs that have reached the sparsity at which they leave it. The step that is
        captured reads its learning rates from tables, which change in place."""
        asked = [number for number, each in enumerate(self.runs) if each.may_leave(step)]
        if not asked:
            return
        row_of_run, sparsity = self._rows.of_runs(), self.optimizer.sparsity()
        for number in asked:
            row, leave_at = row_of_run[number], self.runs[number].run.leave_at
            if leave_at is None or sparsity[row] < leave_at:
                continue
            each = self.runs[number] = leave_sparsify(self.runs[number], step, self.loader.steps)
            assert each.plan is not None
            group = self._groups[each.group]
            group.timeline.follow(row - group.rows.start, each.plan)
            self._hyperparameters.learning_rate[:, row].copy_(each.rates)
        self._row_changes = frozenset(row_changes(self.runs))

    def arrange_rows(self, step: int) -> None:
        """Let runs whose masks begin with this step branch off their warm-ups, and freeze masks that are done."""
        old, self._rows = self._rows.of_runs(), rows_at(self.runs, step)
        self._teachers.keep(self.optimizer.stack, old, step)
        rows = [old[numbers[0]] for numbers in self._rows.runs]
        if rows != list(range(len(self.optimizer.stack))):
            self.optimizer.branch(rows)
        self.optimizer.set_groups(self._make_groups(step))
        self._take_hyperparameters(step)
        self.captured = Captured(self._step(), self.optimizer.stack.device)

    def _note_sparsity(self, step: int) -> None:
        """Note the sparsity after the last step of an epoch, where it is not known from the budget."""
        learning = [
            number
            for number, each in enumerate(self.runs)
            if each.run.decay is not None and each.has_masks(step) and not each.is_frozen(step)
        ]
        if learning:
            row_of_run, sparsity = self._rows.of_runs(), self.optimizer.sparsity()
            for number in learning:
                self.sparsity_by_epoch[number].append(sparsity[row_of_run[number]])

    def save(self, checkpoints: Checkpoints) -> bool:
        """Write a checkpoint; False, with a warning, if that fails."""
        seconds = self._seconds_before + time.perf_counter() - self._started
        state = {
            "format": _FORMAT,
            "runs": [each.run.run_id for each in self.runs],
            "steps": self.done,
            "left": [each.left for each in self.runs],
            "sparsity_by_epoch": self.sparsity_by_epoch,
            "seconds": seconds,
            "machine": machine(),
            "tensors": {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors().items()},
            "random": random_states(self.optimizer.stack.device),
        }
        return checkpoints.save(state, self.done)

    def restore(self, checkpoints: Checkpoints) -> int:
        """Resume from the newest checkpoint; returns the number of whole epochs that are done, 0 without one."""
        state = checkpoints.load()
        if state is None:
            return 0
        done, self._seconds_before = check_state(state, [each.run.run_id for each in self.runs], self.steps)
        for number, left in enumerate(_left(state, self.runs, done)):
            if left is not None:
                self.runs[number] = leave_sparsify(self.runs[number], left, self.loader.steps)
        self._row_changes = frozenset(row_changes(self.runs))
        self.sparsity_by_epoch = _sparsities(state, len(self.runs))
        self.arrange_rows(done - 1)
        self.done = done
        fill_(self._tensors(), state["tensors"])
        self.optimizer.apply_masks()
        try:
            set_random_states(state["random"], self.optimizer.stack.device)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise _unusable(f"other states of random number generators ({error})") from error
        if self.optimizer.stack.device.type == "cpu":
            warn_of_another_machine(state.get("machine"))
        return done // self.loader.steps

    def _tensors(self) -> dict[str, Tensor]:
        found = {**self.optimizer.tensors(), **self._teachers.tensors(), "train_loss": self.train_loss}
        if self.done % self.loader.steps:  # in the middle of an epoch
            found["losses"] = self._losses
        return found

    def phases(self, epoch: int) -> str:
        """The phases in which runs are at the end of an epoch."""
        last = (epoch + 1) * self.loader.steps - 1
        return ", ".join(dict.fromkeys(each.phase(last) for each in self.runs))

    def outcomes(self) -> list[Outcome]:
        """The outcome of every run, in their order; to be called once, after the last step."""
        if any(not each.is_frozen(self.steps - 1) for each in self.runs):
            self.arrange_rows(self.steps)
        stack, held_out = self.optimizer.stack, self._data.validation
        test = evaluate(stack, self.loader, self._data.test)
        validation = None if held_out is None else evaluate(stack, self.loader, held_out)
        by_tensor = [part.sum(1).tolist() for part in torch.split(self.optimizer.nonzero, stack.prunable_sizes, dim=1)]
        sparsity, loss = self.optimizer.sparsity(), self.train_loss.tolist()
        return [
            Outcome(
                sparsity=sparsity[row],
                accuracy=test[row],
                validation_accuracy=None if validation is None else validation[row],
                train_loss=loss[number],
                nonzeros_by_tensor=tuple(counts[row] for counts in by_tensor),
                warmup_steps=self.runs[number].warmup_steps,
                mask_steps=self.runs[number].mask_steps,
                left=self.runs[number].left,
                sparsity_by_epoch=tuple(self.sparsity_by_epoch[number]),
                seconds_before=self._seconds_before,
            )
            for number, row in enumerate(self._rows.of_runs())
        ]

    def networks(self) -> Iterator[tuple[int, nn.Module]]:
        """The number of every run with the network that its forward pass uses now, a plain one on the CPU."""
        stack = self.optimizer.stack
        for number, row in enumerate(self._rows.of_runs()):
            yield number, stack.network(row, stack.variables).cpu().eval()

    def _make_groups(self, step: int) -> list[MethodGroup]:
        groups, start, stack = [], 0, self.optimizer.stack
        for numbers in self._rows.groups:
            rows = slice(start, start + len(numbers))
            groups.append(self._make_group([self.runs[number] for number in numbers], rows, step))
            start = rows.stop
        if self._rows.warmups:
            rows = slice(start, start + len(self._rows.warmups))
            timeline = self._timeline(Plan(0, self.steps, 0, 0), len(self._rows.warmups))
            weights = stack.variables[rows, : stack.prunable]
            groups.append(MethodGroup(rows, Dense(self._context([], timeline, weights)), timeline))
        return groups

    def _make_group(self, runs: Sequence[BatchedRun], rows: slice, step: int) -> MethodGroup:
        """The group of these runs from this step on."""
        first, stack = runs[0], self.optimizer.stack
        assert first.begun is not None
        weights = stack.variables[rows, : stack.prunable]
        before = self._groups.get(first.group)
        if before is None:
            timeline = self._timeline(first.begun, len(runs))
            timeline.plans = [each.plan for each in runs if each.plan is not None]
            method = first.method_type(self._context(runs, timeline, weights))
        else:
            timeline, method = before.timeline, before.method
        if all(each.is_frozen(step) for each in runs) and not isinstance(method, Frozen):
            method = Frozen(method.finalize(weights))
        self._groups[first.group] = MethodGroup(rows, method, timeline)
        return self._groups[first.group]

    def _take_hyperparameters(self, step: int) -> None:
        """Bring what the step reads for its rows to the device."""
        stack, first = self.optimizer.stack, [self.runs[numbers[0]] for numbers in self._rows.runs]
        place: dict[str, Any] = {"dtype": stack.precise, "device": stack.device}
        self._hyperparameters = Hyperparameters(
            torch.stack([each.rates for each in first], dim=1).to(**place),
            torch.tensor([[weight_decay(each.run, each.plan, step)] for each in first], **place),
            torch.tensor([[each.run.momentum] for each in first], **place),
        )
        self._distillation = self._teachers.distillation(self._rows.of_runs(), step)
        self._seed_of_row = torch.tensor([self._seeds.index(each.run.seed) for each in first], device=stack.device)
        self._row_of_run = torch.tensor(self._rows.of_runs(), device=stack.device)

    def _timeline(self, plan: Plan, rows: int) -> Timeline:
        stack = self.optimizer.stack
        return Timeline(plan, rows=rows, device=stack.device, dtype=stack.precise, epoch=self.loader.steps)

    def _context(self, runs: Sequence[BatchedRun], timeline: Timeline, weights: Tensor) -> Context[Any]:
        layout = self.optimizer.stack.layout
        requests = [each.request(layout) for each in runs]
        density = runs[0].min_density if runs else 0.0
        return Context(layout, requests, timeline, weights, min_density=density)

    def _step(self) -> Callable[[], None]:
        optimizer, parameters, loader = self.optimizer, self._hyperparameters, self.loader
        stack = optimizer.stack
        seeds, rows, losses, smoothing = self._seed_of_row, self._row_of_run, self._losses, self._shared.label_smoothing
        distillation, clip = self._distillation, self._shared.clip

        def step() -> None:
            of_seeds, labels = loader.next_batch()
            images, labels = of_seeds.index_select(0, seeds), labels.index_select(0, seeds)
            logits = stack(images).to(stack.precise)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing)
            loss = loss.view(labels.shape).mean(1)
            wanted = loss if distillation is None else distillation.loss(loss, logits, of_seeds)
            gradients = stack.gradients(wanted.sum())
            with torch.no_grad():
                if clip is not None:
                    clip_(gradients, clip)
                losses.add_(loss.detach().index_select(0, rows))
                optimizer.update(gradients, parameters)

        return step


def clip_(gradients: Tensor, largest: float) -> None:
    """Limit the norm of each row, as torch.nn.utils.clip_grad_norm_ does for one network."""
    norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    gradients.mul_((largest / (norms + 1e-6)).clamp_max(1.0))


def check_state(state: Mapping[str, Any], runs: Sequence[str], steps: int) -> tuple[int, float]:
    """The steps and the seconds in the checkpoint of a batch, which is refused if it cannot be of these runs."""
    if state.get("format") != _FORMAT:
        raise ValueError(
            f"expected the checkpoint of a batch in format {_FORMAT}, got {state.get('format')!r}: go on with the "
            "version of gossamer that wrote it, or delete it to start over"
        )
    if state.get("runs") != list(runs):
        raise _unusable("one of other runs")
    done, seconds = state.get("steps"), state.get("seconds")
    if type(done) is not int or not 0 < done <= steps:
        raise _unusable(f"{done!r:.40} as its steps, not 1 to {steps}")
    if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise _unusable(f"{seconds!r:.40} as the seconds of training")
    tensors = state.get("tensors")
    if not isinstance(tensors, dict) or not all(isinstance(each, Tensor) for each in tensors.values()):
        raise _unusable("no tensors")
    return done, float(seconds)


def _left(state: Mapping[str, Any], runs: Sequence[BatchedRun], done: int) -> list[int | None]:
    """The steps at which runs left the sparsify phase early, from a checkpoint."""
    found = state.get("left", [None] * len(runs))
    if not isinstance(found, list) or len(found) != len(runs):
        raise _unusable("no list of the runs that left the sparsify phase")
    for each, left in zip(runs, found, strict=True):
        if left is not None and not (type(left) is int and left < done and each.may_leave(left)):
            raise _unusable(f"run {each.run.run_id} leaving the sparsify phase at step {left!r:.40}")
    return found


def _sparsities(state: Mapping[str, Any], runs: int) -> list[list[float]]:
    found = state.get("sparsity_by_epoch", [[] for _ in range(runs)])
    if not isinstance(found, list) or len(found) != runs or not all(isinstance(each, list) for each in found):
        raise _unusable("no list of sparsities for each run")
    return found


def fill_(wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a checkpoint into those that are wanted; all of them, or none."""
    wrong = [
        name
        for name, tensor in wanted.items()
        if name not in tensors or (tensors[name].shape, tensors[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    if wrong:
        raise _unusable(f"one with no tensor of the right shape and type for {', '.join(wrong[:4])}")
    for name, tensor in wanted.items():
        tensor.copy_(tensors[name])


def _unusable(got: str) -> ValueError:
    return ValueError(f"expected the checkpoint of this batch, got {got}: delete it to start over")


def evaluate(stack: NetworkStack, loader: BatchLoader, part: Labelled) -> list[float]:
    """The accuracy of each network, a share."""
    stack.template.eval()
    right = torch.zeros(len(stack), dtype=torch.int64, device=stack.device)
    with torch.no_grad():
        for images, labels in loader.evaluation(part):
            right += (stack.on_same_images(images).argmax(-1) == labels).sum(1)
    stack.template.train()
    return [count / len(part) for count in right.tolist()]
