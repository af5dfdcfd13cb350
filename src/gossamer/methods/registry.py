"""Methods by name. `register` adds one; the built-in ones are registered in the same way, in `gossamer.methods`."""

import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from gossamer.hints import did_you_mean
from gossamer.methods.base import Method, Options

M = TypeVar("M", bound=type[Method[Any]])

_REGISTERED: dict[str, type[Method[Any]]] = {}
_LOADED: dict[str, str] = {}  # "my_module:MyMethod" to the name of the method
METHODS: Mapping[str, type[Method[Any]]] = MappingProxyType(_REGISTERED)
"""All registered methods."""
ALIASES: Mapping[str, str] = MappingProxyType({"magnitude": "dpf"})
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "none"}


def register(method: M) -> M:
    """Make a method available by its `name`. A decorator, or called with the class:

    @register
    class Mine(Method[Options]):
        name, title = "mine", "my method"
    """
    _check(method)
    known = _REGISTERED.get(ALIASES.get(method.name, method.name), method)
    if known is not method:
        raise ValueError(
            f"expected an unused method name, got {method.name!r}, which is {_path_of(known)}: "
            f"give {_path_of(method)} another name"
        )
    _REGISTERED[method.name] = method
    return method


def known(name: str) -> type[Method[Any]] | None:
    """The registered method for a name, an older name, or the "my_module:MyMethod" that it was loaded as."""
    return METHODS.get(ALIASES.get(name, _LOADED.get(name, name)))


def load(name: str) -> type[Method[Any]]:
    """The method for a name. For "my_module:MyMethod", imports my_module.py and registers its class MyMethod; modules
    in the current directory are found, too.

    Only for names given by a user. `find` never imports code, so it is safe for names from files.
    """
    if ":" in name and known(name) is None:
        method = register(_imported(name))
        _LOADED[name] = method.name
    return find(name)


def find(name: str) -> type[Method[Any]]:
    """The registered method for a name or an older name."""
    found = known(name)
    if found is not None:
        return found
    if ":" in name:
        raise ValueError(
            f"method={name} is not loaded, and reading a file never imports code: name it on the command line "
            f"(--method {name}), or call gossamer.methods.load({name!r}) before"
        )
    hint = did_you_mean(name, METHODS, f"the methods are {', '.join(METHODS)}")
    raise ValueError(f"unknown method {name!r}: {hint} (your own is 'my_module:MyMethod')")


def make_options(method: type[Method[Any]], values: Mapping[str, Any]) -> Options:
    """The settings of a method from names and values; missing ones have their defaults."""
    known = [field.name for field in fields(method.options)]
    for name in values:
        if name not in known:
            hint = did_you_mean(name, known, f"its settings are {', '.join(known)}" if known else "it has none")
            raise ValueError(f"unknown setting {name!r} of {method.name}: {hint}")
    for name, kind in get_type_hints(method.options).items():
        allowed = get_args(kind) or (kind,)
        if name not in values or not _KINDS.keys() >= set(allowed):
            continue  # other types are checked by the options of the method
        if type(values[name]) not in (*allowed, *([int] if float in allowed else [])):
            kinds = " or ".join(_KINDS[each] for each in allowed)
            raise ValueError(f"{name}: expected {kinds}, got {values[name]!r}")
    return method.options(**values)


def _imported(path: str) -> type[Method[Any]]:
    module_name, _, class_name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # as for `python -m`; console scripts do not look there
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import inside the module
        raise ValueError(
            f"method={path}: found no module {error.name!r}; expected {error.name}.py or a package in the current "
            f"directory ({here}) or on PYTHONPATH"
        ) from None
    found = getattr(module, class_name, None)
    if found is None:
        theirs = [
            name for name, each in vars(module).items() if _is_method(each) and each.__module__ == module.__name__
        ]
        hint = f"its methods are {', '.join(theirs)}" if theirs else "it defines no subclass of Method"
        raise ValueError(f"method={path}: found no {class_name!r} in {module.__file__}; {hint}")
    if not _is_method(found):
        raise TypeError(f"method={path}: expected a subclass of gossamer.methods.Method, got {found!r}")
    return found  # type: ignore[no-any-return]


def _is_method(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Method)


def _check(method: type[Method[Any]]) -> None:
    """Refuse an unusable class before training."""
    if not _is_method(method):
        raise TypeError(f"expected a subclass of gossamer.methods.Method to register, got {method!r}")
    if inspect.isabstract(method):
        missing = ", ".join(sorted(method.__abstractmethods__))
        raise TypeError(f"expected {_path_of(method)} to define all abstract methods, but it lacks {missing}")
    for attribute in ("name", "title"):
        if not isinstance(getattr(method, attribute, None), str):
            raise TypeError(f"expected {_path_of(method)} to have a string as its class attribute {attribute!r}")
    if not re.fullmatch(r"\w+", method.name):
        raise ValueError(
            f"expected the name of {_path_of(method)} to be letters, digits and underscores, got {method.name!r}"
        )


def _path_of(method: type[Method[Any]]) -> str:
    return f"{method.__module__}:{method.__qualname__}"
