"""Comparisons: methods against each other on the same network, data, epochs and seeds. A preset of `sweep`.

A comparison is a list of runs, with the settings of a comparison where a run names no others. Their records have the
tier of the comparison beside what every record of a sweep has, and a table and a plot are made of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from gossamer.hints import did_you_mean
from gossamer.lab import data
from gossamer.lab.batched.supported import OWN, check_filters, check_min_density, check_observer, check_pattern
from gossamer.lab.batched.sweeps import Record, layout_of, missing_in, read_record_of, record_path, sweep
from gossamer.lab.results import comparison_page
from gossamer.lab.results.plot import accuracy_against_sparsity, can_draw, check
from gossamer.lab.training import networks
from gossamer.lab.training.run import Run
from gossamer.lab.training.setting_names import setting_types
from gossamer.methods import METHODS, find, known, load
from gossamer.settings import PRESETS, Phases, with_current_names

_VALIDATION = 5000
_OF_A_VARIANT = tuple(name for name in OWN if name not in ("settings", "lr_drops"))


@dataclass(frozen=True)
class Tier:
    """How thorough a comparison is."""

    epochs: int
    validation: int | None  # as in a Comparison


TIERS: Mapping[str, Tier] = MappingProxyType({"screening": Tier(50, None), "final": Tier(350, 0)})


@dataclass(frozen=True)
class Comparison:
    """What is compared."""

    net: str
    data: str
    methods: tuple[str, ...] = tuple(METHODS)  # or with settings: "autoprune:estimator=leaky_relu"
    sparsity: tuple[float, ...] = (0.9, 0.95, 0.98)
    seeds: int = 3
    epochs: int = 50
    validation: int | None = None  # size of the validation set; None: 5,000 images, or a tenth of a smaller set
    tier: str = "screening"
    weight_decay: float = 5e-4  # as in our recipes; of runs that do not name their own

    def __post_init__(self) -> None:
        if wrong := [share for share in self.sparsity if not 0 <= share < 1]:
            raise ValueError(f"expected shares from 0 to below 1 as sparsity, such as 0.95, got {wrong}")
        if not self.methods:
            raise ValueError("expected methods to compare, got none: name some, such as scl dpf, or all, or tuned")
        if not self.sparsity or self.seeds < 1 or (self.validation or 0) < 0:
            raise ValueError(
                f"expected a sparsity, at least 1 seed and no negative validation, got {len(self.sparsity)} values, "
                f"{self.seeds} seeds and validation={self.validation}"
            )

    def runs(self) -> list[Run]:
        """Every method at every sparsity with every seed; dense once per seed."""
        base = Run(
            model=self.net,
            data=self.data,
            validation=self._validation,
            epochs=self.epochs,
            weight_decay=self.weight_decay,
        )
        return [
            replace(base.with_settings([*changes, f"sparsity={sparsity}"]), seed=seed)
            for changes in map(self._changes, self.methods)
            for sparsity in (self.sparsity if "method=dense" not in changes else (None,))
            for seed in range(self.seeds)
        ]

    @property
    def _validation(self) -> int:
        if self.validation is not None:
            return self.validation
        images = data.training_images(self.data)
        return _VALIDATION if images is None or images > _VALIDATION else images // 10

    def _changes(self, variant: str) -> list[str]:
        """The changes to a run that make it one of a variant; its phases take whole epochs."""
        method, changes = parse_variant(variant)
        if method == "dense":
            return ["method=dense", *changes]
        preset = next((each.partition("=")[2] for each in changes if each.startswith("preset=")), "default")
        return [f"method={method}", *whole_epochs(method, preset, self.epochs), *changes]


def parse_variant(text: str) -> tuple[str, list[str]]:
    """The method and the changes to a run, as `Run.with_settings` takes them, out of METHOD or
    METHOD:NAME=VALUE,NAME=VALUE.

    METHOD may be my_module:MyMethod. NAME is a setting of the method, or a field of the run in which the runs of a
    comparison may differ, such as weight_decay.
    """
    name, _, rest = text.partition(":")
    if known(name) is None and rest.partition(":")[0].isidentifier():
        class_name, _, rest = rest.partition(":")
        name = f"{name}:{class_name}"
    method = load(name).name
    settings, fields = setting_types(method), [each for each in _OF_A_VARIANT if each != "preset" or method == "scl"]
    changes = []
    for assignment in filter(None, rest.split(",")):
        key, equals, value = assignment.partition("=")
        (key,) = with_current_names({key: value}, warn=True)
        if key == "decay":
            raise ValueError(
                f"{text}: a comparison has fixed sparsities, and with a fixed decay the sparsity is an outcome: leave "
                "it out, or train such runs with gossamer sweep (--grid sparsity=none decay=0.001,0.01)"
            )
        if not equals or key not in {*settings, *fields}:
            names = list(dict.fromkeys([*settings, *fields]))
            hint = did_you_mean(key, names, f"the settings are {', '.join(names)}")
            raise ValueError(f"expected {name}:SETTING=VALUE, got {text!r}: {hint}")
        changes.append(f"settings.{key}={value}" if key in settings else f"{key}={value}")
    return method, changes


def whole_epochs(method: str, preset: str, epochs: int) -> list[str]:
    """The phases that suit a method, or those of a preset, as changes to a run: in whole epochs, at least one each."""
    usual = {**find(method).usual_phases, **PRESETS.get(preset, {})}
    names = ("warmup", "sparsify", "stabilise")
    durations = [str(usual.get(name, getattr(Phases, name))) for name in names]
    shares = [float(each.removesuffix("run").removesuffix("it")) for each in durations]
    ends = [round(sum(shares[:count]) * epochs) for count in range(4)]
    pairs = zip(pairwise(ends), shares, strict=True)
    lengths = [max(1 if share else 0, end - begin) for (begin, end), share in pairs]
    if sum(lengths) > epochs:
        raise ValueError(f"expected at least 3 epochs, one for each phase before fine-tuning, got {epochs}")
    return [f"settings.{name}={length}ep" for name, length in zip(names, lengths, strict=True)]


def compare(
    comparison: Comparison,
    out: Path,
    *,
    device: torch.device | str,
    together: int = 32,
    save_models: bool = False,
    plot: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
    moved: Callable[[float], None] = lambda share: None,
    finished: Callable[[list[Record]], None] = lambda records: None,
) -> list[Record]:
    """Train the runs without a record in `out`, `together` at a time, and return all the records.

    Whenever records have been added, and if all were there, a table (TIER.md beside them) and the plot are made of
    those that there are, and `finished` gets them. The plot is TIER.svg unless `plot` is given; it needs matplotlib.
    All else is as in `sweep`.
    """
    if plot is not None:
        check(plot)
    runs = possible_runs(comparison, progress)
    complete = not missing_in(out, runs)
    sweep(
        runs,
        out,
        device=device,
        together=together,
        save_models=save_models,
        progress=progress,
        moved=moved,
        further=lambda run, network: {"tier": comparison.tier},
        batch_done=lambda: finished(_publish(runs, out, comparison.tier, plot)),
    )
    records = _publish(runs, out, comparison.tier, plot)
    if complete:
        finished(records)
    progress(f"the records and their table, {comparison.tier}.md, are in {out}")
    return records


def possible_runs(comparison: Comparison, progress: Callable[[str], None] = lambda line: None) -> list[Run]:
    """The runs of a comparison without those that whole filters or a pattern do not allow, or whose network lacks the
    batch norms that a method needs; `progress` names these. A budget below `min_density` is an error."""
    layout = layout_of(networks.create(Run(model=comparison.net), num_classes=10))
    found, problems = dict[str, Run](), dict[str, None]()
    for run in comparison.runs():
        check_min_density(run, layout)
        try:
            check_observer(run)
            check_filters(run, layout)
            check_pattern(run, layout)
        except ValueError as error:
            problems[f"{run.method}: {error}"] = None  # once for all seeds
        else:
            found[run.run_id] = run
    if problems and all(run.method == "dense" for run in found.values()):
        raise ValueError("nothing is left to compare: " + "; ".join(problems))
    for problem in problems:
        progress(f"left out: {problem}")
    return [*found.values()]


def _publish(runs: Sequence[Run], out: Path, tier: str, plot: Path | None) -> list[dict[str, Any]]:
    """The records that there are, after their table and plot have been written."""
    records = [read_record_of(run, out) for run in runs if record_path(out, run).exists()]
    if not records:
        return records
    try:
        (out / f"{tier}.md").write_text(comparison_page(records, tier))
        if plot is not None or can_draw():
            accuracy_against_sparsity(records, tier, plot or out / f"{tier}.svg")
    except OSError as error:
        raise OSError(
            f"the records are in {out}, but their table, {tier}.md, or the plot cannot be written ({error}): free some "
            "space on the disk, and run the same command again"
        ) from error
    return records
