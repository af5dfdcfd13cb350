"""A run as a frozen value: everything that decides what a training run computes, and its short identity.

A `Run` is built in Python, read from a JSON file, or made from another one by `--set key=value`. Its identity is the
hash of what differs from the defaults, so that a field added later, whose default means "no effect", leaves the
identities of old runs as they were. Where and how often things are written, and on which device, is not part of it.
"""

import difflib
import hashlib
import json
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from gossamer.methods import ALIASES, METHODS, make_options
from gossamer.schedule import steps_of
from gossamer.settings import PRESETS, Settings, choose
from gossamer.training.values import Scalar, guess, parse, typed

FORMAT = 1  # of the dictionary and of the files that hold it

OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("constant", "cosine", "steps", "phases", "phases_cosine", "restart", "plateau")
TRUNK = "trunk"  # the teacher that is the network itself, as it was after the warm-up
AUTO = "auto"
PRECISIONS = (AUTO, "float32", "bf16")
SHARDINGS = ("ddp", "fsdp2")

_SHARED_BY_ALL = ("warmup", "sparsify", "stabilise", "floor")  # settings that every method has

# Where a run is computed and how often it is written down: the same run, whatever these are.
_NOT_IN_IDENTITY = frozenset(
    {"device", "data_root", "workers", "checkpoint_minutes", "checkpoint_steps", "log_steps"}
    | {"channels_last", "compile", "capture"}
)


def _no_options() -> Mapping[str, Scalar]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Run:
    """One training run. Durations carry units: '150ep', '2000it', '0.3run'."""

    # What is trained on what.
    model: str = "resnet20"
    model_options: Mapping[str, Scalar] = field(default_factory=_no_options, hash=False)
    data: str = "cifar10"
    validation: int = 0  # training images held out to look at while training; text sets bring their own
    augment: bool = True
    image_size: int = 224  # of an image folder; other sets have their own

    # How it is made sparse: exactly one request, none for the dense network.
    method: str = "dense"
    sparsity: float | None = None
    flops: float | None = None
    decay: float | None = None
    leave_at: float | None = None
    preset: str = "default"
    settings: Mapping[str, Scalar] = field(default_factory=_no_options, hash=False)  # fields of Settings
    include: tuple[str, ...] = ()  # name patterns; nothing means all connections
    exclude: tuple[str, ...] = ()

    # How long, and in what portions.
    epochs: int = 1
    batch_size: int = 64  # over all processes together
    bptt: int = 35  # steps through which a language model's gradient goes
    seed: int = 0

    # The optimizer.
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    clip: float | None = None  # largest norm of the gradient
    label_smoothing: float = 0.0

    # Its learning rate: lr times a factor of the step (see gossamer.training.optimise).
    schedule: str = "cosine"
    lr_warmup: str = "0it"
    lr_drops: tuple[str, ...] = ()  # moments of the run, for schedule=steps
    lr_factor: float = 0.1  # of each drop; of the end of the mask phases for phases_cosine

    lr_restart: float | None = None  # of schedule=restart, where the warm-up ends; none: lr once more

    # Learning from another network as well (see gossamer.training.teacher).
    distil: float = 0.0  # its share in the loss
    temperature: float = 4.0
    teacher: str = TRUNK  # or the folder of a finished run, or a file with a network

    # The arithmetic.
    precision: str = AUTO  # by measurement, as the switches that are None: see gossamer.training.modes
    sharding: str = "ddp"  # where there are several processes
    evaluate_every: int = 1  # epochs between two looks at the validation part

    # Where, how fast, and what is written: not part of the identity.
    device: str = "auto"
    channels_last: bool | None = None
    compile: bool | None = None
    capture: bool | None = None  # the whole step as one CUDA graph
    data_root: str | None = None
    workers: int = 4  # processes that decode the images of a folder
    checkpoint_minutes: float = 5.0  # 0 switches off
    checkpoint_steps: int = 0  # 0 switches off
    log_steps: int = 50

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_options", MappingProxyType(dict(self.model_options)))
        object.__setattr__(self, "settings", MappingProxyType(_as_numbers(self.settings)))
        problems = [*_wrong_choices(self), *_wrong_numbers(self), *_wrong_request(self), *_wrong_durations(self)]
        problems += [*_wrong_teacher(self), *_without_warmup(self)]
        if problems:
            raise ValueError("a run that cannot be trained:\n  " + "\n  ".join(problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return Run.from_dict, (self.to_dict(),)  # read-only mappings cannot be pickled

    @property
    def run_id(self) -> str:
        """Ten hexadecimal digits that tell this run from every other."""
        told = {name: value for name, value in self.differences().items() if name not in _NOT_IN_IDENTITY}
        text = json.dumps(told, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def mask_settings(self) -> Settings:
        return choose(self.preset, _shared_settings(self))

    @property
    def method_settings(self) -> dict[str, Scalar]:
        """The settings that only the method of this run knows."""
        shared = _shared_settings(self)
        return {name: value for name, value in self.settings.items() if name not in shared}

    def differences(self) -> dict[str, Any]:
        """The fields whose values are not the defaults, as plain values."""
        defaults = _plain(Run())
        return {name: value for name, value in _plain(self).items() if value != defaults[name]}

    def differences_from(self, other: "Run") -> list[str]:
        """Names of the fields that make this another run than `other`."""
        mine, theirs = _plain(self), _plain(other)
        return [name for name in mine if mine[name] != theirs[name] and name not in _NOT_IN_IDENTITY]

    def to_dict(self) -> dict[str, Any]:
        """Every field as a plain value, and the number of the format."""
        return {"format": FORMAT, **_plain(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Run":
        """A run from `to_dict()` or from a file; what is left out has its default."""
        version = values.get("format", FORMAT)
        if not isinstance(version, int) or version > FORMAT:
            raise ValueError(
                f"expected a run in format {FORMAT} or older, got format {version!r}: it was written by a newer "
                "version of gossamer; install that version (pip install --upgrade gossamer)"
            )
        given = {name: value for name, value in values.items() if name != "format"}
        for name in given:
            _check_key(name)
        return Run(**{name: typed(_types()[name], name, value) for name, value in given.items()})

    def with_settings(self, assignments: Iterable[str]) -> "Run":
        """This run with some fields changed by 'key=value', values read by the type of the field.

        A field of the mask settings is 'settings.mask_lr=0.1', an argument of the network 'model_options.hidden=650'.
        """
        changes: dict[str, Any] = {}
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals:
                raise ValueError(f"expected key=value, such as lr=0.05, got {assignment!r}")
            name, dot, option = key.strip().partition(".")
            _check_key(name)
            if dot:
                if not _is_mapping(name):
                    raise ValueError(f"expected a plain value for {name}, got the part {option!r} of it: {name}=…")
                changes[name] = {**changes.get(name, getattr(self, name)), option: _option(name, option, text.strip())}
            elif _is_mapping(name):
                raise ValueError(f"expected {name}.key=value, such as {_EXAMPLES[name]}, got {assignment!r}")
            else:
                changes[name] = parse(_types()[name], name, text.strip())
        return replace(self, **changes)


_EXAMPLES = {"settings": "settings.mask_lr=0.1", "model_options": "model_options.hidden=650"}


# --- checks ---


def _wrong_choices(run: Run) -> list[str]:
    table = (
        ("optimizer", OPTIMIZERS),
        ("schedule", SCHEDULES),
        ("precision", PRECISIONS),
        ("sharding", SHARDINGS),
        ("preset", tuple(PRESETS)),
    )
    wrong = [
        f"{name}: expected one of {', '.join(choices)}, got {getattr(run, name)!r}"
        for name, choices in table
        if getattr(run, name) not in choices
    ]
    if run.preset in PRESETS:
        try:
            choose(run.preset, _shared_settings(run))
            rule = METHODS.get(ALIASES.get(run.method, run.method))
            if rule is not None:
                make_options(rule, run.method_settings)
        except (TypeError, ValueError) as error:
            wrong.append(f"settings: {error}")
    return wrong


def _wrong_numbers(run: Run) -> list[str]:
    table = (
        ("epochs", "at least 1", run.epochs >= 1),
        ("batch_size", "at least 1", run.batch_size >= 1),
        ("bptt", "at least 1", run.bptt >= 1),
        ("seed", "a whole number from 0 to below 2^63", 0 <= run.seed < 2**63),
        ("image_size", "at least 1 pixel", run.image_size >= 1),
        ("workers", "at least 0", run.workers >= 0),
        ("validation", "at least 0 images", run.validation >= 0),
        ("lr", "a number above 0", run.lr > 0),
        ("momentum", "from 0 to below 1", 0 <= run.momentum < 1),
        ("nesterov", "false where momentum is 0", not run.nesterov or run.momentum > 0),
        ("weight_decay", "at least 0", run.weight_decay >= 0),
        ("clip", "a norm above 0, or none", run.clip is None or run.clip > 0),
        ("label_smoothing", "from 0 to below 1", 0 <= run.label_smoothing < 1),
        ("lr_factor", "above 0 and up to 1", 0 < run.lr_factor <= 1),
        ("lr_restart", "a number above 0, or none", run.lr_restart is None or run.lr_restart > 0),
        ("distil", "a share from 0 to 1", 0 <= run.distil <= 1),
        ("temperature", "a number above 0", run.temperature > 0),
        ("evaluate_every", "at least 1 epoch", run.evaluate_every >= 1),
        ("checkpoint_minutes", "at least 0", run.checkpoint_minutes >= 0),
        ("checkpoint_steps", "at least 0", run.checkpoint_steps >= 0),
        ("log_steps", "at least 1", run.log_steps >= 1),
    )
    wrong = [f"{name}: expected {what}, got {getattr(run, name)!r}" for name, what, good in table if not good]
    numbers = {each.name: getattr(run, each.name) for each in fields(Run)}
    numbers |= {f"{name}.{key}": value for name in _EXAMPLES for key, value in getattr(run, name).items()}
    infinite = (name for name, value in numbers.items() if isinstance(value, float) and math.isinf(value))
    return wrong + [f"{name}: expected a finite number, got {numbers[name]!r}" for name in infinite]


def _wrong_request(run: Run) -> list[str]:
    given = [name for name in ("sparsity", "flops", "decay") if getattr(run, name) is not None]
    if run.method == "dense":
        return [f"method=dense: expected no {name}, got one; set method=scl for a sparse network" for name in given]
    if len(given) != 1:
        return [
            f"method={run.method}: expected one of sparsity, flops and decay, got {', '.join(given) or 'none of them'}"
        ]
    return []


def _wrong_durations(run: Run) -> list[str]:
    wrong = []
    for name, durations in (("lr_warmup", (run.lr_warmup,)), ("lr_drops", run.lr_drops)):
        for duration in durations:
            try:
                steps_of(duration, total_steps=1, steps_per_epoch=1)
            except ValueError as error:
                wrong.append(f"{name}: {error}")
    if (run.schedule == "steps") != bool(run.lr_drops):
        wrong.append(f"lr_drops go with schedule=steps, got schedule={run.schedule} and lr_drops={run.lr_drops}")
    if run.lr_restart is not None and run.schedule != "restart":
        wrong.append(f"lr_restart goes with schedule=restart, got schedule={run.schedule}")
    return wrong


def _wrong_teacher(run: Run) -> list[str]:
    alone = {"temperature": run.temperature, "teacher": run.teacher} if not run.distil else {}
    return [
        f"{name} goes with a share distil above 0, got {name}={value} and distil=0"
        for name, value in alone.items()
        if value != getattr(Run, name)
    ]


def _without_warmup(run: Run) -> list[str]:
    """What needs a network that has learned, dense, when masks begin, where there is no such moment."""
    rule = METHODS.get(ALIASES.get(run.method, run.method))
    if run.method == "dense":
        reason = "method=dense has no masks: set method=scl"
    elif rule is not None and rule.from_start:
        reason = f"method={run.method} is sparse from its first step on: choose another method"
    else:
        return []
    wrong = []
    if run.schedule == "restart":
        wrong.append(f"schedule=restart needs a warm-up before the masks, but {reason}, or schedule=cosine")
    if run.distil and run.teacher == TRUNK:
        wrong.append(f"teacher={TRUNK} needs a warm-up before the masks, but {reason}, or give teacher= a file")
    return wrong


def _shared_settings(run: Run) -> dict[str, Scalar]:
    """The settings that are fields of Settings: all of them, but a peer (gossamer.methods) shares only some."""
    if run.method in ("dense", "scl"):
        return dict(run.settings)
    return {name: value for name, value in run.settings.items() if name in _SHARED_BY_ALL}


# --- plain values and text ---


@cache
def _types() -> dict[str, Any]:
    hints = typing.get_type_hints(Run)
    return {each.name: hints[each.name] for each in fields(Run)}


@cache
def _setting_types() -> dict[str, Any]:
    return typing.get_type_hints(Settings)


def _option(name: str, option: str, text: str) -> Scalar:
    """One value of a mapping: by the type of the setting where that is known."""
    if name == "settings" and option in _setting_types():
        value: Scalar = parse(_setting_types()[option], f"settings.{option}", text)
        return value
    return guess(text)


def _as_numbers(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The same settings with 2 written as 2.0 where a setting is a number, so that both are the same run."""
    kinds = _setting_types()
    return {
        name: float(value) if kinds.get(name) is float and type(value) is int else value
        for name, value in settings.items()
    }


def _is_mapping(name: str) -> bool:
    return typing.get_origin(_types()[name]) is Mapping


def _plain(run: Run) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for each in fields(Run):
        value = getattr(run, each.name)
        plain[each.name] = (
            dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
        )
    return plain


def _check_key(name: str) -> None:
    if name in _types():
        return
    near = difflib.get_close_matches(name, [*_types()], n=1)
    if not near and name in _setting_types():
        near = [f"settings.{name}"]
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(_types())}"
    raise ValueError(f"unknown key {name!r} of a run: {hint}")
