"""The screening of all methods: what each is tried with, what is chosen, and what fits the time."""

import importlib
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from gossamer.lab.batched.compare import Comparison, parse_variant, possible_runs
from gossamer.lab.batched.sweeps import missing_in, read_record_of
from gossamer.lab.batched.tuned import tuned

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SMALL = ["--net", "digits_cnn", "--data", "digits", "--epochs", "3", "--seeds", "1", "--methods", "gradual", "lottery"]


@pytest.fixture
def all_methods(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("all_methods")


def test_every_variant_is_a_setting_of_its_method(all_methods: ModuleType) -> None:
    tried = [variant for name in all_methods.SINGLE + all_methods.WHOLE for variant in all_methods.variants(name)]
    assert len({str(parse_variant(each)) for each in tried}) == len(tried)
    assert parse_variant("l0:weight_decay_power=0.5,gate_lr=0.02") in [parse_variant(each) for each in tried]


def test_tuned_methods_have_the_settings_that_were_best_on_held_out_images(all_methods: ModuleType) -> None:
    """As far as the committed records go."""
    folder = BENCHMARKS.parent / "results" / "compare-resnet20"
    screened = 0
    for name in all_methods.SINGLE:
        found = {}
        for variant in all_methods.variants(name):
            runs = possible_runs(Comparison("resnet20", "cifar10", methods=(variant,), sparsity=(all_methods.FIRST,)))
            if not missing_in(folder, runs):
                found[variant] = sum(read_record_of(run, folder)["validation_accuracy"] for run in runs)
        if found:  # it is not newer than the records
            screened += 1
            assert len(found) > 1
            assert parse_variant(tuned(name)) == parse_variant(max(found, key=found.__getitem__))
    assert screened >= 14


def test_what_is_best_on_held_out_images_runs_at_the_other_sparsities(
    all_methods: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_methods, "OTHERS", (0.5,))
    all_methods.main([*SMALL, "--out", str(tmp_path)])
    told = capsys.readouterr().out
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(records) == 1 + 2 + 3 + 2  # dense, the decays of both, a variant of one; then one setting of each
    for name in ("gradual", "lottery"):
        tried = {
            line.split(": ")[0]: float(line.split()[-3]) for line in told.splitlines() if line.startswith(f"{name}")
        }
        (chosen,) = (each for each in records if each["method"] == name and each["config"]["sparsity"] == 0.5)
        best = [variant for variant, mean in tried.items() if mean == max(tried.values())]
        asked = [Comparison("digits_cnn", "digits", (variant,), (0.5,), seeds=1, epochs=3).runs() for variant in best]
        assert chosen["run_id"] in [run.run_id for (run,) in asked]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    all_methods.main([*SMALL, "--out", str(tmp_path), "--seconds", "0"])  # all is there: no time is needed
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")} == before
    assert "rewound (Renda)" in (tmp_path / "screening.md").read_text()


def test_whole_filters_are_chosen_at_a_sparsity_of_their_own(
    all_methods: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_methods, "OTHERS", (0.5, 0.7))
    small = [*SMALL[:-2], "gradual", "slimming", "--out", str(tmp_path)]
    all_methods.main(small)
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    tried = Counter((each["method"], each["config"]["sparsity"]) for each in records)
    assert tried["gradual", 0.95] == 2  # two weight decays
    assert tried["gradual", 0.5] == tried["gradual", 0.7] == tried["slimming", 0.5] == 1  # what suited them
    assert tried["slimming", 0.7] == 4  # and two penalties
    assert ("slimming", 0.95) not in tried  # for which whole filters are too coarse here
    page = (tmp_path / "screening.md").read_text()
    assert "Whole filters:" in page
    assert "Single weights" in page


def test_nothing_is_begun_that_does_not_fit(
    all_methods: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    all_methods.main([*SMALL, "--out", str(tmp_path), "--seconds", "0.1"])
    assert "left for another time: dense, gradual" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.json"))
