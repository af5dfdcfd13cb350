"""What the settings of a run can be called: those of its masks depend on the method, those of its network on the model.

Whoever misspells one, or leaves out what comes before its dot, is told the name that was probably meant.
"""

import difflib
import inspect
import typing
from collections.abc import Iterable
from functools import cache
from typing import Any

from gossamer.lab import models
from gossamer.methods import ALIASES, METHODS
from gossamer.settings import Settings

SHARED_BY_ALL = ("warmup", "sparsify", "stabilise", "floor")  # settings that every method has
_WITH_ALL_SETTINGS = ("dense", "scl")


def shares_all_settings(method: str) -> bool:
    """Whether the settings of this method are the fields of `Settings`; a peer has its own beside a few of them."""
    return method in _WITH_ALL_SETTINGS


def is_known(method: str) -> bool:
    return ALIASES.get(method, method) in METHODS


@cache
def setting_types(method: str) -> dict[str, Any]:
    """The settings of a method by name, with their types; all that there are where nobody knows the method."""
    general = typing.get_type_hints(Settings)
    rule = METHODS.get(ALIASES.get(method, method))
    if rule is None or shares_all_settings(method):
        return general
    return {name: general[name] for name in SHARED_BY_ALL} | typing.get_type_hints(rule.options)


def options_of(model: str) -> tuple[str, ...]:
    """The arguments that a network takes, without the number of classes, which is that of its data."""
    return tuple(name for name in inspect.signature(models.entry(model).builder).parameters if name != "num_classes")


def options_if_known(model: str) -> tuple[str, ...] | None:
    """The same, None for a network that is not there."""
    return options_of(model) if model in models.names() else None


def did_you_mean(name: str, keys: Iterable[str], *, method: str, model: str) -> str:
    """The key of a run that somebody means who writes `name`, or all there are where nothing is near."""
    known = [*keys]
    full = {each: each for each in known}
    for prefix, parts in (("settings", setting_types(method)), ("model_options", options_if_known(model))):
        for part in parts or ():
            full.setdefault(part, f"{prefix}.{part}")
    near = difflib.get_close_matches(name, [*full], n=1)
    return f"did you mean {full[near[0]]!r}?" if near else f"the keys are {', '.join(known)}."
