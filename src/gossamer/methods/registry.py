"""All methods by name."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_type_hints

from gossamer.methods.autoprune import AutoPrune
from gossamer.methods.dense import Dense
from gossamer.methods.dpf import DPF
from gossamer.methods.gradual import Gradual
from gossamer.methods.gradual_per_layer import GradualPerLayer
from gossamer.methods.hyperflux import Hyperflux
from gossamer.methods.l0 import L0
from gossamer.methods.l1_filter import L1Filter
from gossamer.methods.lottery import Lottery
from gossamer.methods.narang import Narang
from gossamer.methods.one_shot import OneShot
from gossamer.methods.rigl import RigL
from gossamer.methods.rule import Options, Rule
from gossamer.methods.scl import SCL
from gossamer.methods.slimming import Slimming
from gossamer.methods.snip import SNIP
from gossamer.methods.soft_filter import SoftFilter
from gossamer.methods.soft_threshold import STR
from gossamer.methods.surgery import Surgery

_RULES: tuple[type[Rule[Any]], ...] = (
    Dense,
    SCL,
    DPF,
    Gradual,
    GradualPerLayer,
    OneShot,
    Narang,
    Surgery,
    Lottery,
    SNIP,
    RigL,
    STR,
    L0,
    AutoPrune,
    Hyperflux,
    SoftFilter,
    L1Filter,
    Slimming,
)

METHODS: Mapping[str, type[Rule[Any]]] = MappingProxyType({rule.name: rule for rule in _RULES})
_SAID = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "none"}
ALIASES: Mapping[str, str] = MappingProxyType({"magnitude": "dpf"})


def find(name: str) -> type[Rule[Any]]:
    """The rule of a name, or of an older name for it."""
    name = ALIASES.get(name, name)
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, [*METHODS], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the methods are {', '.join(METHODS)}"
    raise ValueError(f"unknown method {name!r}: {hint}")


def make_options(rule: type[Rule[Any]], values: Mapping[str, Any]) -> Options:
    """The settings of a method from names and values; what is not given has its default."""
    known = [field.name for field in fields(rule.options)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            there = f"its settings are {', '.join(known)}" if known else "it has none"
            hint = f"did you mean {near[0]!r}?" if near else there
            raise ValueError(f"unknown setting {name!r} of {rule.name}: {hint}")
    for name, kind in get_type_hints(rule.options).items():
        allowed = get_args(kind) or (kind,)
        if name in values and type(values[name]) not in (*allowed, *([int] if float in allowed else [])):
            said = " or ".join(_SAID[each] for each in allowed)
            raise ValueError(f"{name}: expected {said}, got {values[name]!r}")
    return rule.options(**values)
