"""The names of a run's settings: mask settings depend on the method, arguments of the network on the model.

A misspelt name, or one without its prefix, is an error that suggests the right one.
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
    """Whether the settings of this method are the fields of `Settings`; others have their own and a few of these."""
    return method in _WITH_ALL_SETTINGS


def is_known(method: str) -> bool:
    return ALIASES.get(method, method) in METHODS


@cache
def setting_types(method: str) -> dict[str, Any]:
    """The settings of a method by name, with their types; those of `Settings` if the method is unknown."""
    general = typing.get_type_hints(Settings)
    rule = METHODS.get(ALIASES.get(method, method))
    if rule is None or shares_all_settings(method):
        return general
    return {name: general[name] for name in SHARED_BY_ALL} | typing.get_type_hints(rule.options)


def options_of(model: str) -> tuple[str, ...]:
    """The arguments of a network, without the number of classes, which comes from the data."""
    return tuple(name for name in inspect.signature(models.entry(model).builder).parameters if name != "num_classes")


def options_if_known(model: str) -> tuple[str, ...] | None:
    """The arguments of a network, None if it is unknown."""
    return options_of(model) if model in models.names() else None


def did_you_mean(name: str, keys: Iterable[str], *, method: str, model: str) -> str:
    """A hint for an unknown key: the most similar key, or all keys if none is similar."""
    known = [*keys]
    full = {each: each for each in known}
    for prefix, parts in (("settings", setting_types(method)), ("model_options", options_if_known(model))):
        for part in parts or ():
            full.setdefault(part, f"{prefix}.{part}")
    near = difflib.get_close_matches(name, [*full], n=1)
    return f"did you mean {full[near[0]]!r}?" if near else f"the keys are {', '.join(known)}."
