"""Train a sparse model on without losing its zeros."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer._hooks import uncompiled
from gossamer._selectors import Selectors
from gossamer.prunable import select
from gossamer.sharding import local


class ZerosKept:
    """The zeros of a model, put back after every step of an optimizer until `remove()`."""

    def __init__(self, zeros: list[tuple[nn.Parameter, Tensor]], optimizer: Optimizer) -> None:
        self._zeros = zeros
        self._handle = optimizer.register_step_post_hook(uncompiled(self._put_back))

    def _put_back(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter, zero in self._zeros:
                local(parameter).masked_fill_(zero, 0.0)

    def remove(self) -> None:
        self._handle.remove()

    def __enter__(self) -> "ZerosKept":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def keep_zeros(
    model: nn.Module, optimizer: Optimizer, *, include: Selectors = None, exclude: Selectors = None
) -> ZerosKept:
    """Weights that are zero now stay exactly zero while `optimizer` trains, whatever its momentum or weight decay.

    For fine-tuning a model that is already sparse; a `Sparsifier` in its own run does this by itself. Use the result in
    a `with` block, or call its `remove()`, to let the weights go.
    """
    weights = select(model, include=include, exclude=exclude)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(weight.parameter) in held for weight in weights):
        raise ValueError(
            f"expected the optimizer that trains {weights[0].name}, got one without any of the weights of the model: "
            "give the optimizer whose step() updates them, or their zeros would be lost"
        )
    return ZerosKept([(weight.parameter, local(weight.parameter) == 0) for weight in weights], optimizer)
