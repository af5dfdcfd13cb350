"""Which weights somebody makes sparse already: two would each undo what the other does."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from gossamer.select import Weight

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
