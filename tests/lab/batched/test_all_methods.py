"""The screening of all methods: what each is tried with, what is chosen, and what fits the time."""

import importlib
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from gossamer.lab.batched.compare import Comparison, paths_of
from gossamer.lab.batched.entrants import entrant
from gossamer.lab.batched.tuned import tuned

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SMALL = ["--net", "digits_cnn", "--data", "digits", "--epochs", "3", "--seeds", "1", "--methods", "gradual", "lottery"]


@pytest.fixture
def all_methods(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("all_methods")


def test_every_variant_is_a_setting_of_its_method(all_methods: ModuleType) -> None:
    tried = [entered for name in all_methods.SINGLE + all_methods.WHOLE for entered in all_methods.entrants(name)]
    assert len({str(entrant(each)) for each in tried}) == len(tried)
    assert entrant("l0:weight_decay_power=0.5,gate_lr=0.02") in [entrant(each) for each in tried]


def test_tuned_methods_have_the_settings_that_were_best_on_held_out_images(all_methods: ModuleType) -> None:
    """As far as the committed records go."""
    records = BENCHMARKS.parent / "results" / "race-resnet20"
    for name in all_methods.SINGLE:
        found = {}
        for entered in all_methods.entrants(name):
            asked = Comparison("resnet20", "cifar10", methods=(entered,), sparsity=(all_methods.FIRST,))
            paths = paths_of(asked, records).values()
            if all(path.exists() for path in paths):
                found[entered] = sum(json.loads(path.read_text())["validation_accuracy"] for path in paths)
        assert len(found) > 1
        assert entrant(tuned(name)) == entrant(max(found, key=found.__getitem__))


def test_what_is_best_on_held_out_images_runs_at_the_other_sparsities(
    all_methods: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_methods, "OTHERS", (0.5,))
    all_methods.main([*SMALL, "--out", str(tmp_path), "--commit", "abc"])
    told = capsys.readouterr().out
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(records) == 1 + 2 + 3 + 2  # dense, the decays of both, a variant of one; then one setting of each
    for name in ("gradual", "lottery"):
        tried = {
            line.split(": ")[0]: float(line.split()[-3]) for line in told.splitlines() if line.startswith(f"{name}")
        }
        (chosen,) = (each for each in records if each["method"] == name and each["asked_sparsity"] == 0.5)
        settings = {key: chosen["settings"].get(key, 0.0) for key in ("weight_decay_power", "rewind")}
        best = [entrant(entered)[1] for entered, mean in tried.items() if mean == max(tried.values())]
        assert settings in [{"weight_decay_power": 0.0, "rewind": settings["rewind"], **each} for each in best]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    all_methods.main([*SMALL, "--out", str(tmp_path), "--seconds", "0"])  # all is there: no time is needed
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")} == before
    assert "rewound (Renda)" in (tmp_path / "screening.md").read_text()


def test_whole_filters_are_chosen_at_a_sparsity_of_their_own(
    all_methods: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_methods, "OTHERS", (0.5, 0.7))
    small = [*SMALL[:-2], "gradual", "slimming", "--out", str(tmp_path), "--commit", "abc"]
    all_methods.main(small)
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    tried = Counter((each["method"], each["asked_sparsity"]) for each in records)
    assert tried["gradual", 0.95] == 2  # two weight decays
    assert tried["gradual", 0.5] == tried["gradual", 0.7] == tried["slimming", 0.5] == 1  # what suited them
    assert tried["slimming", 0.7] == 4  # and two penalties
    assert ("slimming", 0.95) not in tried  # for which whole filters are too coarse here
    page = (tmp_path / "screening.md").read_text()
    assert "Whole filters:" in page
    assert "Single connections" in page


def test_nothing_is_begun_that_does_not_fit(
    all_methods: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    all_methods.main([*SMALL, "--out", str(tmp_path), "--seconds", "0.1"])
    assert "left for another time: dense, gradual" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.json"))
