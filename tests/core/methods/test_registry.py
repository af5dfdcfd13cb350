"""Every method has its name in the tables, its card and its row of settings."""

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from gossamer.lab.training.run import Run
from gossamer.methods import METHODS, find, make_options
from gossamer.methods.rigl import RigL

PAGE = (Path(__file__).parents[3] / "docs" / "methods.md").read_text()


def rows(heading: str) -> dict[str, str]:
    """The table under a heading, by the name in its first column."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", part, flags=re.MULTILINE))


def test_every_method_has_a_file_of_its_own() -> None:
    assert len({method.__module__ for method in METHODS.values()}) == len(METHODS)


def test_every_method_has_a_card_and_its_settings_in_the_docs() -> None:
    cards, settings = rows("Cards"), rows("Settings")
    assert list(cards) == list(settings) == list(METHODS)
    for name, method in METHODS.items():
        expected = {f"{field.name}={getattr(method.options(), field.name)}" for field in fields(method.options)}
        assert set(re.findall(r"`([^`]+)`", settings[name])) == expected
        published = re.match(r"(\w+)", method.reference)
        assert published is None or published[1] in cards[name]


def test_the_docs_name_the_methods_for_shards_and_other_targets() -> None:
    part = PAGE.partition("## What each method works with\n")[2].partition("\n## ")[0]
    cells = dict(re.findall(r"^\| (.*) \| (.*) \|$", part, flags=re.MULTILINE))
    named = {left: re.findall(r"`(\w+)`", right) for left, right in cells.items()}
    assert named["weights sharded by FSDP2"] == [name for name, kind in METHODS.items() if kind.shardable]
    assert named["targets other than `sparsity=` (`flops=`, `decay=`)"] == [
        name for name, kind in METHODS.items() if kind.solves_targets
    ]
    filters = [name for name, kind in METHODS.items() if kind.structured]
    assert [name for name, kind in METHODS.items() if not kind.exact] == ["dense", *filters]


def test_older_names_and_wrong_ones() -> None:
    assert find("magnitude") is METHODS["dpf"]
    with pytest.raises(ValueError, match="unknown method 'rigle': did you mean 'rigl'"):
        find("rigle")
    with pytest.raises(ValueError, match="unknown setting 'x' of dpf: it has none"):
        make_options(find("dpf"), {"x": 1})


@pytest.mark.parametrize(
    ("name", "setting", "value", "expected"),
    [
        ("gradual_per_layer", "every", 0, "at least 1 step"),
        ("narang", "every", -3, "at least 1 step"),
        ("narang", "ramp", 1.5, "a number from 0 to 1"),
        ("narang", "slope", 0.0, "a number above 0"),
        ("surgery", "lower", 0.0, "a number above 0 and up to upper"),
        ("surgery", "lower", 1.2, "a number above 0 and up to upper"),
        ("surgery", "upper", math.inf, "a number above 0"),
        ("surgery", "gamma", -1.0, "a number of at least 0"),
        ("surgery", "power", -1.0, "a number of at least 0"),
        ("snip", "batches", 0, "at least 1"),
        ("rigl", "fraction", 1.5, "a number from 0 to 1"),
        ("rigl", "fraction", math.nan, "a number from 0 to 1"),
        ("rigl", "fraction", "half", "a number"),
        ("rigl", "every", 2.5, "a whole number"),
        ("str", "start", math.nan, "a number"),
        ("str", "momentum", 1.0, "a number of at least 0 and below 1"),
        ("str", "rate", math.nan, "a number of at least 0"),
        ("l0", "open", 1.0, "a probability above 0 and below 1"),
        ("l0", "gate_lr", -0.1, "a number of at least 0"),
        ("autoprune", "mask_lr", math.nan, "a number of at least 0"),
        ("autoprune", "alpha", 0.0, "a number above 0"),
        ("autoprune", "two_pass", "no", "true or false"),
        ("autoprune", "two_pass", 1, "true or false"),
        ("hyperflux", "start", 0.0, "a number above 0"),
        ("hyperflux", "step", -1.0, "a number above 0"),
        ("hyperflux", "mask_lr", -1.0, "a number of at least 0"),
        ("slimming", "penalty", -1.0, "a number of at least 0"),
        ("scl", "mask_lr", math.nan, "a number above 0, or none"),
        ("scl", "scale", "layer", "one of none, global, batch, per_sample"),
        ("scl", "min_density", 1.0, "a number of at least 0 and below 1, or none"),
        ("scl", "start_value", 0.0, "a number above 0, or none"),
        ("scl", "mask_lr", "slow", "a number or none"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, setting: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{setting}: expected {expected}, got {value!r}$"):
        make_options(find(name), {setting: value})


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if fields(method.options)])
def test_every_number_has_a_range(method: str) -> None:
    for name, kind in get_type_hints(find(method).options).items():
        kinds = get_args(kind) or (kind,)
        wrong = [math.nan, math.inf, -math.inf] if float in kinds else [-1] if int in kinds else []
        for value in wrong:
            with pytest.raises(ValueError, match=rf"\b{name}: expected .*, got {value!r}"):
                make_options(find(method), {name: value})


def test_whole_numbers_are_numbers() -> None:
    assert make_options(find("rigl"), {"fraction": 1}) == make_options(find("rigl"), {"fraction": 1.0})
    assert make_options(find("scl"), {"mask_lr": None}) == make_options(find("scl"), {})


def test_a_run_knows_the_settings_of_its_method() -> None:
    run = Run(method="rigl", sparsity=0.9, settings={"fraction": 0.5, "warmup": "0.1run"})
    assert run.options == RigL.options(fraction=0.5)
    assert run.phases.warmup == "0.1run"
    with pytest.raises(ValueError, match="settings: unknown setting 'mask_lr' of method='rigl'"):
        Run(method="rigl", sparsity=0.9, settings={"mask_lr": 0.5})
    with pytest.raises(ValueError, match="distribution: expected one of erk, uniform, got 'even'"):
        Run(method="rigl", sparsity=0.9, settings={"distribution": "even"})
