"""Distillation inside a race: sparse runs learn also from the logits of a dense network of their seed.

Rows of one seed see the same augmented images in every step, so the logits of a dense run that trains beside the sparse
ones are there already; they cost nothing. A teacher that is the frozen trunk costs one forward pass for each seed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.side_by_side.entries import Member
from gossamer.side_by_side.stack import NetworkStack


def distillation(student: Tensor, teacher: Tensor, temperature: Tensor) -> Tensor:
    """T²·KL(teacher ‖ student) of each row, both softened by T: logits (rows, batch, classes), T (rows,)."""
    softened = temperature[:, None, None]
    wanted, said = F.log_softmax(teacher / softened, dim=-1), F.log_softmax(student / softened, dim=-1)
    return temperature.square() * (wanted.exp() * (wanted - said)).sum(-1).mean(1)


class FrozenTrunks:
    """The networks of some rows as they are now, one for each seed, in the order of the seeds."""

    def __init__(self, stack: NetworkStack, rows: Sequence[int], seeds: Sequence[int]) -> None:
        index = torch.tensor(rows, device=stack.device)
        self._stack, self._seeds = stack, torch.tensor(seeds, device=stack.device)
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
    """Who teaches whom, for the rows of a race as they are seated now."""

    def __init__(self, rows: Sequence[Member], trunks: FrozenTrunks | None, trunk_seeds: Sequence[int]) -> None:
        """`trunks` are those of `trunk_seeds`; before the runs branch off there are none, and dense rows teach."""
        self.trunks, self._rows = trunks, list(rows)
        self._teacher = [row if not member.training.distil else self._find(member, trunk_seeds)
                         for row, member in enumerate(rows)]  # fmt: skip
        self._columns: tuple[Tensor, Tensor, Tensor] | None = None

    def on(self, device: torch.device) -> "Lessons":
        """Bring what the loss needs to the device, once, before a step is captured."""
        told = [member.training for member in self._rows]
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
        return (1.0 - share) * cross_entropy + share * lesson

    def _find(self, member: Member, trunk_seeds: Sequence[int]) -> int:
        if member.training.teacher == "trunk" and self.trunks is not None:
            return len(self._rows) + list(trunk_seeds).index(member.seed)
        dense = [row for row, each in enumerate(self._rows) if each.method == "dense" and each.seed == member.seed]
        wanted = member.training.teacher_weight_decay
        same = [row for row in dense if _is_teacher(self._rows[row], wanted)]
        return (same or dense)[0]


def check_teachers(members: Sequence[Member]) -> None:
    """Every run that learns from a dense one needs that one in the race, or it could not be told what it learned."""
    for member in members:
        training = member.training
        if not training.distil:
            continue
        if training.teacher == "trunk":
            if member.rule.from_start:
                raise ValueError(f"{member.method} has no trunk: expected teacher='dense', got teacher='trunk'")
            continue
        decay = training.teacher_weight_decay
        if not any(each.seed == member.seed and _is_teacher(each, decay) for each in members):
            raise ValueError(
                f"expected a dense run of seed {member.seed} with weight_decay={decay:g} in the race, as the teacher "
                "of a run with distil, got none: add Member(seed, 'dense', weight_decay=…), or teacher='trunk'"
            )


def _is_teacher(member: Member, weight_decay: float) -> bool:
    plain = not member.training.distil and member.training.finetune_weight_decay is None
    return member.method == "dense" and plain and member.weight_decay == weight_decay
