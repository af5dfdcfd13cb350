"""Distillation in a batch: runs with `distil` learn from the network that they branched off, as it was then.

A teacher is what `teacher=trunk` is for a run alone (gossamer.lab.training.teacher): the network at the end of the
warm-up, frozen and in evaluation mode. It costs one forward pass per warm-up row, not per student.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.distillation import divergence, mixed
from gossamer.lab.batched.rows import BatchedRun, rows_at
from gossamer.lab.batched.stack import NetworkStack


class Teachers:
    """The networks that students branched off, and which student learns from which."""

    def __init__(self, runs: Sequence[BatchedRun], seeds: Sequence[int], device: torch.device) -> None:
        self._begins: list[int] = []  # the first step of each teacher, in rising order
        self._students: list[list[int]] = []  # the runs that learn from each
        shared: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for number, each in enumerate(runs):
            if each.run.distil and each.plan is not None:
                begin = each.plan.warmup
                (warmup,) = (row for row in rows_at(runs, begin - 1).warmups if number in row)
                shared.setdefault((begin, warmup), []).append(number)
        for (begin, _), students in sorted(shared.items()):
            self._begins.append(begin)
            self._students.append(students)
        places = [seeds.index(runs[students[0]].run.seed) for students in self._students]
        self._seeds = torch.tensor(places, dtype=torch.int64, device=device)
        self._teacher_of = {run: teacher for teacher, students in enumerate(self._students) for run in students}
        self._runs, self._kept = runs, 0
        self._stack: NetworkStack | None = None
        self._leaves: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}

    def keep(self, stack: NetworkStack, row_of_runs: Sequence[int], step: int) -> None:
        """Keep copies of the networks whose students branch off at this step, or did so before."""
        due = sum(begin <= step for begin in self._begins)
        if due == self._kept:
            return
        rows = [row_of_runs[students[0]] for students in self._students[self._kept : due]]
        index, self._stack, self._kept = torch.tensor(rows, device=stack.device), stack, due
        for kept, current in ((self._leaves, stack.leaves), (self._buffers, stack.buffers)):
            for name, tensor in current.items():
                copies = tensor.detach().index_select(0, index)
                kept[name] = torch.cat([kept[name], copies]) if name in kept else copies

    def distillation(self, row_of_runs: Sequence[int], step: int) -> "Distillation | None":
        """What the loss of a step needs with these rows; None where no run has a teacher yet."""
        students = [number for number in self._teacher_of if self._runs[number].has_masks(step)]
        if self._stack is None or not students:
            return None
        runs, device, precise = [self._runs[number].run for number in students], self._stack.device, self._stack.precise
        return Distillation(
            self,
            torch.tensor([row_of_runs[number] for number in students], device=device),
            torch.tensor([self._teacher_of[number] for number in students], device=device),
            torch.tensor([run.distil for run in runs], dtype=precise, device=device),
            torch.tensor([run.temperature for run in runs], dtype=precise, device=device),
        )

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of each teacher for the images of its seed, out of (seeds, batch, …)."""
        assert self._stack is not None
        mine = images.index_select(0, self._seeds[: self._kept])
        self._stack.template.eval()
        with torch.no_grad():
            logits = self._stack.with_values(self._leaves, self._buffers, mine)
        self._stack.template.train()
        return logits

    def tensors(self) -> dict[str, Tensor]:
        """For checkpoints."""
        return {f"teacher.{name}": tensor for name, tensor in {**self._leaves, **self._buffers}.items()}


class Distillation:
    """The loss of students. All tensors have one entry per student and are on the device, so a step can be captured."""

    def __init__(self, teachers: Teachers, rows: Tensor, teacher: Tensor, share: Tensor, temperature: Tensor) -> None:
        self._teachers, self._rows, self._teacher = teachers, rows, teacher
        self._share, self._temperature = share, temperature

    def loss(self, cross_entropy: Tensor, logits: Tensor, images: Tensor) -> Tensor:
        """The loss of each row, from its cross-entropy and logits; `images` are those of each seed."""
        answers = self._teachers(images).to(logits.dtype).index_select(0, self._teacher)
        students = logits.index_select(0, self._rows)
        lesson = divergence(students, answers, self._temperature[:, None]).mean(1)
        taught = mixed(cross_entropy.index_select(0, self._rows), lesson, self._share)
        return cross_entropy.index_copy(0, self._rows, taught)
