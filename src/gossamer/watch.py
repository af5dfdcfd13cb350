"""Warnings about optimizers that change the zeros of a model without its Sparsifier.

Two mistakes are easy to make and hard to notice: another optimizer than that of the Sparsifier trains the weights, or
training continues after `finish()`. torch calls a hook after the steps of all optimizers. The hook checks each
optimizer for a step or two, and then not again until something changes.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from gossamer.optimizers import capturing, learning_rate, uncompiled
from gossamer.prunable import Weight
from gossamer.selectors import some
from gossamer.sharding import local


class Watched(Protocol):
    """The interface of the owner of some weights for the hook."""

    step: int  # of its plan
    in_step: bool  # one of its optimizers is taking a step


class _Entry:
    def __init__(self, name: str, owner: Watched) -> None:
        self.name, self.owner = name, ref(owner)
        self.zeros: int | None = None  # once the weights are finished


_entries: Any = WeakIdKeyDictionary()  # parameter -> _Entry
_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # optimizer -> its owner's step at its last step
_settled: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # optimizer -> the change at which it was judged
_changes = 0
_handles: list[Any] = []


def watch(owner: Watched, weights: Sequence[Weight]) -> None:
    """Warn if these weights change in a step without `owner`."""
    _change()
    for weight in weights:
        _entries[weight.parameter] = _Entry(weight.name, owner)
    if not _handles:
        _handles.append(register_optimizer_step_post_hook(uncompiled(_after_any_step)))


def watch_zeros(weights: Sequence[Weight]) -> None:
    """Warn if these weights lose zeros."""
    _change()
    for weight in weights:
        if weight.parameter in _entries:
            _entries[weight.parameter].zeros = _zeros(weight.parameter)


def _change() -> None:
    global _changes
    _changes += 1


def _after_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _entries or _settled.get(optimizer) == _changes or capturing():
        return
    if any(learning_rate(group) == 0 for group in optimizer.param_groups):
        return  # such a step changes nothing: check the next one
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = [(_entries[each], each) for each in parameters if each in _entries]
    unfinished = [(entry, entry.owner()) for entry, _ in found if entry.zeros is None]
    owner = next((owner for _, owner in unfinished if owner is not None), None)
    if owner is not None:
        if owner.in_step:
            return  # an optimizer inside another one
        before, _seen[optimizer] = _seen.get(optimizer), owner.step
        if before is None:
            return  # the next step shows whether the owner has advanced
    _settled[optimizer] = _changes
    if owner is not None and before == owner.step:
        names = [entry.name for entry, each in unfinished if each is not None]
        warnings.warn(
            f"a {type(optimizer).__name__} trains {some(names)}, but the Sparsifier of these weights belongs to "
            "another optimizer: masks do not learn, and zeros are lost. Save the Sparsifier's state_dict(), create a "
            "new one with this optimizer, and load the state there",
            stacklevel=4,
        )
    lost = [entry.name for entry, each in found if entry.zeros is not None and _zeros(each) < entry.zeros]
    if lost:
        warnings.warn(
            f"training continues after finish(), and {some(lost)} lost zeros: wrap this training in "
            "`with gossamer.keep_zeros(model, optimizer):`. To restore the zeros, use gossamer.impose(model, masks)",
            stacklevel=4,
        )


def _zeros(parameter: torch.Tensor) -> int:
    tensor = local(parameter)
    return tensor.numel() - int(torch.count_nonzero(tensor))
