"""The screening of hypotheses: what is trained together, what fits the time, what is chosen."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gossamer.lab.batched import Member, Race

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RACE = Race(1, 1, 1, 1)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("screen")


def test_every_hypothesis_is_another_run_with_a_prediction(screen: ModuleType, tmp_path: Path) -> None:
    runs = screen.plan_screening(screen.HYPOTHESES, Race(12, 18, 8, 12), tmp_path, 0.95)
    assert len({run.path for run in runs}) == len({(run.race, run.member) for run in runs}) == len(runs)
    assert all(run.race.epochs == 50 for run in runs)
    book = (BENCHMARKS.parent / "docs" / "lab-book.md").read_text()
    assert all(each.name.split()[0] in book for each in screen.HYPOTHESES)


def test_runs_of_one_race_go_together_and_bring_their_teachers(screen: ModuleType, tmp_path: Path) -> None:
    names = ("default", "distil half", "label smoothing .1", "curvature 1", "distil half, better teacher")
    tried = [each for each in screen.HYPOTHESES if each.name in names]
    chunks = screen.chunks(screen.plan_screening(tried, RACE, tmp_path, 0.95), 5)
    assert [list(dict.fromkeys(run.name for run in chunk)) for chunk in chunks] == [
        ["default", "distil half"],
        ["curvature 1", "distil half, better teacher"],
        ["label smoothing .1"],
    ]
    assert [screen.teachers(chunk) for chunk in chunks] == [
        [Member(seed, "dense", 0.0) for seed in range(3)],
        [Member(seed, "dense", 0.0, 5e-4) for seed in range(3)],
        [],
    ]


def test_first_things_first_when_time_is_short(screen: ModuleType, tmp_path: Path) -> None:
    runs = screen.plan_screening(screen.HYPOTHESES[:3], RACE, tmp_path, 0.95)
    budget = screen.Budget(screen.SECONDS * RACE.epochs * 7)
    assert {run.name for run in budget.fitting(runs)} == {"default", "dense"}  # six runs, the third would make nine
    budget.spend(1e9, runs)
    assert budget.fitting(runs) == []


def write(runs: list[Any], **accuracies: tuple[float, ...]) -> None:
    for run in runs:
        values = {"validation_accuracy": accuracies[run.name.split()[0]][run.member.seed], "train_loss": 0.3}
        run.path.write_text(json.dumps({**values, "asked_sparsity": run.member.sparsity}))


def test_the_best_on_held_out_images_is_chosen_and_differences_are_paired(screen: ModuleType, tmp_path: Path) -> None:
    tried = [
        each for each in screen.HYPOTHESES if each.name in ("default", "magnitude", "curvature 1", "label smoothing .1")
    ]
    runs = screen.plan_screening(tried, RACE, tmp_path, 0.95)
    write(runs, default=(87.0, 88.0, 89.0), magnitude=(95.0,) * 3, curvature=(87.2, 88.3, 89.4), label=(99.0,) * 3)
    assert screen.choose(runs, 1) == {"curvature 1": {"curvature": 1.0}}  # not magnitude, not another race
    lines = [line for line in screen.table(runs, "validation_accuracy") if line.startswith("curvature 1")]
    assert "88.30 ± 1.10" in lines[0]
    assert "+0.30 ± 0.06" in lines[0]  # 0.2, 0.3 and 0.4: a standard deviation of 0.1 over the root of three


def test_the_final_has_dense_every_sparsity_and_peers(screen: ModuleType, tmp_path: Path) -> None:
    runs = screen.plan_final({"ours": {"distil": 0.5}}, ["dpf", "gradual"], RACE, tmp_path)
    ours = sorted({run.member.sparsity for run in runs if run.name == "ours"})
    assert ours == [0.5, 0.7, 0.9, 0.95, 0.98]
    assert len(runs) == 3 * (1 + 5 + 2 * 3)
    assert all(run.member.training.distil == 0.5 for run in runs if run.name == "ours")
    assert screen.teachers(runs) == []


@pytest.mark.parametrize(("stage", "net", "epochs"), [("damping", "resnet20", 50), ("plain", "vgg16_cifar", 16)])
def test_records_are_found_after_defaults_have_changed(screen: ModuleType, stage: str, net: str, epochs: int) -> None:
    """And they are of the runs that are asked for: runs named alike would otherwise pass for one another."""
    sparsities = (0.95, 0.98) if stage == "damping" else (0.95,)
    race = screen.Comparison(net, "cifar10", epochs=epochs).race()
    runs = screen.plan_screening(screen.STAGES[stage], race, BENCHMARKS.parent / "results" / f"race-{net}", *sparsities)
    found = [run for run in runs if run.path.exists()]
    assert len(found) >= 6
    assert len(found) == len(runs) or stage == "plain"  # of which the first few were run
    for run in found:
        told = json.loads(run.path.read_text())["settings"]
        asked = run.member.to_dict()
        assert told.get("removed_gradient", 1.0) == asked.get("removed_gradient", 1.0)
        assert (told["method"], told["sparsity"]) == (asked["method"], asked["sparsity"])
