"""What runs in a comparison, as it is named: a method, perhaps with settings, or a preset of learned masks."""

import dataclasses
from typing import Any, get_args, get_origin, get_type_hints

from gossamer.hints import did_you_mean
from gossamer.lab.batched.entries import Member
from gossamer.lab.batched.training import Training
from gossamer.lab.training.parsing import parse
from gossamer.methods import known, load
from gossamer.methods.scl import SCL, SCLOptions
from gossamer.settings import PRESETS, choose, with_current_names


def entrant(text: str) -> tuple[str, dict[str, Any]]:
    """A method and settings, its own or of its training, out of METHOD or METHOD:NAME=VALUE,NAME=VALUE, where METHOD
    may be my_module:MyMethod.

    Values of a list are separated by slashes, as a comma begins the next setting: scl:phases=0.1/0.25/0.4/0.25.
    """
    name, _, told = text.partition(":")
    if known(name) is None and told.partition(":")[0].isidentifier():
        class_name, _, told = told.partition(":")
        name = f"{name}:{class_name}"
    method = load(name)
    kinds = {"weight_decay": float, **get_type_hints(method.options), **get_type_hints(Training)}
    if method.solves_targets:
        kinds["decay"] = float | None
    if method is SCL:
        kinds["preset"] = str
    settings: dict[str, Any] = {}
    for assignment in filter(None, told.split(",")):
        key, equals, value = assignment.partition("=")
        (key,) = with_current_names({key: value}, warn=True)
        if not equals or key not in kinds:
            hint = did_you_mean(key, kinds, f"the settings are {', '.join(kinds)}")
            raise ValueError(f"expected {name}:SETTING=VALUE, got {text!r}: {hint}")
        if lists := [each for each in get_args(kinds[key]) if get_origin(each) is tuple]:
            kind = get_args(lists[0])[0]
            settings[key] = tuple(parse(kind, key, part) for part in value.split("/"))
        else:
            settings[key] = parse(kinds[key], key, value)
    if settings.get("decay") is not None:
        raise ValueError(
            f"{text}: a comparison holds every run to the sparsities asked for, and with a fixed decay that is what "
            "comes out: leave it away, or train such runs with gossamer sweep (--grid sparsity=none decay=0.001,0.01)"
        )
    return method.name, {**preset(settings.pop("preset", "default")), **settings}


def preset(name: str) -> dict[str, Any]:
    """The settings in which a preset of learned masks (gossamer.settings) differs from the default, in a race."""
    if name == "default":
        return {}
    phases, options = choose(SCL, name, {})
    assert isinstance(options, SCLOptions)
    usual = dataclasses.asdict(SCLOptions())
    changed = {key: value for key, value in dataclasses.asdict(options).items() if value != usual[key]}
    if changed.pop("start", None) is not None:  # records tell such a start by its value
        changed["start_value"] = options.constant_start
    shares = [float(duration.removesuffix("run")) for duration in (phases.warmup, phases.sparsify, phases.stabilise)]
    return {**changed, "min_density": phases.min_density, "phases": (*shares, round(1.0 - sum(shares), 9))}


def preset_of(member: Member) -> str:
    """Its name: default where only sparsity, seed and weight decay were chosen; custom where it has none."""
    asked = (member.seed, member.method, member.sparsity, member.weight_decay)
    named = PRESETS if member.method_type is SCL else ("default",)
    return next((name for name in named if Member.of(*asked, **preset(name)) == member), "custom")
