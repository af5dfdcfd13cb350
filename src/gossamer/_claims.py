"""Who updates a weight and who makes it sparse: one optimizer and one sparsifier, or each undoes the other's work."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from gossamer.prunable import Weight

_CLAIMS: WeakKeyDictionary[object, frozenset[int]] = WeakKeyDictionary()  # owner -> ids of its parameters


def claim(owner: object, weights: Sequence[Weight]) -> None:
    """Note that `owner` makes the weights sparse, from now until `release` or its end."""
    taken = frozenset().union(*_CLAIMS.values())
    twice = [weight.name for weight in weights if id(weight.parameter) in taken]
    if twice:
        raise ValueError(
            f"{', '.join(twice[:3])}{' and others' if len(twice) > 3 else ''}: another Sparsifier makes these weights "
            "sparse already. Go on with that one, or call its finish(), or build model and optimizer anew"
        )
    _CLAIMS[owner] = frozenset(id(weight.parameter) for weight in weights)


def release(owner: object) -> None:
    _CLAIMS.pop(owner, None)


def owned_by(optimizers: Sequence[Optimizer], weights: Sequence[Weight]) -> list[tuple[Optimizer, list[int]]]:
    """Which weights each optimizer updates. Each weight must be updated by exactly one."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"expected a torch.optim.Optimizer or a list of them, got a {type(optimizer).__name__}: "
                "give the optimizer itself, of a wrapper the one inside"
            )
    owners: list[list[int]] = [[] for _ in weights]
    for number, optimizer in enumerate(optimizers):
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for index, weight in enumerate(weights):
            if id(weight.parameter) in held:
                owners[index].append(number)
    problems = []
    for weight, numbers in zip(weights, owners, strict=True):
        if not numbers:
            problems.append(
                f"{weight.name} is not in the optimizer: give the optimizer that updates it (a list where there are "
                "several), or exclude it. An engine that flattens parameters, such as DeepSpeed ZeRO, is not supported"
            )
        if len(numbers) > 1:
            problems.append(f"{weight.name} is in {len(numbers)} optimizers: let exactly one update it, or exclude it")
    if problems:
        raise ValueError("weights that cannot be made sparse:\n  " + "\n  ".join(problems))
    return [
        (optimizer, [index for index, numbers in enumerate(owners) if numbers == [number]])
        for number, optimizer in enumerate(optimizers)
    ]
