"""The method the explicit way, for comparison: masks inside the model, differentiated by autograd.

Each selected weight becomes two leaves, w̃ and m̃; the forward computes w = w̃ ⊙ H(m̃) with the gradients that the paper
defines; the optimizer updates w̃, and m̃ follows in the open. Nothing of gossamer is used but the numbers of a plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class MaskedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask_variable: Tensor, removed: float) -> Tensor:
        ctx.save_for_backward(weight, mask_variable > 0)
        ctx.removed = removed
        return torch.where(mask_variable > 0, weight, torch.zeros(()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, mask = ctx.saved_tensors
        return torch.where(mask, gradients[0], gradients[0] * ctx.removed), gradients[0] * weight, None


class Explicit(nn.Module):
    """A model whose selected weights are masked in the forward pass."""

    def __init__(self, model: nn.Module, names: Sequence[str], removed: float = 1.0) -> None:
        """`removed` is the share of their gradient that removed weights follow."""
        super().__init__()
        self.model, self.removed = model, removed
        self.names = list(names)
        self.mask_variables: dict[str, Tensor | None] = dict.fromkeys(self.names)

    def start(self, value: Callable[[Tensor], Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        self.mask_variables = {name: value(parameters[name].detach()).requires_grad_() for name in self.names}

    def forward(self, *inputs: Tensor) -> Any:
        parameters = dict(self.model.named_parameters())
        masked = {
            name: MaskedWeight.apply(parameters[name], mask, self.removed)
            for name, mask in self.mask_variables.items()
            if mask is not None
        }
        return functional_call(self.model, masked, inputs)


@dataclass
class ExplicitMasks:
    """Updates the mask variables of an `Explicit` model from their autograd gradients."""

    model: Explicit
    scale: str = "none"
    decay: float = 0.0
    momentum: float = 0.0
    mask_decay: float = 0.0
    cap: float = 0.0
    usual: Tensor | None = None
    level: Tensor = field(default_factory=lambda: torch.zeros(()))  # what masks have been lowered by, forgotten alike
    mask_lr: float = 1.0  # the learning rate before it comes down
    velocity: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, learning_rate: float, keep: int | None) -> None:
        masks = {name: mask for name, mask in self.model.mask_variables.items() if mask is not None}
        gradients = {name: mask.grad for name, mask in masks.items() if mask.grad is not None}
        count = sum(mask.numel() for mask in masks.values())
        if self.scale == "global":
            squares = torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]).square().sum()
            gradients = {name: g / ((squares / count).sqrt() + 1e-12) for name, g in gradients.items()}
        if self.scale == "batch":
            for name, g in gradients.items():
                s = g.flatten(1).square().mean(1).sqrt().view(-1, *[1] * (g.dim() - 1))
                gradients[name] = torch.where(s > 0, g / (s + 1e-12), g)
        if self.usual is None:
            every = torch.cat([self.model.model.get_parameter(name).flatten() for name in masks])
            self.usual = (torch.linalg.vector_norm(every).square() / count).sqrt()
        share = self.mask_decay if keep is not None else self.mask_decay * learning_rate / self.mask_lr
        for name, mask in masks.items():
            direction = gradients.get(name, torch.zeros_like(mask)) + self.decay
            if self.momentum:
                self.velocity[name] = self.velocity.get(name, torch.zeros_like(mask)) * self.momentum + direction
                direction = self.velocity[name]
            mask -= direction * learning_rate
            mask.grad = None
            if self.mask_decay:
                size = self.model.model.get_parameter(name).abs()
                mask += share * ((size.minimum(self.level.maximum(self.usual) * self.cap) if self.cap else size) - mask)
        self.level = self.level * (1.0 - torch.tensor(share)) + learning_rate * self.decay
        if keep is not None:
            values = torch.cat([mask.flatten() for mask in masks.values()]).sort(descending=True).values
            for mask in masks.values():
                mask -= values[keep] if keep < count else 0.0
            self.level = self.level + (values[keep] if keep < count else 0.0)
