"""Distillation inside a race: sparse runs learn also from the logits of a dense network of their seed.

Rows of one seed see the same augmented images in every step, so the logits of a dense run that trains beside the sparse
ones are there already; they cost nothing. A teacher that is the frozen trunk costs one forward pass for each seed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.distillation import divergence, mixed
from gossamer.lab.batched.rows import Lane, Seats
from gossamer.lab.batched.settings_of_training import Training
from gossamer.lab.batched.stack import NetworkStack
from gossamer.methods.dense import Dense


def distillation(student: Tensor, teacher: Tensor, temperature: Tensor) -> Tensor:
    """T²·KL(teacher ‖ student) of each row, both softened by T: logits (rows, batch, classes), T (rows,)."""
    return divergence(student, teacher, temperature[:, None]).mean(1)


class FrozenTrunks:
    """The networks of some rows as they are now, and for each of the lanes that they teach which one it is."""

    def __init__(self, stack: NetworkStack, rows: Sequence[int], seeds: Sequence[int], pupils: dict[int, int]) -> None:
        """`seeds` are places in the feed, one a row; `pupils` has the number of a row here for each lane."""
        index = torch.tensor(rows, device=stack.device)
        self._stack, self._seeds, self.pupils = stack, torch.tensor(seeds, device=stack.device), pupils
        self._leaves = {name: leaf.detach().index_select(0, index) for name, leaf in stack.leaves.items()}
        self._buffers = {name: buffer.index_select(0, index) for name, buffer in stack.buffers.items()}

    def __call__(self, images: Tensor) -> Tensor:
        """Logits for the images of each seed, (seeds, batch, …): those of the trunks' own seeds are taken."""
        with torch.no_grad():
            return self._stack.with_values(self._leaves, self._buffers, images.index_select(0, self._seeds))

    def tensors(self) -> dict[str, Tensor]:
        named = {**self._leaves, **self._buffers}
        return {f"trunk.{name}": tensor for name, tensor in named.items()}


class Lessons:
    """Who teaches whom, for the rows of a stack as they are seated now. Trunks are dense, and learn from nobody."""

    def __init__(self, lanes: Sequence[Lane], now: Seats, trunks: FrozenTrunks | None) -> None:
        self.trunks = trunks
        self._training = [
            lanes[row[0]].training if place < now.begun else Training() for place, row in enumerate(now.rows)
        ]
        self._teacher = [
            self._find(lanes, now, row[0]) if self._training[place].distil else place
            for place, row in enumerate(now.rows)
        ]
        self._columns: tuple[Tensor, Tensor, Tensor] | None = None

    def on(self, device: torch.device) -> "Lessons":
        """Bring what the loss needs to the device, once, before a step is captured."""
        told = self._training
        self._columns = (
            torch.tensor(self._teacher, device=device),
            torch.tensor([each.distil for each in told], device=device),
            torch.tensor([each.temperature for each in told], device=device),
        )
        return self

    def loss(self, cross_entropy: Tensor, logits: Tensor, images: Tensor) -> Tensor:
        """The loss of each row. `images` are those of each seed, as the feed gave them."""
        assert self._columns is not None
        teacher, share, temperature = self._columns
        said = logits.detach()
        if self.trunks is not None:
            said = torch.cat([said, self.trunks(images).to(said.dtype)])
        lesson = distillation(logits, said.index_select(0, teacher), temperature)
        return mixed(cross_entropy, lesson, share)

    def _find(self, lanes: Sequence[Lane], now: Seats, number: int) -> int:
        lane = lanes[number]
        if self.trunks is not None and number in self.trunks.pupils:
            return len(now.rows) + self.trunks.pupils[number]
        rows = enumerate(now.rows)
        dense = [
            (place, row) for place, row in rows if lanes[row[0]].seed == lane.seed and _is_dense(lanes, now, place)
        ]
        wanted = lane.training.teacher_weight_decay
        same = [place for place, row in dense if any(_is_teacher(lanes[each], wanted) for each in row)]
        return same[0] if same else dense[0][0]


def taught_by_trunks(lanes: Sequence[Lane]) -> list[int]:
    return [number for number, lane in enumerate(lanes) if lane.training.distil and lane.training.teacher == "trunk"]


def check_teachers(lanes: Sequence[Lane]) -> None:
    """Every run that learns from a dense one needs that one in the race, or it could not be told what it learned.

    Trunks that teach are kept once, so the runs that they teach must branch off together.
    """
    begins = {lanes[number].turns[:1] for number in taught_by_trunks(lanes)}
    if len(begins) > 1:
        raise ValueError("expected one warm-up for all runs with teacher='trunk', got several: race them apart")
    for lane in lanes:
        training = lane.training
        if not training.distil:
            continue
        if training.teacher == "trunk":
            if lane.method_type.from_start:
                raise ValueError(f"{lane.method_type.name} has no trunk: expected teacher='dense', got teacher='trunk'")
            continue
        decay = training.teacher_weight_decay
        if not any(each.seed == lane.seed and _is_teacher(each, decay) for each in lanes):
            raise ValueError(
                f"expected a dense run of seed {lane.seed} with weight_decay={decay:g} in the race, as the teacher "
                "of a run with distil, got none: add Member(seed, 'dense', weight_decay=…), or teacher='trunk'"
            )


def _is_dense(lanes: Sequence[Lane], now: Seats, place: int) -> bool:
    return place >= now.begun or lanes[now.rows[place][0]].method_type is Dense


def _is_teacher(lane: Lane, weight_decay: float) -> bool:
    plain = not lane.training.distil and lane.training.finetune_weight_decay is None
    return lane.method_type is Dense and plain and lane.weight_decay == weight_decay
