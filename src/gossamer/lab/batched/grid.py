"""A grid of runs: every combination of some values of some settings, applied to one run."""

import warnings
from collections.abc import Collection, Sequence
from itertools import product

from gossamer.hints import did_you_mean
from gossamer.lab.training.durations import PHASES
from gossamer.lab.training.run import Run, full_key
from gossamer.lab.training.setting_names import setting_types
from gossamer.methods import find
from gossamer.methods.dense import Dense

_REQUESTS = ("sparsity", "flops", "decay")


def runs_of(base: Run, grid: Sequence[str]) -> list[Run]:
    """The runs of a grid such as ("seed=0,1,2", "method=scl,dpf", "settings.mask_lr=0.01,0.03"), each once.

    Keys are those of `Run.with_settings`. A request (sparsity, flops or decay) in the grid replaces that of `base`;
    method=dense takes none. A setting that only some of the methods have applies to those, with a warning.
    Combinations that cannot be trained are refused, all at once.
    """
    axes = [_axis(each) for each in grid]
    keys = [key for key, _ in axes]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"expected each key of the grid once, got {', '.join(twice)} more than once")
    asked = [name for name in _REQUESTS if name in keys]
    dropped = [f"{name}=none" for name in _REQUESTS if asked and name not in asked]
    methods = next((values for key, values in axes if key == "method"), [base.method])
    without = _left_out(keys, methods)
    found: dict[str, Run] = {}
    problems = []
    for values in product(*(values for _, values in axes)):
        chosen = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        method = next((each.partition("=")[2] for each in chosen if each.startswith("method=")), base.method)
        dense = method == "dense"
        dropped_keys = {*without[method], *(_REQUESTS if dense else ())}
        used = [each for each in chosen if each.partition("=")[0] not in dropped_keys]
        used += [f"{name}=none" for name in _REQUESTS] if dense else dropped
        try:
            run = base.with_settings(used)
        except ValueError as error:
            problems.append(f"{' '.join(chosen) or 'the run itself'}: {error}")
        else:
            found.setdefault(run.run_id, run)
    if problems:
        raise ValueError("a grid with combinations that cannot be trained:\n" + "\n".join(problems))
    return list(found.values())


def _left_out(keys: Sequence[str], methods: Sequence[str]) -> dict[str, list[str]]:
    """The settings of the grid that a method does not take, but another one does, for each method."""
    taken = {method: _taken(method) for method in methods}
    known = set().union(*taken.values())
    names = [key.removeprefix("settings.") for key in keys if key.startswith("settings.")]
    for name in names:
        if name not in known and full_key(name) != name:  # of a key of the run `with_settings` says where it belongs
            in_full = {each: f"settings.{each}" for each in known}
            hint = did_you_mean(name, known, "leave it out, or add a method that does", in_full=in_full)
            raise ValueError(f"no run of the grid takes settings.{name} (method={','.join(methods)}): {hint}")
    shared = [name for name in names if name in known]
    missing = {method: [f"settings.{name}" for name in shared if name not in taken[method]] for method in methods}
    problems = [f"method={method} does not take {', '.join(each)}" for method, each in missing.items() if each]
    if problems:
        warnings.warn(f"{'; '.join(problems)}: such runs go without, once for all values", stacklevel=3)
    return missing


def _taken(method: str) -> Collection[str]:
    """The settings of a method; a dense network has no masks, but its learning rate may follow their phases."""
    return PHASES if find(method) is Dense else setting_types(method)


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    split = [value.strip() for value in values.split(",")]
    if not equals or not key.strip() or not all(split):
        raise ValueError(f"expected key=value,value,… in a grid, such as seed=0,1,2, got {text!r}")
    return key.strip(), split
