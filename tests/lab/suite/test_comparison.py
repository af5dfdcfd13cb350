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
ALONE = replace(BATCHED, name="digits-alone", run=replace(BATCHED.run, nesterov=True))  # not in a batch


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite with two problems of digits, one trained in batches and one in processes."""
    for module in (recipes, results, comparison):
        monkeypatch.setattr(module, "PROBLEMS", (BATCHED, ALONE))


@pytest.mark.usefixtures("small")
def test_a_problem_is_trained_recorded_and_found_again(tmp_path: Path) -> None:
    asked = SuiteComparison(("digits-sgd",), ("scl", "gradual"), seeds=2)
    rows = compare_suite(asked, tmp_path, device="cpu", together=4)
    assert [(row["sparsity"], row["method"], row["n"]) for row in rows] == [
        (0.0, "dense", 2),
        (0.9, "gradual", 2),
        (0.9, "scl", 2),
    ]
    assert all(row["problem"] == "digits-sgd" and row["better"] == "higher" for row in rows)
    assert all(0.05 < row["mean"] <= 1 and row["stderr"] >= 0 for row in rows)
    assert json.loads((tmp_path / "summary.json").read_text()) == rows
    for run in asked.runs(BATCHED):
        record = json.loads((tmp_path / "digits-sgd" / f"{run.run_id}.json").read_text())
        assert record["sparsity"] == pytest.approx(run.sparsity or 0.0, abs=1e-3)
    again = list[str]()
    assert compare_suite(asked, tmp_path, device="cpu", progress=again.append) == rows
    assert again == ["digits-sgd: 6 runs, 0 to train"]
    wider = SuiteComparison(("digits-sgd",), ("scl", "gradual"), seeds=3)
    late = list[str]()
    assert compare_suite(wider, tmp_path, device="cpu", minutes=0.0, progress=late.append) == rows
    assert late[0] == "digits-sgd: 9 runs, 3 to train"
    assert (asked.missing(tmp_path), wider.missing(tmp_path)) == (0, 3)
    path = tmp_path / "digits-sgd" / f"{BATCHED.sparse_run('scl', 0.9).run_id}.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "options": {**record["options"], "mask_decay": 0.5}}))
    with pytest.raises(ValueError, match=r"was trained when mask_decay=0\.5 was the default"):
        compare_suite(asked, tmp_path, device="cpu")


@pytest.mark.usefixtures("small")
def test_runs_in_processes_have_records_and_one_that_cannot_be_trained_stops_no_other(tmp_path: Path) -> None:
    asked = SuiteComparison(("digits-alone",), ("scl", "scl:min_density=0.5"), seeds=1)
    lines = list[str]()
    with pytest.raises(RuntimeError, match=r"1 of the runs could not be trained.*\n  run \w+, scl at 90.0%, seed 0: "):
        compare_suite(asked, tmp_path, device="cpu", jobs=2, progress=lines.append)
    assert any(line.startswith("3 of 3 runs, ") and line.endswith("; 0.0 min left") for line in lines)
    assert lines[-1].startswith("digits-alone: 2 of 3 runs trained in ")
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert [(row["method"], row["n"]) for row in rows] == [("dense", 1), ("scl", 1)]
    assert [row["stderr"] for row in rows] == [None, None]


def test_a_run_that_diverges_has_a_record_that_says_so(tmp_path: Path) -> None:
    run = replace(ALONE.run, lr=1e30)
    assert pool._train_one(run.to_dict(), tmp_path, "cpu", save_models=False) == "diverged"
    record = json.loads((tmp_path / f"{run.run_id}.json").read_text())
    assert record["diverged"] is True
    assert "not finite" in record["why"]
    assert not list((tmp_path / "unfinished").iterdir())


def test_the_page_shows_the_difference_to_the_best_and_average_ranks(tmp_path: Path) -> None:
    usual = problem_named("transformer-wikitext2")
    values = {"scl": (90.0, 92.0, 91.0), "gradual": (100.0, 101.0, 102.0), "feather": (90.5, 90.6, 90.7)}
    folder = tmp_path / "general" / usual.name
    folder.mkdir(parents=True)
    for sparsity in (0.9, 0.95):
        for method, perplexities in values.items():
            for seed, value in enumerate(perplexities):
                run = replace(usual.sparse_run(method, sparsity), seed=seed)
                record = {"config": run.to_dict(), "perplexity": value, "diverged": False}
                (folder / f"{run.run_id}.json").write_text(json.dumps(record))
    dense = {"config": usual.run.to_dict(), "perplexity": 80.0, "diverged": False}
    (folder / "dense.json").write_text(json.dumps(dense))
    (tmp_path / "tuning").mkdir()
    tuned = {"methods": {"scl": {"trials": 16, "run_epochs": 1600}}}
    (tmp_path / "tuning" / "tuning.json").write_text(json.dumps(tuned))
    shown = results.general(tmp_path)
    assert "| dense | 80.00 | 80.00 |" in shown
    assert "| scl (ours) | 91.00 ± 0.58 (+0.40) | 91.00 ± 0.58 (+0.40) |" in shown
    assert "| feather | **90.60 ± 0.06** | **90.60 ± 0.06** |" in shown
    assert "in 0 of 2 cells; it is not in transformer-wikitext2 at 90%, transformer-wikitext2 at 95%." in shown
    assert "| feather | 1.00 | – | – |" in shown
    assert "| scl | 2.00 | 16 | 1,600 |" in shown
    line = "| decoder-only transformer, WikiText-2, AdamW | 91.00 ± 0.58 | 90.60 ± 0.06 (feather) | 91.00 ± 0.58 |"
    assert f"{line} 90.60 ± 0.06 (feather) | 80.00 |" in results.readme_table(tmp_path)
    assert results.general(tmp_path / "nothing") == results.readme_table(tmp_path / "nothing") == ""


def test_each_method_has_the_phases_that_suit_it_and_its_frozen_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_named("vit-cifar10")
    asked = SuiteComparison(("vit-cifar10",), ("feather", "scl", "scl:mask_lr=0.5"), seeds=1)
    dense, feather, _, scl, _, changed, _ = asked.runs(problem)
    assert dense == problem.run
    assert feather.phases.warmup == "0it"
    assert scl.phases.warmup == "0.1run"
    assert changed.phases.warmup == "0.25run"  # masks that learn from gradients have other phases
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
