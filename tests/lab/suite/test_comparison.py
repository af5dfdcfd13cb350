"""Comparisons on the general suite: runs in batches and in processes, records that are found again, the summary."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.lab.recipes import general as recipes
from gossamer.lab.recipes.general import PROBLEMS, Problem, problem_named
from gossamer.lab.results import general as results
from gossamer.lab.suite import SuiteComparison, compare_suite, comparison, pool
from gossamer.lab.training import Run

pytest.importorskip("sklearn")
BATCHED = Problem(
    "digits-sgd",
    "digits",
    Run(model="digits_cnn", data="digits", epochs=1, batch_size=128, device="cpu"),
    (0.9,),
    minutes=1,
)
ALONE = replace(BATCHED, name="digits-adam", run=replace(BATCHED.run, optimizer="adam", lr=1e-3))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite with two problems of digits, one trained in batches and one in processes."""
    for module in (recipes, results, comparison):
        monkeypatch.setattr(module, "PROBLEMS", (BATCHED, ALONE))


@pytest.mark.usefixtures("small")
def test_problems_are_trained_recorded_and_found_again(tmp_path: Path) -> None:
    asked = SuiteComparison(methods=("scl", "gradual"), seeds=2)
    lines = list[str]()
    rows = compare_suite(asked, tmp_path, device="cpu", jobs=2, progress=lines.append)
    assert [(row["problem"], row["sparsity"], row["method"], row["n"]) for row in rows] == [
        (problem, sparsity, method, 2)
        for problem in ("digits-sgd", "digits-adam")
        for sparsity, method in ((0.0, "dense"), (0.9, "gradual"), (0.9, "scl"))
    ]
    assert all(0.05 < row["mean"] <= 1 and row["stderr"] >= 0 and row["better"] == "higher" for row in rows)
    assert json.loads((tmp_path / "summary.json").read_text()) == rows
    assert any(line.startswith("6 of 6 runs") and line.endswith("0.0 min left") for line in lines)
    for problem in (BATCHED, ALONE):
        for run in asked.runs(problem):
            record = json.loads((tmp_path / problem.name / f"{run.run_id}.json").read_text())
            assert record["config"]["optimizer"] == problem.run.optimizer
            assert record["sparsity"] == pytest.approx(run.sparsity or 0.0, abs=1e-3)
    again = list[str]()
    assert compare_suite(asked, tmp_path, device="cpu", progress=again.append) == rows
    assert [line.rpartition(", ")[2] for line in again] == ["0 to train"] * 2


def test_a_run_that_diverges_or_cannot_be_trained_stops_no_other(tmp_path: Path) -> None:
    diverging = replace(ALONE.run, lr=1e30)
    impossible = ALONE.run.with_settings(["method=scl", "sparsity=0.9999"])  # less than min_density keeps
    problems = pool.train_in_processes([diverging, impossible], tmp_path, device="cpu", jobs=1)
    assert len(problems) == 1
    assert impossible.run_id in problems[0]
    record = json.loads((tmp_path / f"{diverging.run_id}.json").read_text())
    assert record["diverged"] is True
    assert "not finite" in record["why"]


def test_each_method_has_the_phases_that_suit_it_and_its_frozen_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_named("vit-cifar10")
    asked = SuiteComparison(("vit-cifar10",), ("feather", "scl", "scl:mask_lr=0.5"), seeds=1)
    dense, feather, _, scl, _, changed, _ = asked.runs(problem)
    assert dense == problem.run
    assert feather.phases.warmup == "0it"
    assert scl.phases.warmup == "0.25run"
    assert results.variant(scl, problem) == "scl"
    assert results.variant(changed, problem) == "scl:mask_lr=0.5"
    monkeypatch.setattr(recipes, "frozen_settings", lambda: {"scl": ("settings.warmup=0.5run",)})
    assert problem.sparse_run("scl", 0.9).phases.warmup == "0.5run"


def test_unknown_problems_and_empty_comparisons_are_errors() -> None:
    with pytest.raises(ValueError, match="got 'vit-cifar': did you mean 'vit-cifar10'"):
        SuiteComparison(("vit-cifar",))
    with pytest.raises(ValueError, match="at least 1 seed"):
        SuiteComparison(seeds=0)


def test_the_report_fits_two_hours_and_nothing_is_chosen_on_its_problems() -> None:
    assert sum(problem.minutes for problem in PROBLEMS) <= 120
    assert {problem.name for problem in PROBLEMS if problem.development} == {
        "resnet20-cifar10",
        "vit-cifar10",
        "fc-mnist-sgd",
        "fc-mnist-adam",
    }
