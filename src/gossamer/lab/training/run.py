"""A run as a frozen value: everything that decides what a training run computes, and its short identity.

A `Run` is built in Python, read from a JSON file, or made from another one by options and `--set key=value`. Its
identity is the hash of what differs from the defaults, so a field added later, whose default means "no effect", does
not change the identities of old runs. Where and how often things are written, and on which device, is not part of it.
"""

import hashlib
import json
import typing
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from gossamer.lab.training.checks import AUTO, TRUNK, problems_of
from gossamer.lab.training.parsing import Scalar, guess, parse, typed
from gossamer.lab.training.setting_names import options_if_known, setting_types, similar_key
from gossamer.methods import Options, find, load
from gossamer.methods.scl import SCL
from gossamer.settings import Phases, choose, with_current_names

FORMAT = 1  # of the dictionary and its files

# Where a run is computed and how often it is written: these do not make it another run.
_NOT_IN_IDENTITY = frozenset(
    {"device", "data_root", "workers", "checkpoint_minutes", "checkpoint_steps", "log_steps"}
    | {"channels_last", "compile", "capture"}
)


def _no_options() -> Mapping[str, Scalar]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Run:
    """One training run. Durations carry units: '150ep', '2000it', '0.3run'.

    The docstrings of the fields are the help texts of `gossamer train --help`, whose groups follow this order.
    """

    model: str = "resnet20"
    """Network, from `gossamer list`."""
    model_options: Mapping[str, Scalar] = field(default_factory=_no_options, hash=False)
    """Arguments of the network."""
    data: str = "cifar10"
    """Data set, from `gossamer list`."""
    validation: int = 0
    """Training images held out as a validation set; text sets have their own."""
    augment: bool = True
    """Random crops and flips of training images."""
    image_size: int = 224
    """Pixels per side, for an image folder; other sets have a fixed size."""

    method: str = "dense"
    """Method, from `gossamer list`; dense trains without masks."""
    sparsity: float | None = None
    """Fraction of zeros: 0.95 is 95 %."""
    flops: float | None = None
    """Fraction of the dense network's multiply-adds to keep: 0.1 is a tenth."""
    decay: float | None = None
    """The paper's fixed λ1; the sparsity follows from it."""
    leave_at: float | None = None
    """With decay: end the sparsify phase at this sparsity."""
    pattern: str | None = None
    """Pattern of the zeros: 2:4 (any N:M), block:1x4, row or filter, or several as NAME=PATTERN;NAME=PATTERN."""
    preset: str = "default"
    """Named set of settings; `settings` overrides it."""
    settings: Mapping[str, Scalar] = field(default_factory=_no_options, hash=False)
    """Settings of the phases and of the method."""
    include: tuple[str, ...] = ()
    """Name patterns of the weights to prune; none means all."""
    exclude: tuple[str, ...] = ()
    """Name patterns of weights to keep dense."""

    epochs: int = 1
    """Passes over the training set."""
    batch_size: int = 64
    """Samples per step, over all processes together."""
    bptt: int = 35
    """Time steps through which a language model's gradient flows."""
    seed: int = 0
    """Seed of the initial weights, the order of the data and its augmentation."""

    optimizer: str = "sgd"
    """The optimizer: adam has weight decay as a penalty (L2), adamw decoupled."""
    lr: float = 0.1
    """Learning rate, before its schedule."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Nesterov momentum."""
    weight_decay: float = 1e-4
    """Weight decay."""
    weight_decay_power: float = 0.0
    """While weights are pruned, weight decay is multiplied by the target density to this power."""
    clip: float | None = None
    """Largest norm of the gradient."""
    label_smoothing: float = 0.0
    """Label smoothing of the cross-entropy."""
    schedule: str = "cosine"
    """Schedule of the learning rate (docs/training.md)."""
    lr_warmup: str = "0it"
    """Duration over which the learning rate rises, such as 5ep."""
    lr_drops: tuple[str, ...] = ()
    """With schedule=steps: when the learning rate drops, such as 150ep,0.8run."""
    lr_factor: float = 0.1
    """Factor of each drop; with phases_cosine, the factor at the end of the mask phases."""
    lr_restart: float | None = None
    """With schedule=restart: the learning rate after the warm-up; none means lr again."""

    distil: float = 0.0
    """Weight of the teacher in the loss; 0 trains without a teacher."""
    temperature: float = 4.0
    """Temperature of the distillation."""
    teacher: str = TRUNK
    """trunk (a copy of the network after the warm-up), the folder of a finished run, or a file with a network."""

    precision: str = AUTO
    """Precision of the forward pass; auto, here and below, follows measurements of this GPU and network."""
    sharding: str = "ddp"
    """How several processes share the work."""
    evaluate_every: int = 1
    """Epochs between two evaluations on the validation set."""
    device: str = "auto"
    """Device, such as cpu or cuda:1; auto takes a GPU where there is one."""
    channels_last: bool | None = None
    """Store images and filters channels-last."""
    compile: bool | None = None
    """Compile the forward and backward pass."""
    capture: bool | None = None
    """Capture the whole step as one CUDA graph."""
    data_root: str | None = None
    """Folder with the data sets."""
    workers: int = 4
    """Processes that decode the images of a folder."""
    checkpoint_minutes: float = 5.0
    """Minutes between two checkpoints; 0 disables them."""
    checkpoint_steps: int = 0
    """Steps between two checkpoints; 0 disables them."""
    log_steps: int = 50
    """Steps between two lines of the log."""

    def __new__(cls, *args: Any, **values: Any) -> "Run":
        for name in values:
            try:
                _check_key(name, str(values.get("method", cls.method)), str(values.get("model", cls.model)))
            except ValueError as error:
                raise TypeError(str(error)) from None
        return super().__new__(cls)

    def __post_init__(self) -> None:
        problems = self._take_types()
        if not problems:
            object.__setattr__(self, "model_options", MappingProxyType(self.model_options))
            settings = with_current_names(self.settings)  # also of older files
            object.__setattr__(self, "settings", MappingProxyType(_as_numbers(settings, self.method)))
            problems = problems_of(self)
        if problems:
            raise ValueError("a run that cannot be trained:\n  " + "\n  ".join(problems))

    def _take_types(self) -> list[str]:
        """Convert every value to the type of its field, so that lr=1 and lr=1.0 are the same run. Returns what is wrong
        with values that cannot be converted."""
        wrong = []
        for name, kind in field_types().items():
            try:
                object.__setattr__(self, name, typed(kind, name, getattr(self, name)))
            except ValueError as error:
                wrong.append(str(error))
        return wrong

    def __reduce__(self) -> tuple[Any, ...]:
        return Run.from_dict, (self.to_dict(),)  # read-only mappings cannot be pickled

    @property
    def run_id(self) -> str:
        """Ten hexadecimal digits that identify this run."""
        chosen = {name: value for name, value in self.differences().items() if name not in _NOT_IN_IDENTITY}
        return hashlib.sha256(_as_text(chosen).encode()).hexdigest()[:10]

    @property
    def phases(self) -> Phases:
        return self._chosen[0]

    @property
    def options(self) -> Options:
        """The settings of the method."""
        return self._chosen[1]

    @property
    def _chosen(self) -> tuple[Phases, Options]:
        kind = SCL if self.method == "dense" else find(self.method)
        return choose(kind, self.preset, self.settings, adaptive=self.follows_optimizer)

    @property
    def follows_optimizer(self) -> bool:
        """Whether masks follow the steps of the optimizer by default, as in a `Sparsifier`."""
        return self.optimizer in ("adam", "adamw") and (self.flops, self.decay, self.pattern) == (None, None, None)

    def differences(self) -> dict[str, Any]:
        """The fields whose values are not the defaults, as plain values."""
        defaults = _plain(Run())
        return {name: value for name, value in _plain(self).items() if value != defaults[name]}

    def differences_from(self, other: "Run") -> list[str]:
        """Names of the fields, and of single settings, in which this run differs from `other`."""
        found: list[str] = []
        mine, theirs = _plain(self), _plain(other)
        for name in mine:
            if _as_text(mine[name]) == _as_text(theirs[name]) or name in _NOT_IN_IDENTITY:
                continue
            if _is_mapping(name):
                keys = dict.fromkeys([*mine[name], *theirs[name]])
                chosen = [
                    f"{name}.{key}" for key in keys if _as_text(mine[name].get(key)) != _as_text(theirs[name].get(key))
                ]
                found += chosen or [name]
            else:
                found.append(name)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Every field as a plain value, and the format version."""
        return {"format": FORMAT, **_plain(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Run":
        """A run from `to_dict()` or from a file; missing fields have their defaults."""
        version = values.get("format", FORMAT)
        if type(version) is not int or version < 1:
            raise ValueError(f"format: expected {FORMAT}, got {version!r}: write {FORMAT}, or omit it")
        if version > FORMAT:
            raise ValueError(
                f"expected a run in format {FORMAT} or older, got format {version!r}: it was written by a newer "
                "version of gossamer; install that version (pip install --upgrade gossamer)"
            )
        given = {name: value for name, value in values.items() if name != "format"}
        for name in given:
            try:
                _check_key(name, str(given.get("method", Run.method)), str(given.get("model", Run.model)))
            except ValueError as error:
                raise ValueError(f"{error} A newer version of gossamer may know it") from None
        return Run(**given)

    def with_settings(self, assignments: Iterable[str]) -> "Run":
        """This run with some fields changed by 'key=value', values parsed by the type of the field.

        A field of the mask settings is 'settings.mask_lr=0.1', an argument of the network 'model_options.hidden=650'.
        If `model` or `method` changes, arguments and settings that the new one does not take are dropped, with a
        warning.
        """
        if isinstance(assignments, str):
            raise TypeError(f"expected a list of key=value, got the text {assignments!r}: [{assignments!r}]")
        given = [_current(*_split(assignment)) for assignment in assignments]
        named = {"method": self.method, "model": self.model} | dict(given)
        method, model = named["method"], named["model"]
        if method != self.method:
            load(method)  # named by the user, so their code may be imported
        changes: dict[str, Any] = {}
        if model != self.model and self.model_options:
            changes["model_options"] = _still_taken("model_options", self.model_options, model, options_if_known(model))
        if method != self.method and self.settings:
            changes["settings"] = _still_taken("settings", self.settings, f"method={method}", setting_types(method))
        for key, text in given:
            name, _, option = key.partition(".")
            _check_key(name, method, model)
            if option:
                if not _is_mapping(name):
                    raise ValueError(f"expected a plain value for {name}, got the part {option!r} of it: {name}=…")
                if name == "settings" and option in field_types() and option not in setting_types(method):
                    raise ValueError(f"{option} is a key of the run, not of its settings: {option}={text}")
                before = changes.get(name, getattr(self, name))
                changes[name] = {**before, option: _option(name, option, text, method)}
            elif _is_mapping(name):
                raise ValueError(f"expected {name}.key=value, such as {_EXAMPLES[name]}, got '{key}={text}'")
            else:
                changes[name] = parse(field_types()[name], name, text)
        return replace(self, **changes)


_EXAMPLES = {"settings": "settings.mask_lr=0.1", "model_options": "model_options.hidden=650"}


# --- plain values and text ---


@cache
def field_types() -> dict[str, Any]:
    """The fields of a run with their types."""
    hints = typing.get_type_hints(Run)
    return {each.name: hints[each.name] for each in fields(Run)}


def _split(assignment: str) -> tuple[str, str]:
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"expected key=value, such as lr=0.05, got {assignment!r}")
    return key.strip(), text.strip()


def _current(key: str, text: str) -> tuple[str, str]:
    """An assignment to a renamed setting under its current name, with a warning."""
    prefix, dot, option = key.rpartition(".")
    if prefix != "settings":
        return key, text
    (name,) = with_current_names({option: text}, warn=True)
    return f"{prefix}{dot}{name}", text


def _option(name: str, option: str, text: str, method: str) -> Scalar:
    """One value of a table, parsed by the type of the setting if that is known."""
    kinds = setting_types(method) if name == "settings" else {}
    if option in kinds:
        value: Scalar = parse(kinds[option], f"settings.{option}", text)
        return value
    return guess(text)


def _still_taken(
    name: str, before: Mapping[str, Scalar], taker: str, taken: Collection[str] | None
) -> dict[str, Scalar]:
    """The values that the new network or method takes, too; all of them if it is unknown."""
    if taken is None:
        return dict(before)
    dropped = [f"{name}.{key}={value}" for key, value in before.items() if key not in taken]
    if dropped:
        warnings.warn(
            f"{taker} does not take {', '.join(dropped)}, which the run had before, and is trained without",
            stacklevel=3,
        )
    return {key: value for key, value in before.items() if key in taken}


def _as_numbers(settings: Mapping[str, Scalar], method: str) -> dict[str, Scalar]:
    """The settings with 2 as 2.0 if a setting is a float, so that both are the same run."""
    kinds = setting_types(method)
    numbers = {name for name, kind in kinds.items() if float in (kind, *typing.get_args(kind))}
    return {name: float(value) if name in numbers and type(value) is int else value for name, value in settings.items()}


def _as_text(plain: Any) -> str:
    """The text that is hashed. 4 and 4.0, equal in Python, are different arguments of a network."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def _is_mapping(name: str) -> bool:
    return typing.get_origin(field_types()[name]) is Mapping


def _plain(run: Run) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for each in fields(Run):
        value = getattr(run, each.name)
        plain[each.name] = (
            dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
        )
    return plain


def full_key(name: str) -> str | None:
    """The full key of a field or setting of this name, such as settings.mask_lr; None if there is none."""
    return name if name in field_types() else f"settings.{name}" if name in setting_types(Run.method) else None


def _check_key(name: str, method: str, model: str) -> None:
    if name not in field_types():
        hint = similar_key(name, field_types(), method=method, model=model)
        raise ValueError(f"unknown key {name!r} of a run: {hint}")
