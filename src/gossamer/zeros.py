"""The zeros of a sparse model: read them as masks, impose them on another model, keep them during training."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.optimizers import uncompiled
from gossamer.prunable import Weight, select
from gossamer.selectors import Selectors, clean_name, some
from gossamer.sharding import is_sharded, local


def masks(model: nn.Module, *, include: Selectors = None, exclude: Selectors = None) -> dict[str, Tensor]:
    """The masks of a model by parameter name: boolean tensors that are True where a prunable weight is nonzero.

    Names lack the prefixes that wrappers (`torch.compile`, DistributedDataParallel) add. Frozen weights are included;
    `include` and `exclude` select tensors as in `Sparsifier`. Masks of sharded weights are sharded in the same way.
    """
    weights = select(model, include=include, exclude=exclude, for_training=False)
    return {clean_name(weight.name, model): weight.parameter.detach() != 0 for weight in weights}


def impose(model: nn.Module | Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Set the weights of a model (or of a state dict) to zero where the masks are False, in place.

    For copies of a sparse model that have lost its zeros: an average of its weights, a merged LoRA adapter, a
    checkpoint from an earlier step. Nothing is changed unless every mask has a weight of its name and shape.
    """
    if isinstance(model, nn.Module):
        named = model.named_parameters(remove_duplicate=False)
        tensors: dict[str, Tensor] = {clean_name(name, model): parameter for name, parameter in named}
    else:
        tensors = dict(model)
    missing = [name for name in masks if name not in tensors]
    if missing:
        raise KeyError(
            f"expected a model with the weights {some(missing)}, got one without them: of a wrapper such as "
            "AveragedModel give the model inside, its .module"
        )
    for name, mask in masks.items():
        if mask.dtype != torch.bool or mask.shape != tensors[name].shape:
            raise ValueError(
                f"expected a boolean mask of shape {tuple(tensors[name].shape)} for {name}, got {mask.dtype} of shape "
                f"{tuple(mask.shape)}: give masks of the same model, as gossamer.masks(model) returns them"
            )
        if is_sharded(mask) != is_sharded(tensors[name]):
            raise ValueError(
                f"expected mask and weight of {name} both sharded or both whole: gather the sharded one first, with "
                "full_tensor()"
            )
    with torch.no_grad():
        for name, mask in masks.items():
            tensor = local(tensors[name])
            tensor.masked_fill_(~local(mask).to(tensor.device), 0.0)


def share_of_zeros(weights: Sequence[Weight]) -> float:
    """The share of weights that are exactly zero, but for tensors that are zero everywhere: those were initialized so.

    Synchronizes with the device.
    """
    found = 0
    for weight in weights:
        tensor = local(weight.parameter)
        zeros = tensor.numel() - int(torch.count_nonzero(tensor))
        found += zeros if zeros < tensor.numel() else 0
    return found / max(1, sum(local(weight.parameter).numel() for weight in weights))


class ZerosKept:
    """Restores the zeros of a model after every step of an optimizer, until `remove()`."""

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
    """Keep weights that are zero now exactly zero while `optimizer` trains, whatever its momentum or weight decay.

    For fine-tuning a model that is already sparse; a `Sparsifier` does this by itself. Use the result in a `with`
    block, or call its `remove()`, to release the weights. A tensor that is zero everywhere, such as a new adapter or
    head, is trained, with a warning, unless `include` names what to keep.
    """
    weights = list(select(model, include=include, exclude=exclude))
    if include is None:
        empty = [weight for weight in weights if not bool(torch.count_nonzero(local(weight.parameter)))]
        weights = [weight for weight in weights if weight not in empty]
        if empty:
            warnings.warn(
                f"{some([weight.name for weight in empty])}: zero everywhere, which looks like a layer that was "
                "initialized at zero, so it is trained freely. If it was pruned, keep it at zero with include=",
                stacklevel=2,
            )
        if not weights:
            raise ValueError("expected a model with nonzero weights, got one that is zero everywhere: load it first")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(weight.parameter) in held for weight in weights):
        raise ValueError(
            f"expected the optimizer that trains {weights[0].name}, got one without any of the weights of the model: "
            "give the optimizer whose step() updates them, or their zeros would be lost"
        )
    return ZerosKept([(weight.parameter, local(weight.parameter) == 0) for weight in weights], optimizer)
