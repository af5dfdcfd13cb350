"""Values of declared types, parsed from text (`key=value` and options) or checked as they come from files (JSON)."""

import typing
from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeAlias

Scalar: TypeAlias = bool | int | float | str | None

SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
NOTHING = ("none", "null", "")
_SAID = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "none"}


def typed(kind: Any, name: str, value: Any) -> Any:
    """A value from a file or a program, converted to the type of its field; an error names the field."""
    if typing.get_origin(kind) is Mapping:
        if isinstance(value, Mapping) and all(type(each) in typing.get_args(Scalar) for each in value.values()):
            return {str(key): each for key, each in value.items()}
        raise ValueError(f"{name}: expected a table of plain values, got {value!r}")
    if typing.get_origin(kind) is tuple:
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise ValueError(f"{name}: expected a list of strings, got {value!r}")
    kinds = kinds_of(kind)
    if type(value) in kinds:
        return value
    if float in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)  # also NumPy numbers, which would make checkpoints unreadable
    raise ValueError(f"{name}: expected {_kind_name(kind)}, got {value!r}")


def parse(kind: Any, name: str, text: str) -> Any:
    """A value of type `kind` from text; a list is separated by commas."""
    if typing.get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    kinds, word = kinds_of(kind), text.lower()
    wanted = next(each for each in kinds if each is not NoneType)
    if NoneType in kinds and (word in NOTHING or (wanted is bool and word == "auto")):
        return None
    try:
        return SWITCH[word] if wanted is bool else wanted(text)
    except (ValueError, KeyError):
        raise ValueError(f"{name}: expected {_kind_name(kind)}, got {text!r}") from None


def guess(text: str) -> Scalar:
    """A value without a declared type: a number, true, false or none if the text reads as one, otherwise the text."""
    lower = text.lower()
    if lower in ("true", "false", "none", "null"):
        return SWITCH.get(lower)
    for number in (int, float):
        try:
            return number(lower)
        except ValueError:
            continue
    return text


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """The types in a union, or the type itself."""
    return typing.get_args(kind) or (kind,)


def _kind_name(kind: Any) -> str:
    return " or ".join(_SAID[each] for each in kinds_of(kind))
