"""The selectors of ``include=`` and ``exclude=``, and the parameters that they match.

A selector is a name pattern, a module class or a module. It is matched against the names of a parameter (several if it
is tied) and against the modules that contain it. Wrappers such as DistributedDataParallel or ``torch.compile`` insert
parts into names, so each name is tried with and without them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from gossamer.hints import did_you_mean

Selector: TypeAlias = str | type[nn.Module] | nn.Module
Selectors: TypeAlias = Selector | Sequence[Selector] | None

# Names that wrappers (compile, activation checkpointing) insert between a module and its parent.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True, eq=False)
class ParameterPath:
    """The names and enclosing modules of a parameter, which selectors match."""

    names: tuple[str, ...]
    scopes: tuple[tuple[str, nn.Module], ...]

    @staticmethod
    def of(names: Sequence[str], modules: Mapping[str, nn.Module], model: nn.Module) -> "ParameterPath":
        """The path of the parameter called ``names``; ``modules`` maps every module name of ``model``."""
        scopes = {scope: modules[scope] for name in names for scope in _enclosing(name)}
        return ParameterPath(
            spellings(names, model),
            tuple((each, module) for scope, module in scopes.items() for each in spellings([scope], model)),
        )

    def matches(self, selector: Selector) -> bool:
        """Whether ``selector`` matches the parameter or a module that contains it."""
        if isinstance(selector, str):
            scope_names = (name for name, _ in self.scopes if name)
            return any(fnmatchcase(name, selector) for name in (*self.names, *scope_names))
        if isinstance(selector, nn.Module):
            return any(module is selector for _, module in self.scopes)
        return any(isinstance(module, selector) for _, module in self.scopes)

    def is_spelled_by(self, selector: Selector) -> bool:
        """Whether ``selector`` is a pattern for the parameter's own name; a final ``*`` component does not count."""
        if not isinstance(selector, str) or selector.rpartition(".")[2] == "*":
            return False
        return any(fnmatchcase(name, selector) for name in self.names)


def as_tuple(selectors: Selectors, argument: str) -> tuple[Selector, ...]:
    """The validated selectors of an argument. A module is one selector even if it is iterable."""
    if selectors is None:
        return ()
    several = (selectors,) if isinstance(selectors, str | type | nn.Module) else _listed(selectors, argument)
    for selector in several:
        is_class = isinstance(selector, type) and issubclass(selector, nn.Module)
        if not (isinstance(selector, str | nn.Module) or is_class):
            raise _wrong_type(selector, argument)
    return several


def _listed(selectors: Sequence[Selector], argument: str) -> tuple[Selector, ...]:
    if not isinstance(selectors, list | tuple | set | frozenset):
        raise _wrong_type(selectors, argument)
    return tuple(selectors)


def _wrong_type(got: object, argument: str) -> TypeError:
    kind = got.__name__ if isinstance(got, type) else f"a {type(got).__name__}"
    return TypeError(
        f"{argument} takes a name pattern, a module class, a module, or a list of these, got {kind}; "
        "to match a parameter, pass its name"
    )


def spellings(names: Sequence[str], model: nn.Module) -> tuple[str, ...]:
    """``names`` as they are, and without the parts that wrappers insert."""
    return tuple(dict.fromkeys(each for name in names for each in (name, clean_name(name, model))))


def clean_name(name: str, model: nn.Module) -> str:
    """``name`` without the parts that wrappers around (parts of) ``model`` insert."""
    parts = [part for part in name.split(".") if part not in _WRAPPER_PARTS]
    outermost = model._modules.get("_orig_mod", model)  # the model inside a compiled one
    wrapped = isinstance(outermost, nn.DataParallel | nn.parallel.DistributedDataParallel)
    return ".".join(parts[1:] if wrapped and parts[:1] == ["module"] else parts)


def _enclosing(name: str) -> Iterator[str]:
    """Names of the modules that contain the parameter ``name``, outermost (the model itself, "") first."""
    parts = name.split(".")[:-1]
    for end in range(len(parts) + 1):
        yield ".".join(parts[:end])


def all_names(model: nn.Module) -> tuple[str, ...]:
    """Every name of a parameter or module of ``model``, in all spellings."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    return spellings(parameters + modules, model)


def shown(selector: Selector) -> str:
    """``selector`` as an error message shows it."""
    if isinstance(selector, str):
        return repr(selector)
    return selector.__name__ if isinstance(selector, type) else f"{type(selector).__name__}(...)"


def name_hint(pattern: str, model: nn.Module) -> str:
    """A hint with the names of ``model`` that are similar to ``pattern``."""
    names = [name for name in all_names(model) if name != pattern]
    return did_you_mean(pattern, names, f"names of the model are {some(names)}", most=5)


def some(names: Sequence[str], most: int = 6) -> str:
    """The first few of ``names``, and their number if there are more."""
    more = f", ... ({len(names)} in total)" if len(names) > most else ""
    return ", ".join(names[:most]) + more
