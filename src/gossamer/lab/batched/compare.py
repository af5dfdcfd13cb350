"""Methods against each other: the same network, data, epochs and seeds, side by side, one record a run.

A record that is there already is not trained again, so one with more methods, sparsities or seeds adds to the records;
and a race that is cut short goes on from its last checkpoint when the same comparison is asked for again.
"""

import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

import torch
from torch import nn

from gossamer.io.sparse_file import save
from gossamer.lab import data
from gossamer.lab.batched.checkpoint import ENDING, begun, between
from gossamer.lab.batched.course import How
from gossamer.lab.batched.entrants import entrant, preset_of
from gossamer.lab.batched.entries import Member, Race, identity_of, lanes_of, run_race, teachers_of
from gossamer.lab.batched.folder import Leaving, held, portions
from gossamer.lab.batched.lanes import Outcome, settled
from gossamer.lab.batched.stackable import check_floor
from gossamer.lab.batched.teaching import check_teachers
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.results import race_page
from gossamer.lab.results.plot import accuracy_against_sparsity, can_draw, check
from gossamer.lab.results.records import BEFORE, read_run
from gossamer.lab.training import networks
from gossamer.lab.training.distributed import check_one_process, join
from gossamer.lab.training.result import write_json
from gossamer.lab.training.run import Run
from gossamer.lab.training.signals import Interrupted, StopSignal
from gossamer.methods import METHODS
from gossamer.methods.base import Layout
from gossamer.methods.filters import check_reach
from gossamer.methods.slimming import Slimming, check_gains, gains_of
from gossamer.prunable import select
from gossamer.settings import RENAMED


@dataclasses.dataclass(frozen=True)
class Tier:
    """How thoroughly is compared."""

    epochs: int
    validation: int  # training images held out; 0 trains on all of them


# Of a race, part of every name.
_NAMED = frozenset({"warmup", "sparsify", "stabilise", "finetune", "batch_size", "learning_rate", "schedule"})
_NAMED |= {"momentum", "floor", "label_smoothing"}
TIERS: Mapping[str, Tier] = MappingProxyType({"screening": Tier(50, 5000), "final": Tier(350, 0)})


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is compared."""

    net: str
    data: str
    methods: tuple[str, ...] = tuple(METHODS)  # or with settings of its own: "autoprune:estimator=leaky_relu"
    sparsity: tuple[float, ...] = (0.9, 0.95, 0.98)
    seeds: int = 3
    epochs: int = 50
    validation: int = 5000  # training images held out, a tenth where there are not so many; 0 trains on all of them
    commit: str = "unknown"
    tier: str = "screening"
    weight_decay: float = 5e-4  # as in our recipes; of runs that do not name their own

    def __post_init__(self) -> None:
        if wrong := [share for share in self.sparsity if not 0 <= share < 1]:
            raise ValueError(f"expected shares from 0 to below 1 as sparsity, such as 0.95, got {wrong}")
        if not self.methods:
            raise ValueError("expected methods to compare, got none: name some, such as scl dpf, or all, or tuned")
        if not self.sparsity or self.seeds < 1 or self.validation < 0:
            raise ValueError(
                f"expected a sparsity, at least 1 seed and no negative validation, got {len(self.sparsity)} values, "
                f"{self.seeds} seeds and validation={self.validation}"
            )

    def race(self) -> Race:
        """The phases in the shares that are the default of the Sparsifier."""
        warmup, sparsify, stabilise = (max(1, round(share * self.epochs)) for share in (0.25, 0.35, 0.15))
        finetune = self.epochs - warmup - sparsify - stabilise
        if finetune < 0:
            raise ValueError(f"expected at least 3 epochs, one for each phase before fine-tuning, got {self.epochs}")
        return Race(warmup, sparsify, stabilise, finetune)

    def members(self) -> list[Member]:
        return [
            Member.of(seed, method, sparsity, **{**self._of_all(settings), **settings})
            for method, settings in map(entrant, self.methods)
            for sparsity in (self.sparsity if method != "dense" else (0.0,))
            for seed in range(self.seeds)
        ]

    def _of_all(self, settings: Mapping[str, Any]) -> dict[str, float]:
        """The weight decay; a teacher is the dense run beside, so it has the same."""
        names = ("weight_decay", "teacher_weight_decay") if settings.get("distil") else ("weight_decay",)
        return dict.fromkeys(names, self.weight_decay)


def compare(
    comparison: Comparison,
    out: Path,
    *,
    device: torch.device | str,
    together: int = 32,
    checkpoint_minutes: float = 5.0,
    save_models: bool = False,
    plot: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
    finished: Callable[[list[dict[str, Any]]], None] = lambda records: None,
) -> list[dict[str, Any]]:
    """Train what has no record in `out` yet, `together` runs at a time, and return all the records.

    Whenever records have been added, and where there were all, a table (TIER.md beside them) and the plot are made of
    those that there are, and `finished` is given them. The plot is TIER.svg if not `plot`, where matplotlib is there.
    With `save_models` each network is left beside its record, as a file for `gossamer.load`. `device="auto"` takes a
    GPU where there is one. One process trains in a folder at a time.
    """
    check_one_process()
    if plot is not None:
        check(plot)
    if together < 1:
        raise ValueError(f"expected at least 1 run at a time, got together={together}")
    device = device if isinstance(device, torch.device) else join(device).device
    paths = paths_of(comparison, out, progress)
    with held(out):
        trained = _train_missing(
            comparison,
            out,
            paths,
            together,
            publish=lambda: finished(_publish(paths.values(), out, comparison.tier, plot)),
            save_models=save_models,
            device=device,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            progress=progress,
            checkpoint_minutes=checkpoint_minutes,
        )
        records = _publish(paths.values(), out, comparison.tier, plot)
    if not trained and records:
        finished(records)
    progress(f"the records and their table, {comparison.tier}.md, are in {out}")
    return records


def _train_missing(
    comparison: Comparison,
    out: Path,
    paths: Mapping[Member, Path],
    together: int,
    *,
    publish: Callable[[], None],
    save_models: bool,
    **how: Unpack[How],
) -> bool:
    """Train the runs without a record, and publish after each stack; whether there were any."""
    race = comparison.race()
    missing = [member for member, path in paths.items() if not path.exists()]

    def checkpoint_of(runs: Sequence[Member]) -> Path:
        return out / f"{comparison.net}-{_name(comparison, race, runs)}{ENDING}"

    there = begun(out, {identity_of(race, member): member for member in paths}, checkpoint_of)
    stacks = portions(missing, there, together)
    for runs in stacks:  # what one of them cannot do is said before the first is trained
        check_teachers(lanes_of(race, [*runs, *teachers_of(runs)], steps_per_epoch=1))
    if not missing:
        return False
    images, run = _images(comparison), Run(model=comparison.net, data=comparison.data)
    network = networks.create(run, images.num_classes)
    networks.check_shapes(run, network, torch.zeros(2, *images.input_shape), images.num_classes)
    left = len(missing)
    for runs in stacks:
        file = checkpoint_of(runs)
        stopping = _train_stack(comparison, runs, left, paths, images, file, save_models=save_models, **how)
        publish()
        left = sum(not path.exists() for path in paths.values())
        if stopping and left:
            raise Interrupted(between(left, out))
    return True


def _train_stack(
    comparison: Comparison,
    runs: Sequence[Member],
    left: int,
    paths: Mapping[Member, Path],
    images: ImageSet,
    file: Path,
    *,
    save_models: bool,
    **how: Unpack[How],
) -> bool:
    """Train these runs, with checkpoints in this file, and write their records; whether somebody has asked to stop
    after their last step."""
    race, leaving = comparison.race(), Leaving()
    run = Run(model=comparison.net, data=comparison.data)
    beside = teachers_of(runs)  # whose records are there, or in another stack: trained, and not recorded again
    how["progress"](
        f"{len(runs)} runs of {race.epochs} epochs side by side, {left} to go"
        + (f"; {len(beside)} dense beside them, as teachers" if beside else "")
    )

    def keep(number: int, network: nn.Module) -> None:
        if number < len(runs):
            path = paths[runs[number]]
            leaving.write(path, [partial(save, network, path.with_suffix(".safetensors"))])

    start = time.perf_counter()
    with StopSignal() as stop:
        how = {**how, "checkpoint": file, "stop": lambda: stop.asked}
        outcomes = run_race(
            race,
            [*runs, *beside],
            images,
            lambda: networks.create(run, images.num_classes),
            keep=keep if save_models else None,
            **how,
        )
        seconds = outcomes[0].seconds_before + time.perf_counter() - start
        for member, outcome in zip(runs, outcomes, strict=False):  # teachers come last
            content = record(member, outcome, race, seconds, len(outcomes), how["device"]) | _shared(comparison, images)
            leaving.write(paths[member], [partial(write_json, paths[member], content)])
    leaving.finish(file)
    return stop.asked


def paths_of(
    comparison: Comparison, out: Path, progress: Callable[[str], None] = lambda line: None
) -> dict[Member, Path]:
    """The runs of a comparison and where their records are, or will be."""
    race = comparison.race()
    return {member: _path(out, comparison, race, member) for member in _possible(comparison, progress)}


def _publish(paths: Iterable[Path], out: Path, tier: str, plot: Path | None) -> list[dict[str, Any]]:
    """The records that there are, after their table and plot have been written."""
    records = [read_run(path) for path in paths if path.exists()]
    if not records:
        return records
    try:
        (out / f"{tier}.md").write_text(race_page(records))
        if plot is not None or can_draw():
            accuracy_against_sparsity(records, plot or out / f"{tier}.svg")
    except OSError as error:
        raise OSError(
            f"the records are in {out}, but their table, {tier}.md, or the plot cannot be written ({error}): free some "
            "space on the disk, and run the same command again"
        ) from error
    return records


def record(
    member: Member, outcome: Outcome, race: Race, seconds: float, together: int, device: torch.device | None = None
) -> dict[str, Any]:
    """One finished run as plain values; it was trained on `device`, or on a GPU where there is one."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    dense = member.method == "dense"
    plain = {"accuracy": outcome.plain_accuracy, "validation_accuracy": outcome.plain_validation_accuracy}
    return {
        "method": member.method,
        "preset": preset_of(member),
        "sparsity": 0.0 if dense else outcome.sparsity,
        "asked_sparsity": 0.0 if dense else member.sparsity,
        "seed": member.seed,
        "epochs": race.epochs,
        "accuracy": outcome.accuracy,
        "validation_accuracy": outcome.validation_accuracy,
        **({} if outcome.plain_accuracy is None else {"of_the_last_weights": plain}),
        "train_loss": outcome.train_loss if math.isfinite(outcome.train_loss) else None,  # JSON has no NaN
        "settings": member.to_dict(),
        **_settled(member, outcome),
        "race": dataclasses.asdict(race),
        "connections_by_tensor": outcome.connections_by_tensor,
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "hardware": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "seconds_of_all_runs_together": seconds,
        "runs_together": together,
    }


def _settled(member: Member, outcome: Outcome) -> dict[str, Any]:
    left = None if member.decay is not None else 1.0 - outcome.sparsity
    found = settled(member.method_type, member.options, mask_steps=outcome.mask_steps, density=left)
    return {"settled": found} if found else {}


def _possible(comparison: Comparison, progress: Callable[[str], None]) -> list[Member]:
    """The runs that are asked for, without those that whole filters are too coarse for, or channels whose gains are
    missing; these are told.

    A budget below the floor is an error, before anything is trained.
    """
    network = networks.create(Run(model=comparison.net), num_classes=10)
    weights = select(network)
    names = tuple(weight.name for weight in weights)
    others = [(name, each.numel()) for name, each in network.named_parameters() if name not in names]
    shapes = tuple(tuple(weight.parameter.shape) for weight in weights)
    layout = Layout(names, shapes, gains_of(network, names, others))
    found, usual = [], comparison.race().floor
    told: dict[str, None] = {}
    for member in comparison.members():
        if not member.method_type.structured:
            floor = member.to_dict().get("min_density")
            check_floor(layout, member.sparsity, usual if floor is None else floor)
        try:
            if member.method_type.structured:
                check_reach(layout, member.sparsity)
            if member.method_type is Slimming:
                check_gains(layout)
            found.append(member)
        except ValueError as error:
            told[f"{member.method}: {error}"] = None  # once for all seeds
    if told and all(member.method == "dense" for member in found):
        raise ValueError("nothing is left of what was asked for: " + "; ".join(told))
    for problem in told:
        progress(f"left out: {problem}")
    return found


def _shared(comparison: Comparison, images: ImageSet) -> dict[str, Any]:
    return {
        "tier": comparison.tier,
        "net": comparison.net,
        "data": comparison.data,
        "validation_images": 0 if images.validation is None else len(images.validation),
        "commit": comparison.commit,
    }


def _path(out: Path, comparison: Comparison, race: Race, member: Member) -> Path:
    """Where the record of a run is. Where one lies there from before a default changed, this run is another one, and
    is named by all its settings."""
    usual = out / f"{comparison.net}-{member.method}-{_name(comparison, race, [member])}.json"
    if not usual.exists():
        return usual
    there, asked = read_run(usual)["settings"], json.loads(json.dumps(member.to_dict()))
    if all(there.get(name, BEFORE.get(name, value)) == value for name, value in asked.items()):
        return usual
    digest = hashlib.sha256(json.dumps([usual.name, asked], sort_keys=True).encode()).hexdigest()[:12]
    return out / f"{comparison.net}-{member.method}-{digest}.json"


def _name(comparison: Comparison, race: Race, members: Sequence[Member]) -> str:
    """A short name for all that decides the outcome of runs. What is added later, to a race or to the settings of a
    method, counts where it is not the default, so that the names of older records stay as they are."""
    former = {new: old for old, new in RENAMED.items()}  # committed records are named by the hash of these
    asked = [
        {
            former.get(name, name): value
            for name, value in member.to_dict().items()
            if value != Member(member.seed, member.method).to_dict().get(name) or name in ("seed", "method", "sparsity")
        }
        for member in members
    ]
    usual = dataclasses.asdict(Race(1, 1, 1, 1))
    shared = {name: value for name, value in dataclasses.asdict(race).items() if name in _NAMED or value != usual[name]}
    parts = (comparison.net, comparison.data, comparison.validation, shared, asked)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _images(comparison: Comparison) -> ImageSet:
    images = data.load(comparison.data)
    if not isinstance(images, ImageSet):
        raise ValueError(f"expected a set of images that fits the device, such as cifar10, got {comparison.data!r}")
    if not comparison.validation:
        return images
    if comparison.validation < len(images.train):
        return images.split(comparison.validation)
    if comparison.validation != Comparison.validation:
        raise ValueError(
            f"expected fewer than the {len(images.train)} training images of {comparison.data} as validation, got "
            f"{comparison.validation}"
        )
    return images.split(len(images.train) // 10)
