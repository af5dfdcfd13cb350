"""A grid of runs: every combination of some values of some settings, applied to one run."""

from collections.abc import Sequence
from itertools import product

from gossamer.training.run import Run

_REQUESTS = ("sparsity", "flops", "decay")


def runs_of(base: Run, grid: Sequence[str]) -> list[Run]:
    """The runs of a grid such as ("seed=0,1,2", "method=scl,dpf", "settings.mask_lr=0.01,0.03"), each once.

    Keys are those of `Run.with_settings`. A request (sparsity, flops or decay) in the grid takes the place of the one
    of `base`; method=dense takes none. Combinations that cannot be trained are refused, all at once.
    """
    axes = [_axis(each) for each in grid]
    keys = [key for key, _ in axes]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"expected each key of the grid once, got {', '.join(twice)} more than once")
    asked = [name for name in _REQUESTS if name in keys]
    dropped = [f"{name}=none" for name in _REQUESTS if asked and name not in asked]
    found: dict[str, Run] = {}
    problems = []
    for values in product(*(values for _, values in axes)):
        chosen = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        method = next((each.partition("=")[2] for each in chosen if each.startswith("method=")), base.method)
        if method == "dense":
            used = [each for each in chosen if each.partition("=")[0] not in _REQUESTS]
            used += [f"{name}=none" for name in _REQUESTS]
        else:
            used = [*chosen, *dropped]
        try:
            run = base.with_settings(used)
        except ValueError as error:
            problems.append(f"{' '.join(chosen) or 'the run itself'}: {error}")
        else:
            found.setdefault(run.run_id, run)
    if problems:
        raise ValueError("a grid with combinations that cannot be trained:\n" + "\n".join(problems))
    return list(found.values())


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    split = [value.strip() for value in values.split(",")]
    if not equals or not key.strip() or not all(split):
        raise ValueError(f"expected key=value,value,… in a grid, such as seed=0,1,2, got {text!r}")
    return key.strip(), split
