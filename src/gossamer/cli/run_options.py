"""The fields of a run as options: `--epochs 3`, `--batch-size=64`, `--settings.mask-lr 0.01`.

tyro shows and collects them. Their values stay text here, and `Run.with_settings` reads them as it reads `--set`.
"""

import ast
import inspect
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, TypeAlias, TypedDict

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from gossamer.lab import models
from gossamer.lab.training.checks import CHOICES
from gossamer.lab.training.parsing import NOTHING, SWITCH, kinds_of
from gossamer.lab.training.run import Run, field_types
from gossamer.lab.training.setting_names import options_of, setting_types
from gossamer.methods import METHODS
from gossamer.settings import Phases

# The groups of the help: each contains the fields from the one named here to the first one of the next group.
_GROUPS: Mapping[str, tuple[str, str]] = {
    "data": ("model", "Network and data. The defaults, here and below, are those of the recipe."),
    "sparsity": ("method", "The method and its target: one of sparsity, flops and decay."),
    "training": ("epochs", "Length of the run, and batches."),
    "optimizer": ("optimizer", "The optimizer and its learning rate."),
    "teacher": ("distil", "Distillation from a teacher (docs/training.md)."),
    "computing": ("precision", "Precision, devices, checkpoints and logs."),
}
_METAVARS: Mapping[Any, str] = {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false"}
_typed_dict: Any = TypedDict  # with keys that type checkers cannot see
_TABLES = ("settings", "model_options")  # fields of a run that are tables: --settings.mask-lr


def _make_options() -> Any:
    """The type for tyro: a dictionary of groups, each with the given options."""
    groups = {name: Annotated[_group(name), arg(help=text)] for name, (_, text) in _GROUPS.items()}
    return _typed_dict("RunOptions", {**groups, "settings": _settings(), "model_options": _model_options()})


RunOptions: TypeAlias = Annotated[Mapping[str, Mapping[str, str]], arg(name="", constructor_factory=_make_options)]


def assignments(options: Mapping[str, Mapping[str, str]], others: Iterable[str] = ()) -> list[str]:
    """The options as key=value, for `Run.with_settings`. A key that is also in `others`, from --set or --grid, is an
    error."""
    given = {
        f"{group}.{name}" if group in _TABLES else name: value
        for group, values in options.items()
        for name, value in values.items()
    }
    if empty := [key for key, value in given.items() if not value]:
        option = f"--{empty[0].replace('_', '-')}"
        raise ValueError(f"expected a value after {option}, got an empty one: add it, or omit the option")
    keys = [*given, *(other.partition("=")[0].strip() for other in others)]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(
            f"expected each key once, got {', '.join(twice)} more than once, as an option or after --set or --grid: "
            "keep one of them"
        )
    return [f"{key}={value}" for key, value in given.items()]


def with_values(given: Sequence[str]) -> list[str]:
    """The command line with --nesterov alone written as --nesterov=true."""
    switches = {f"--{name.replace('_', '-')}" for name, kind in field_types().items() if bool in kinds_of(kind)}
    values = {*SWITCH, *NOTHING, "auto"}
    return [
        f"{each}=true"
        if each.replace("_", "-") in switches and not values.issuperset(following.lower().split(","))
        else each
        for each, following in pairwise([*given, "--"])
    ]


def is_list(key: str) -> bool:
    """Whether the values of a field are lists, in which commas separate entries."""
    return typing.get_origin(field_types().get(key)) is tuple


def _group(name: str) -> Any:
    fields = [field for field in field_types() if field not in _TABLES]
    starts = [first for first, _ in _GROUPS.values()]
    begin = fields.index(_GROUPS[name][0])
    end = next((place for place in range(begin + 1, len(fields)) if fields[place] in starts), len(fields))
    texts = _documentation()
    leaves = {
        field: _leaf(field_types()[field], texts[field], CHOICES.get(field), prefix_name=False)
        for field in fields[begin:end]
    }
    return _typed_dict("Options", leaves, total=False)


def _settings() -> Any:
    """The settings of all methods, each with the methods that have it."""
    takers: dict[str, list[str]] = {}
    kinds: dict[str, Any] = {}
    for method in ("scl", *(each for each in METHODS if each not in ("dense", "scl"))):
        for name, kind in setting_types(method).items():
            takers.setdefault(name, []).append(method)
            kinds.setdefault(name, kind)
    leaves = {name: _leaf(kinds[name], f"Of {', '.join(each)}.") for name, each in takers.items()}
    for field in fields(Phases):
        leaves[field.name] = _leaf(kinds[field.name], "Of all methods.")
    text = "How masks are learned (docs/method.md), and settings of other methods (docs/methods.md)."
    return Annotated[_typed_dict("Settings", leaves, total=False), arg(help=text)]


def _model_options() -> Any:
    """The arguments of all networks, each with the networks that take it."""
    takers: dict[str, list[str]] = {}
    for model in models.names():
        for name in options_of(model):
            takers.setdefault(name, []).append(model)
    leaves = {name: _leaf(None, f"Of {', '.join(each)}.") for name, each in takers.items()}
    return Annotated[_typed_dict("ModelOptions", leaves, total=False), arg(help="Arguments of the network.")]


def _leaf(kind: Any, text: str, choices: Sequence[str] | None = None, *, prefix_name: bool = True) -> Any:
    """One option, whose value stays text."""
    spec = PrimitiveConstructorSpec[str](
        nargs=1,
        metavar=_metavar(kind, choices),
        instance_from_str=lambda given: given[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    )
    return Annotated[str, spec, arg(help=text, prefix_name=prefix_name, help_behavior_hint="")]


def _metavar(kind: Any, choices: Sequence[str] | None) -> str:
    if choices:
        return "|".join(choices)
    if typing.get_origin(kind) is tuple:
        return "TEXT,TEXT"
    kinds = kinds_of(kind)
    known = "|".join(_METAVARS.get(each, "VALUE") for each in kinds if each is not NoneType)
    return known + ("" if NoneType not in kinds else "|auto" if bool in kinds else "|none")


def _documentation() -> dict[str, str]:
    """The docstring of each field of a run."""
    (definition,) = ast.parse(inspect.getsource(Run)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
