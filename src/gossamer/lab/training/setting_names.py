"""The names of a run's settings: mask settings depend on the method, arguments of the network on the model.

A misspelt name, or one without its prefix, is an error that suggests the right one.
"""

import inspect
import typing
from collections.abc import Iterable
from typing import Any

from gossamer.hints import did_you_mean
from gossamer.lab import models
from gossamer.methods import known
from gossamer.methods.scl import SCLOptions
from gossamer.settings import Phases


def setting_types(method: str) -> dict[str, Any]:
    """The settings of a method by name, with their types; those of SCL where the method is not known."""
    kind = known(method)
    # A dense run may have the settings of the sparse run that it is compared with.
    options = SCLOptions if kind is None or method == "dense" else kind.options
    return typing.get_type_hints(options) | typing.get_type_hints(Phases)


def options_of(model: str) -> tuple[str, ...]:
    """The arguments of a network, without the number of classes, which comes from the data."""
    return tuple(name for name in inspect.signature(models.entry(model).builder).parameters if name != "num_classes")


def options_if_known(model: str) -> tuple[str, ...] | None:
    """The arguments of a network, None if it is unknown."""
    return options_of(model) if model in models.names() else None


def similar_key(name: str, keys: Iterable[str], *, method: str, model: str) -> str:
    """A hint for an unknown key: the most similar key, or all keys if none is similar."""
    known = [*keys]
    full = {each: each for each in known}
    for prefix, parts in (("settings", setting_types(method)), ("model_options", options_if_known(model))):
        for part in parts or ():
            full.setdefault(part, f"{prefix}.{part}")
    return did_you_mean(name, full, f"the keys are {', '.join(known)}.", in_full=full)
