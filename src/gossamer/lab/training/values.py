"""Plain values of declared types, from text (`key=value`) and from files (JSON)."""

import typing
from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeAlias

Scalar: TypeAlias = bool | int | float | str | None

_WORDS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_SAID = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "none"}


def typed(kind: Any, name: str, value: Any) -> Any:
    """A value of a file or a program as a field of type `kind` wants it, or an error that names the field."""
    if typing.get_origin(kind) is Mapping:
        if isinstance(value, Mapping) and all(type(each) in typing.get_args(Scalar) for each in value.values()):
            return {str(key): each for key, each in value.items()}
        raise ValueError(f"{name}: expected a table of plain values, got {value!r}")
    if typing.get_origin(kind) is tuple:
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise ValueError(f"{name}: expected a list of strings, got {value!r}")
    allowed = _allowed(kind)
    if type(value) in allowed:
        return value
    if float in allowed and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)  # also of NumPy's, which checkpoints would not be read with
    raise ValueError(f"{name}: expected {_said(kind)}, got {value!r}")


def parse(kind: Any, name: str, text: str) -> Any:
    """A value of type `kind` from text; a list is separated by commas."""
    if typing.get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    allowed = _allowed(kind)
    if NoneType in allowed and text.lower() in ("none", "null", ""):
        return None
    wanted = next(each for each in allowed if each is not NoneType)
    if NoneType in allowed and wanted is bool and text.lower() == "auto":
        return None  # a switch that is left open
    try:
        return _WORDS[text.lower()] if wanted is bool else wanted(text)
    except (ValueError, KeyError):
        raise ValueError(f"{name}: expected {_said(kind)}, got {text!r}") from None


def guess(text: str) -> Scalar:
    """A value whose type nobody has declared: a number, true, false or none where it reads as one, else the text."""
    lower = text.lower()
    if lower in ("true", "false"):
        return lower == "true"
    if lower in ("none", "null"):
        return None
    for number in (int, float):
        try:
            return number(lower)
        except ValueError:
            continue
    return text


def _allowed(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) or (kind,)


def _said(kind: Any) -> str:
    return " or ".join(_SAID[each] for each in _allowed(kind))
