"""The step of all runs at once: SGD, Adam or AdamW on the dense weights, and for each method group its method.

The matrices have a row for each network, as in stack.py; the rows of a group are adjacent, and its method (see
gossamer.methods) works on those alone. Everything a step needs is read from tensors on the device, so that a captured
step can be replayed without the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.lab.batched.stack import NetworkStack
from gossamer.methods.base import MatrixStep, Method, Timeline

_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # of Adam and AdamW, torch's defaults


@dataclass(frozen=True, eq=False)
class MethodGroup:
    """Rows that are trained by one method object."""

    rows: slice
    method: Method[Any]
    timeline: Timeline


@dataclass(frozen=True, eq=False)
class Hyperparameters:
    """What differs between rows and, of the learning rate, from step to step."""

    learning_rate: Tensor  # (steps, rows)
    weight_decay: Tensor  # (rows, 1)
    momentum: Tensor  # (rows, 1)


class BatchedOptimizer:
    """Weight variables, momentum and masks of all runs."""

    def __init__(self, stack: NetworkStack, kind: str = "sgd") -> None:
        """`kind` is "sgd", "adam" or "adamw"."""
        self.stack, self._decoupled = stack, kind == "adamw"
        self.velocity = torch.zeros_like(stack.variables)
        self.squares = torch.zeros_like(stack.variables) if kind in ("adam", "adamw") else None
        self.groups: list[MethodGroup] = []
        self.step = torch.zeros(1, dtype=torch.int64, device=stack.device)

    def branch(self, rows: Sequence[int]) -> None:
        """Continue with copies: new row i is a copy of row rows[i]. Then `set_groups`."""
        self.stack.branch(rows)
        index = torch.tensor(rows, device=self.velocity.device)
        self.velocity = self.velocity[index]
        self.squares = None if self.squares is None else self.squares[index]

    def set_groups(self, groups: Sequence[MethodGroup]) -> None:
        known = [group.method for group in self.groups]
        self.groups = list(groups)
        for group in groups:
            if group.method not in known:
                group.method.project(self.weights(group))  # what is pruned from the start
        self.apply_masks()

    def weights(self, group: MethodGroup) -> Tensor:
        return self.stack.variables[group.rows, : self.stack.prunable]

    def update(self, gradient: Tensor, parameters: Hyperparameters) -> None:
        """One step of all rows, from the gradients of the masked weights."""
        count = self.stack.prunable
        rate = parameters.learning_rate.index_select(0, self.step).view(-1, 1)
        for group in self.groups:
            group.timeline.rate.copy_(rate[group.rows])
            if group.method.penalizes:
                group.method.add_penalty(gradient[group.rows, count:], self.stack.variables[group.rows, count:])
            group.method.update_masks(MatrixStep(gradient[group.rows, :count], self.weights(group), self.stack.layout))
        before = [self.weights(group).clone() if group.method.follows else None for group in self.groups]
        if self.squares is None:
            self._descend(gradient, rate, parameters)
        else:
            self._descend_with_adam(gradient, self.squares, rate, parameters)
        for group, weights in zip(self.groups, before, strict=True):
            if weights is not None:
                group.method.follow(slice(None), weights, self.weights(group))
                group.method.settle()
            group.method.project(self.weights(group))
            if group.method.penalizes:
                group.method.project_others(self.stack.variables[group.rows, count:])
            group.timeline.clock += 1
        self.apply_masks()
        self.step += 1

    def update_topology(self, steps: int) -> None:
        """Update the topology where that is due after this many steps of the run."""
        changed = False
        for group in self.groups:
            done = steps - group.timeline.plan.warmup  # of its mask phases
            if not group.method.topology_due(done):
                continue
            changed = True
            fresh = group.method.update_topology(self.weights(group), done)
            if fresh is not None:
                for moments in (self.velocity, self.squares):
                    if moments is not None:
                        moments[group.rows, : self.stack.prunable].masked_fill_(fresh, 0.0)
        if changed:
            self.apply_masks()

    def apply_masks(self) -> None:
        """Write the weights of the next forward pass."""
        for group in self.groups:
            group.method.apply_masks(self.weights(group), self.stack.masked[group.rows])
        self.stack.update_leaves()

    def tensors(self) -> dict[str, Tensor]:
        """All that changes from step to step, to be saved or copied into; then `apply_masks`."""
        found = {"variables": self.stack.variables, "velocity": self.velocity, "step": self.step}
        found |= {} if self.squares is None else {"squares": self.squares}
        found |= {f"buffer.{name}": buffer for name, buffer in self.stack.buffers.items()}
        for number, group in enumerate(self.groups):
            found[f"group{number}.clock"] = group.timeline.clock
            found |= {f"group{number}.{name}": tensor for name, tensor in group.method.state().items()}
        return found

    @property
    def mask(self) -> Tensor:
        return torch.cat([group.method.mask for group in self.groups])

    @property
    def nonzero(self) -> Tensor:
        """True where a weight is not zero. A kept weight may be zero: what RigL grows starts there."""
        return self.mask & (self.stack.variables[:, : self.stack.prunable] != 0)

    def sparsity(self) -> list[float]:
        return [1.0 - count / self.stack.prunable for count in self.nonzero.sum(1).tolist()]

    def _descend(self, gradient: Tensor, rate: Tensor, parameters: Hyperparameters) -> None:
        """SGD with momentum and L2, as in torch."""
        torch.addcmul(gradient, self.velocity, parameters.momentum, out=self.velocity)
        self.velocity.addcmul_(self.stack.variables, parameters.weight_decay)
        self.stack.variables.addcmul_(self.velocity, rate, value=-1.0)

    def _descend_with_adam(self, gradient: Tensor, squares: Tensor, rate: Tensor, parameters: Hyperparameters) -> None:
        """Adam or AdamW, as in torch."""
        first, second = _BETAS
        variables, count = self.stack.variables, (self.step + 1).to(rate.dtype)
        if self._decoupled:
            variables.mul_(1.0 - rate * parameters.weight_decay)
        else:
            gradient = torch.addcmul(gradient, variables, parameters.weight_decay)
        self.velocity.lerp_(gradient, 1.0 - first)
        squares.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        size = squares.sqrt().div_((1.0 - second**count).sqrt()).add_(_EPSILON)
        variables.addcdiv_(self.velocity * (rate / (1.0 - first**count)), size, value=-1.0)
