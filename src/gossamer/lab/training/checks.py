"""Validation of a run: all problems at once, before training."""

import re
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from gossamer.lab.data import kind_of
from gossamer.lab.training.durations import PHASES, phases_too_long
from gossamer.lab.training.parsing import typed
from gossamer.lab.training.setting_names import setting_types
from gossamer.methods import METHODS, find, known
from gossamer.methods.scl import SCL
from gossamer.patterns import parse_option
from gossamer.schedule import steps_of
from gossamer.settings import PRESETS, choose

if TYPE_CHECKING:  # which checks itself by what is here
    from gossamer.lab.training.run import Run

TRUNK = "trunk"  # the teacher that is a copy of the network after the warm-up
AUTO = "auto"
CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "optimizer": ("sgd", "adam", "adamw"),
        "schedule": ("constant", "cosine", "steps", "phases", "phases_cosine", "restart", "plateau"),
        "precision": (AUTO, "float32", "bf16"),
        "sharding": ("ddp", "fsdp2"),
        "preset": tuple(PRESETS),
    }
)
_LARGEST = torch.finfo(torch.float32).max  # of numbers that weights and masks are computed with
# The start of a message about one setting; a line may contain several messages.
_NAMED, _NEXT = re.compile(r"\w+: "), re.compile(r"; (?=\w+: )")


def problems_of(run: "Run") -> list[str]:
    """The reasons why a run cannot be trained; empty if there are none so far."""
    problems = [*_wrong_choices(run), *_wrong_numbers(run), *_wrong_request(run), *_wrong_durations(run)]
    problems += _wrong_pattern(run)
    return [*problems, *_wrong_data(run), *_wrong_teacher(run), *_without_warmup(run)]


def _wrong_choices(run: "Run") -> list[str]:
    wrong = [
        f"{name}: expected one of {', '.join(choices)}, got {getattr(run, name)!r}"
        for name, choices in CHOICES.items()
        if getattr(run, name) not in choices
    ]
    if run.preset in PRESETS:
        wrong += _wrong_settings(run)
    return wrong


def _wrong_settings(run: "Run") -> list[str]:
    try:
        method = find(run.method)
    except ValueError as error:
        return [f"method: {error}"]
    kinds, wrong = setting_types(run.method), []
    for name, value in run.settings.items():
        if name in kinds and name not in PHASES:  # durations have more specific messages
            try:
                typed(kinds[name], f"settings.{name}", value)
            except ValueError as error:
                wrong.append(str(error))
    if wrong:
        return wrong
    try:
        kind = SCL if run.method == "dense" else method
        phases, _ = choose(kind, run.preset, run.settings, adaptive=run.follows_optimizer)
    except (TypeError, ValueError) as error:
        head, *problems = str(error).splitlines()
        problems = problems or _NEXT.split(head)
        return [f"settings{'.' if _NAMED.match(each.strip()) else ': '}{each.strip()}" for each in problems]
    too_long = None if run.method == "dense" else phases_too_long(phases, run.preset, run.epochs)
    return [too_long] if too_long else []


def _wrong_numbers(run: "Run") -> list[str]:
    table = (
        ("epochs", "at least 1 and below 2^31", 1 <= run.epochs < 2**31),
        ("batch_size", "at least 1", run.batch_size >= 1),
        ("bptt", "at least 1", run.bptt >= 1),
        ("seed", "a whole number from 0 to below 2^63", 0 <= run.seed < 2**63),
        ("image_size", "at least 1 pixel", run.image_size >= 1),
        ("workers", "at least 0", run.workers >= 0),
        ("validation", "at least 0 images", run.validation >= 0),
        ("sparsity", "a number of at least 0 and below 1, such as 0.95", run.sparsity is None or 0 <= run.sparsity < 1),
        ("flops", "the fraction to keep, above 0 and at most 1, such as 0.1", run.flops is None or 0 < run.flops <= 1),
        ("decay", "a number of at least 0, such as 0.03", run.decay is None or run.decay >= 0),
        ("leave_at", "a sparsity between 0 and 1, such as 0.94", run.leave_at is None or 0 < run.leave_at < 1),
        ("lr", "a number above 0", run.lr > 0),
        ("momentum", "from 0 to below 1", 0 <= run.momentum < 1),
        ("nesterov", "false where momentum is 0", not run.nesterov or run.momentum > 0),
        ("weight_decay", "at least 0", run.weight_decay >= 0),
        ("weight_decay_power", "from 0 to 10", 0 <= run.weight_decay_power <= 10),
        ("clip", "a norm above 0, or none", run.clip is None or run.clip > 0),
        ("label_smoothing", "from 0 to below 1", 0 <= run.label_smoothing < 1),
        ("lr_factor", "above 0 and up to 1", 0 < run.lr_factor <= 1),
        ("lr_restart", "a number above 0, or none", run.lr_restart is None or run.lr_restart > 0),
        ("distil", "a number from 0 to 1", 0 <= run.distil <= 1),
        ("temperature", "a number above 0", run.temperature > 0),
        ("evaluate_every", "at least 1 epoch", run.evaluate_every >= 1),
        ("checkpoint_minutes", "at least 0", run.checkpoint_minutes >= 0),
        ("checkpoint_steps", "at least 0", run.checkpoint_steps >= 0),
        ("log_steps", "at least 1", run.log_steps >= 1),
    )
    wrong = [f"{name}: expected {what}, got {getattr(run, name)!r}" for name, what, good in table if not good]
    numbers = {each.name: getattr(run, each.name) for each in fields(run)}
    numbers |= {
        f"{name}.{key}": value for name in ("settings", "model_options") for key, value in getattr(run, name).items()
    }
    infinite = (name for name, value in numbers.items() if isinstance(value, float) and abs(value) > _LARGEST)
    return wrong + [f"{name}: expected a finite number (float32), got {numbers[name]!r}" for name in infinite]


def _wrong_request(run: "Run") -> list[str]:
    given = [name for name in ("sparsity", "flops", "decay") if getattr(run, name) is not None]
    if run.method == "dense":
        return [
            f"method=dense: expected no {name}, got {getattr(run, name)}; set {name}=none for a dense network, or "
            "method=scl for a sparse one"
            for name in given
        ]
    if len(given) == 1 or (not given and run.pattern is not None):  # N:M fixes the sparsity
        return []
    expected = f"method={run.method}: expected one of sparsity, flops and decay, got"
    if not given:
        return [f"{expected} none of them; set sparsity=0.95, for example, or method=dense"]
    return [f"{expected} {', '.join(given)}; set what you do not mean to none, such as {given[0]}=none"]


def _wrong_pattern(run: "Run") -> list[str]:
    if run.pattern is None:
        return []
    try:
        parse_option(run.pattern)
    except ValueError as error:
        return [f"pattern: {error}"]
    method, wrong = known(run.method), []
    if run.method == "dense":
        wrong.append("pattern: expected none with method=dense; set method=scl for a sparse network")
    elif method is not None and not method.patterned:
        able = ", ".join(name for name, each in METHODS.items() if each.patterned)
        wrong.append(f"pattern: expected none with method={run.method}; the methods with patterns are {able}")
    if run.weight_decay_power and run.sparsity is None and run.flops is None:
        wrong.append("weight_decay_power: needs sparsity= or flops=, also with a pattern; set one of them")
    return wrong


def _wrong_data(run: "Run") -> list[str]:
    """Fields that have no effect for the data of a run and would only change its run_id."""
    kind = kind_of(run.data)
    table = (
        ("validation", ("images", "folder"), "this set has its own validation set"),
        ("augment", ("images",), "text is not augmented, and the images of a folder always are"),
        ("image_size", ("folder",), "only the images of a folder are resized"),
        ("bptt", ("text",), "only text has windows of time steps"),
    )
    return [
        f"{name}: expected {getattr(type(run), name)} with data={run.data}, got {getattr(run, name)}: {why}"
        for name, meant_for, why in table
        if kind is not None and kind not in meant_for and getattr(run, name) != getattr(type(run), name)
    ]


def _wrong_durations(run: "Run") -> list[str]:
    wrong = []
    for name, durations in (("lr_warmup", (run.lr_warmup,)), ("lr_drops", run.lr_drops)):
        for duration in durations:
            try:
                steps_of(duration, total_steps=1, steps_per_epoch=1)
            except ValueError as error:
                wrong.append(f"{name}: {error}")
    if (run.schedule == "steps") != bool(run.lr_drops):
        wrong.append(f"lr_drops needs schedule=steps, got schedule={run.schedule} and lr_drops={run.lr_drops}")
    if run.lr_restart is not None and run.schedule != "restart":
        wrong.append(f"lr_restart needs schedule=restart, got schedule={run.schedule}")
    return wrong


def _wrong_teacher(run: "Run") -> list[str]:
    alone = {"temperature": run.temperature, "teacher": run.teacher} if not run.distil else {}
    return [
        f"{name} needs distil above 0, got {name}={value} and distil=0"
        for name, value in alone.items()
        if value != getattr(type(run), name)
    ]


def _without_warmup(run: "Run") -> list[str]:
    """Problems of settings that need a trained dense network at the end of the warm-up, if there is none."""
    rule = known(run.method)
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
        wrong.append(f"teacher={TRUNK} needs a warm-up before the masks, but {reason}, or set teacher= to a file")
    return wrong
