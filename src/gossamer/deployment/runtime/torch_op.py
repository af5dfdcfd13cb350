"""Native models as an operator of torch, ``torch.ops.gossamer.run``.

Compilers, exporters, fake tensors and transforms see one call with known shapes. The operator takes the name of a
model; models are found by name as long as they are alive.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

_numbers = itertools.count(1)
_models: weakref.WeakValueDictionary[str, Runnable] = weakref.WeakValueDictionary()


class Runnable(Protocol):
    """The interface of models for the operator."""

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]: ...

    def run_fake(self, inputs: Sequence[Tensor]) -> list[Tensor]: ...

    def start_anew(self) -> None: ...


def register(model: Runnable) -> str:
    """A name for a model, valid in this process while the model is alive."""
    name = f"native model {next(_numbers)}"
    _models[name] = model
    return name


def find(name: str) -> Runnable:
    model = _models.get(name)
    if model is None:
        raise RuntimeError(
            f"expected {name!r} in this process, got no such model: it was deleted, or was deployed in another "
            "process; keep the deployed model for as long as what was traced from it, and trace it again elsewhere"
        )
    return model


def _after_fork() -> None:
    for model in list(_models.values()):
        model.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@torch.library.custom_op("gossamer::run", mutates_args=())
def run(inputs: Sequence[Tensor], model: str) -> list[Tensor]:
    return find(model).run(inputs)


@run.register_fake
def _(inputs: Sequence[Tensor], model: str) -> list[Tensor]:
    return find(model).run_fake(inputs)


@run.register_vmap
def _(info: Any, in_dims: Any, inputs: Sequence[Tensor], model: str) -> tuple[list[Tensor], list[int]]:
    """One call per slice of the mapped dimension."""
    dims, _ = in_dims
    calls = []
    for index in range(info.batch_size):
        slices = [x if dim is None else x.select(dim, index) for x, dim in zip(inputs, dims, strict=True)]
        calls.append(run(slices, model))
    return [torch.stack(outputs) for outputs in zip(*calls, strict=True)], [0] * len(calls[0])


def refuse_gradients(inputs: Sequence[Tensor]) -> None:
    """Refuse gradients, as a deployed network has none: an error is better than a gradient of zero."""
    if any(map(_is_differentiated, inputs)):
        raise RuntimeError(
            "expected inputs without derivatives, got one inside torch.func.grad, jvp or the like: a deployed network "
            "is for inference; differentiate the model it was made of"
        )


def _is_differentiated(x: Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    level = forward_ad._current_level
    return level >= 0 and torch._VF._unpack_dual(x, level=level)[1] is not None
