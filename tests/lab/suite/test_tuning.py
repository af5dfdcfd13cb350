"""Tuning: the same protocol for all methods, on held-out images, and its frozen result."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.lab.recipes import general as recipes
from gossamer.lab.recipes.general import Problem
from gossamer.lab.suite import Tuning, freeze, tune, tuning, unstructured
from gossamer.lab.training import Run

PROBLEM = Problem(
    "digits-sgd",
    "digits",
    Run(model="digits_cnn", data="digits", epochs=4, batch_size=128, device="cpu"),
    (0.9,),
    minutes=1,
    validation=200,
    development=True,
)


def test_trials_are_the_same_every_time_and_begin_with_the_defaults() -> None:
    for method in unstructured():
        assert tuning.trial_settings(method, 0) == ()
        drawn = [tuning.trial_settings(method, number) for number in range(1, 8)]
        assert drawn == [tuning.trial_settings(method, number) for number in range(1, 8)]
        assert len(set(drawn)) > 3


def test_phases_and_weight_decay_are_drawn_alike_for_all_methods() -> None:
    shared = ("weight_decay_power", "settings.warmup", "settings.sparsify", "settings.stabilise")
    for number in range(1, 16):
        drawn = {
            tuple(each for each in tuning.trial_settings(method, number) if each.startswith(shared))
            for method in ("scl", "feather", "gradual", "rigl")
        }
        assert len(drawn) == 1
    assert any("settings.warmup" in each for number in range(1, 16) for each in tuning.trial_settings("scl", number))


def test_numbers_stay_near_their_defaults_and_of_their_kind() -> None:
    for number in range(1, 16):
        found = dict(each.split("=") for each in tuning.trial_settings("acdc", number) if "cycles" in each)
        assert all(1 <= int(value) <= 16 for value in found.values())
        memories = [each for each in tuning.trial_settings("platon", number) if "memory" in each]
        assert all(0 <= float(each.split("=")[1]) < 1 for each in memories)


def test_the_problems_of_the_report_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing may be chosen on lstm-wikitext2"):
        Tuning(("scl",), problems=("lstm-wikitext2",))
    with pytest.raises(ValueError, match="expected methods that prune single weights, got slimming"):
        Tuning(("slimming",))


def test_the_best_trial_on_held_out_images_is_frozen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(recipes, "PROBLEMS", (PROBLEM,))
    asked = Tuning(("scl", "gradual"), trials=2, problems=("digits-sgd",), sparsity=0.9, share=0.5)
    found = tune(asked, tmp_path, device="cpu")
    assert {name: (each["trials"], each["run_epochs"]) for name, each in found.items()} == {
        "scl": (2, 4),
        "gradual": (2, 4),
    }
    content = json.loads((tmp_path / "tuning.json").read_text())
    assert content["methods"] == json.loads(json.dumps(found))
    assert content["protocol"]["share"] == 0.5
    records = [json.loads(path.read_text()) for path in (tmp_path / "digits-sgd").glob("*.json")]
    assert all(record["config"]["validation"] == 200 for record in records)
    for name, each in found.items():
        scores = [trial["score"] for trial in each["scores"]]
        assert each["settings"] == each["scores"][scores.index(min(scores))]["settings"], name
    lines = list[str]()
    again = tune(replace(asked, trials=1), tmp_path, device="cpu", progress=lines.append)
    assert again["scl"]["trials"] == 1
    assert lines == ["digits-sgd: 2 runs, 0 to train"]

    frozen = tmp_path / "frozen.json"
    frozen.write_text('{"dpf": {"settings": ["weight_decay_power=0.5"], "trials": 3, "run_epochs": 9}}')
    freeze({**found, "scl": {**found["scl"], "settings": ["settings.warmup=0.5run"]}}, frozen)
    monkeypatch.setattr(recipes, "_FROZEN", frozen)
    recipes.frozen_settings.cache_clear()
    try:
        assert PROBLEM.sparse_run("scl", 0.9).phases.warmup == "0.5run"
        assert PROBLEM.sparse_run("dpf", 0.9).weight_decay_power == 0.5
    finally:
        recipes.frozen_settings.cache_clear()
