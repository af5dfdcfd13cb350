"""The step of all runs at once: SGD on the dense weights, and for each group of runs their method.

The matrices have a row for each run, as in stack.py; the rows of one group are adjacent, and its method (see
gossamer.methods) sees only those. Everything a step needs is read from tensors on the device, so a captured step can be
replayed without a word from the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.lab.batched.stack import NetworkStack
from gossamer.methods.base import MatrixStep, Method, Timeline


@dataclass(frozen=True, eq=False)
class Team:
    """Rows that follow one method."""

    rows: slice
    method: Method[Any]
    timeline: Timeline


@dataclass(frozen=True, eq=False)
class Tables:
    """What differs between rows and, of the learning rate, from step to step."""

    learning_rate: Tensor  # (steps, rows)
    weight_decay: Tensor  # (rows, 1)
    momentum: Tensor  # (rows, 1)
    removed_decay: Tensor | None = None  # (rows, 1), the factor of weight decay behind the masks; None: 1
    averaging: Tensor | None = None  # (steps, rows), see averaging.py; None: no average is kept


class StackedLearner:
    """Weight variables, momentum and masks of all runs."""

    def __init__(self, stack: NetworkStack) -> None:
        self.stack = stack
        self.velocity = torch.zeros_like(stack.variables)
        self.teams: list[Team] = []
        self.step = torch.zeros(1, dtype=torch.int64, device=stack.device)
        self.average: Tensor | None = None  # of the variables, shown to nobody before the end

    def branch(self, rows: Sequence[int]) -> None:
        """Go on with copies: row i of the new ones from row rows[i] of those that were. Then `seat`."""
        self.stack.branch(rows)
        index = torch.tensor(rows, device=self.velocity.device)
        self.velocity = self.velocity[index]
        self.average = None if self.average is None else self.average[index]

    def seat(self, teams: Sequence[Team], *, averages: bool = False) -> None:
        """Give every row its method; with `averages` a mean of the variables is kept as well."""
        if averages and self.average is None:
            self.average = self.stack.variables.clone()
        known = [team.method for team in self.teams]
        self.teams = list(teams)
        for team in teams:
            if team.method not in known:
                team.method.project(self.weights(team))  # what is not there from the start
        self.show()

    def weights(self, team: Team) -> Tensor:
        return self.stack.variables[team.rows, : self.stack.connections]

    def update(self, gradient: Tensor, tables: Tables) -> None:
        """One step of all rows, from the gradients of the weights that were shown."""
        count = self.stack.connections
        rate = tables.learning_rate.index_select(0, self.step).view(-1, 1)
        for team in self.teams:
            team.timeline.rate.copy_(rate[team.rows])
            if team.method.penalizes:
                team.method.add_penalty(gradient[team.rows, count:], self.stack.variables[team.rows, count:])
            team.method.update_masks(MatrixStep(gradient[team.rows, :count], self.weights(team), self.stack.layout))
        self._descend(gradient, rate, tables)
        for team in self.teams:
            team.method.project(self.weights(team))
            team.timeline.clock += 1
        if tables.averaging is not None and self.average is not None:
            self.average.lerp_(self.stack.variables, tables.averaging.index_select(0, self.step).view(-1, 1))
        self.show()
        self.step += 1

    def refresh(self, steps: int) -> None:
        """Update the topology where that is due after this many steps of the run."""
        changed = False
        for team in self.teams:
            done = steps - team.timeline.plan.warmup  # of its mask phases
            if not team.method.topology_due(done):
                continue
            changed = True
            fresh = team.method.update_topology(self.weights(team), done)
            if fresh is not None:
                self.velocity[team.rows, : self.stack.connections].masked_fill_(fresh, 0.0)
        if changed:
            self.show()

    def show(self) -> None:
        """Write the weights of the next forward pass."""
        for team in self.teams:
            team.method.apply_masks(self.weights(team), self.stack.shown[team.rows])
        self.stack.show()

    def take_average(self) -> None:
        """Go on with the averaged variables under the final masks; runs that average nothing stay as they are."""
        assert self.average is not None
        self.stack.variables.copy_(self.average)
        for team in self.teams:
            team.method.project(self.weights(team))
        self.show()

    def tensors(self) -> dict[str, Tensor]:
        """All that changes from step to step, to be saved or to be copied into; then `show`."""
        found = {"variables": self.stack.variables, "velocity": self.velocity, "step": self.step}
        found |= {f"buffer.{name}": buffer for name, buffer in self.stack.buffers.items()}
        if self.average is not None:
            found["average"] = self.average
        for number, team in enumerate(self.teams):
            found[f"team{number}.clock"] = team.timeline.clock
            found |= {f"team{number}.{name}": tensor for name, tensor in team.method.state().items()}
        return found

    @property
    def mask(self) -> Tensor:
        return torch.cat([team.method.mask for team in self.teams])

    @property
    def left(self) -> Tensor:
        """True where a connection is not zero; under the mask it may be, as what RigL grows starts there."""
        return self.mask & (self.stack.variables[:, : self.stack.connections] != 0)

    def sparsity(self) -> list[float]:
        return [1.0 - left / self.stack.connections for left in self.left.sum(1).tolist()]

    def _descend(self, gradient: Tensor, rate: Tensor, tables: Tables) -> None:
        """SGD with momentum and L2, as torch has it, perhaps with another weight decay behind the masks."""
        variables, count, decay = self.stack.variables, self.stack.connections, tables.weight_decay
        torch.addcmul(gradient, self.velocity, tables.momentum, out=self.velocity)
        if tables.removed_decay is None:
            self.velocity.addcmul_(variables, decay)
        else:
            kept = self.mask.to(decay.dtype)
            factor = decay * kept.lerp(torch.ones_like(kept), tables.removed_decay)
            self.velocity[:, :count].addcmul_(variables[:, :count], factor)
            self.velocity[:, count:].addcmul_(variables[:, count:], decay)
        variables.addcmul_(self.velocity, rate, value=-1.0)
