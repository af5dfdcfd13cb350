"""Every method has its name in the tables, its card and its row of settings."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from gossamer.methods import METHODS, find, make_options
from gossamer.training.methods import METHODS as TRAINED
from gossamer.training.run import Run

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()


def rows(heading: str) -> dict[str, str]:
    """The table under a heading, by the name in its first column."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", part, flags=re.MULTILINE))


def test_all_methods_can_be_trained() -> None:
    assert list(TRAINED) == list(METHODS)


def test_every_method_has_a_card_and_its_settings_in_the_docs() -> None:
    cards, settings = rows("Cards"), rows("Settings")
    assert list(cards) == list(settings) == list(METHODS)
    for name, rule in METHODS.items():
        expected = {f"{field.name}={getattr(rule.options(), field.name)}" for field in fields(rule.options)}
        assert set(re.findall(r"`([^`]+)`", settings[name])) == expected
        published = re.match(r"(\w+)", rule.reference)
        assert published is None or published[1] in cards[name]


def test_older_names_and_wrong_ones() -> None:
    assert find("magnitude") is METHODS["dpf"]
    with pytest.raises(ValueError, match="unknown method 'rigle': did you mean 'rigl'"):
        find("rigle")
    with pytest.raises(ValueError, match="unknown setting 'x' of dpf: it has none"):
        make_options(find("dpf"), {"x": 1})


def test_a_run_knows_the_settings_of_its_method() -> None:
    run = Run(method="rigl", sparsity=0.9, settings={"fraction": 0.5, "warmup": "0.1run"})
    assert run.method_settings == {"fraction": 0.5}
    assert run.mask_settings.warmup == "0.1run"
    with pytest.raises(ValueError, match="settings: unknown setting 'mask_lr' of rigl"):
        Run(method="rigl", sparsity=0.9, settings={"mask_lr": 0.5})
    with pytest.raises(ValueError, match="distribution: expected one of erk, uniform, got 'even'"):
        Run(method="rigl", sparsity=0.9, settings={"distribution": "even"})
