"""The step of all runs at once: SGD on the weight variables, and for each group of runs the rule of their method.

The matrices have a row for each run, as in stack.py; the rows of one method lie side by side, and its rule (see
gossamer.methods) sees only those. Everything a step needs is read from tensors on the device, so a captured step can be
replayed without a word from the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.methods.rule import Rule, Timeline
from gossamer.side_by_side.stack import NetworkStack


@dataclass(frozen=True, eq=False)
class Team:
    """Rows that follow one rule."""

    rows: slice
    rule: Rule[Any]
    timeline: Timeline


@dataclass(frozen=True, eq=False)
class Tables:
    """What differs between runs and changes from step to step."""

    learning_rate: Tensor  # (steps, runs)
    weight_decay: Tensor  # (runs, 1)
    frozen_weight_decay: Tensor | None = None  # (runs, 1), once masks are frozen; None: as before
    removed_decay: Tensor | None = None  # (runs, 1), the factor of weight decay behind the masks; None: 1
    averaging: Tensor | None = None  # (steps, runs), see averaging.py; None: no average is kept


class StackedLearner:
    """Weight variables, momentum and masks of all runs."""

    def __init__(self, stack: NetworkStack, *, momentum: float) -> None:
        self.stack, self._momentum = stack, momentum
        self.velocity = torch.zeros_like(stack.variables)
        self.teams: list[Team] = []
        self.step = torch.zeros(1, dtype=torch.int64, device=stack.device)
        self._removed: Tensor | None = None  # in the frozen phase
        self._shown = stack.variables
        self.average: Tensor | None = None  # of the variables, as they are shown to nobody before the end

    def branch(self, rows: Sequence[int]) -> None:
        """Go on with copies: run i of the new ones from run rows[i] of those that were."""
        self.stack.branch(rows)
        self.velocity = self.velocity[torch.tensor(rows, device=self.velocity.device)]

    def seat(self, teams: Sequence[Team], *, averages: bool = False) -> None:
        """Give every row its rule; with `averages` a mean of the variables is kept as well."""
        self.teams = list(teams)
        for team in teams:
            team.rule.settle_(self.weights(team))  # what is not there from the start
        self._shown = self.stack.variables.clone()
        self.average = self.stack.variables.clone() if averages else None
        self._show()

    def weights(self, team: Team) -> Tensor:
        return self.stack.variables[team.rows, : self.stack.connections]

    def mask_step(self, gradient: Tensor, tables: Tables) -> None:
        count = self.stack.connections
        rate = self._rate(tables)
        for team in self.teams:
            team.timeline.rate.copy_(rate[team.rows])
            if team.rule.penalises:
                team.rule.penalise_(gradient[team.rows, count:], self.stack.variables[team.rows, count:])
            team.rule.learn_(gradient[team.rows, :count], self.weights(team))
        self._descend(gradient, rate, tables.weight_decay, tables)
        for team in self.teams:
            team.rule.settle_(self.weights(team))
            team.timeline.clock += 1
        self._average(tables)
        self._show()
        self.step += 1

    def refresh(self, steps: Sequence[int]) -> None:
        """What rules do now and then; `steps` are the steps of its mask phases that each team has done."""
        changed = False
        for team, step in zip(self.teams, steps, strict=True):
            if not team.rule.due(step):
                continue
            changed = True
            fresh = team.rule.refresh_(self.weights(team), step)
            if fresh is not None:
                self.velocity[team.rows, : self.stack.connections].masked_fill_(fresh, 0.0)
        if changed:
            self._show()

    def freeze(self) -> None:
        """The final masks; what they remove is zero from now on."""
        masks = [team.rule.freeze_(self.weights(team)) for team in self.teams]
        self._removed = ~torch.cat(masks)
        self._keep_zeros()
        self.stack.show_(self.stack.variables)

    def frozen_step(self, gradient: Tensor, tables: Tables) -> None:
        later = tables.frozen_weight_decay
        self._descend(gradient, self._rate(tables), tables.weight_decay if later is None else later, tables)
        self._keep_zeros()
        self._average(tables)
        self.stack.show_(self.stack.variables)
        self.step += 1

    def take_average(self) -> None:
        """Go on with the averaged variables under the final masks; runs that average nothing stay as they are."""
        assert self.average is not None
        self.stack.variables.copy_(self.average)
        self._keep_zeros()
        self.stack.show_(self.stack.variables)

    def tensors(self) -> dict[str, Tensor]:
        """All that changes from step to step, to be saved or to be copied into; then `show`."""
        found = {"variables": self.stack.variables, "velocity": self.velocity, "step": self.step}
        found |= {f"buffer.{name}": buffer for name, buffer in self.stack.buffers.items()}
        if self.average is not None:
            found["average"] = self.average
        if self._removed is not None:
            return {**found, "removed": self._removed}
        for number, team in enumerate(self.teams):
            found[f"team{number}.clock"] = team.timeline.clock
            found |= {f"team{number}.{name}": tensor for name, tensor in team.rule.state().items()}
        return found

    def show(self) -> None:
        """Let the forward pass read what the weight variables and rules say now."""
        if self._removed is None:
            self._show()
        else:
            self.stack.show_(self.stack.variables)

    @property
    def frozen(self) -> bool:
        return self._removed is not None

    @property
    def mask(self) -> Tensor:
        return torch.cat([team.rule.mask for team in self.teams]) if self._removed is None else ~self._removed

    def sparsity(self) -> list[float]:
        return [1.0 - left / self.stack.connections for left in self.mask.sum(1).tolist()]

    def _keep_zeros(self) -> None:
        assert self._removed is not None
        self.stack.variables[:, : self.stack.connections].masked_fill_(self._removed, 0.0)

    def _show(self) -> None:
        count, variables = self.stack.connections, self.stack.variables
        for team in self.teams:
            team.rule.show_(self.weights(team), self._shown[team.rows, :count])
        self._shown[:, count:].copy_(variables[:, count:])
        self.stack.show_(self._shown)

    def _rate(self, tables: Tables) -> Tensor:
        return tables.learning_rate.index_select(0, self.step).view(-1, 1)

    def _descend(self, gradient: Tensor, rate: Tensor, decay: Tensor, tables: Tables) -> None:
        """SGD with momentum and L2, as torch has it."""
        variables, count = self.stack.variables, self.stack.connections
        self.velocity.mul_(self._momentum).add_(gradient)
        if tables.removed_decay is None or self.frozen:
            self.velocity.addcmul_(variables, decay)
        else:
            kept = self.mask.to(decay.dtype)
            self.velocity[:, :count].addcmul_(
                variables[:, :count], decay * kept.lerp(torch.ones_like(kept), tables.removed_decay)
            )
            self.velocity[:, count:].addcmul_(variables[:, count:], decay)
        variables.sub_(self.velocity * rate)

    def _average(self, tables: Tables) -> None:
        if tables.averaging is not None and self.average is not None:
            self.average.lerp_(self.stack.variables, tables.averaging.index_select(0, self.step).view(-1, 1))
