"""Tables of comparisons from made-up records."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gossamer.lab.recipes import RECIPES
from gossamer.lab.results import Record, blocks_of, comparison_page, plot, table_of
from gossamer.lab.results.comparisons import (
    PUBLISHED,
    comparisons,
    displayed,
    groups_of,
    one_per_method,
    over_lengths,
    published,
)
from gossamer.lab.results.pages import drawings, in_a_sentence, summary
from gossamer.lab.training.run import Run
from gossamer.methods import METHODS, find


def rows_of(records: Sequence[Record], key: str = "accuracy") -> list[list[str]]:
    (block,) = blocks_of(records)
    return table_of(block, key)[1]


def labels(records: Sequence[Record]) -> list[str]:
    return [group.label() for group in groups_of(records)]


PHASES = {"warmup": "12ep", "sparsify": "18ep", "stabilise": "8ep"}


def record(method: str, sparsity: float, accuracy: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    """`accuracy` is in percent; `settings` are of the method, `fields` of the run."""
    name, settings = find(method).name, more.pop("settings", {})
    fields = {"weight_decay": 5e-4, "epochs": 50, "validation": 5000, **more.pop("fields", {})}
    request = {} if name == "dense" else {"sparsity": sparsity, "settings": {**PHASES, **settings}}
    run = Run(**{"model": "resnet20", "data": "cifar10", "method": name, "seed": seed, **request, **fields})
    accuracies = {"accuracy": accuracy / 100, "validation_accuracy": accuracy / 100 + 0.01}
    return {
        "run_id": run.run_id,
        "config": {**run.to_dict(), "method": method},
        "options": {} if name == "dense" else asdict(run.options),
        "seed": seed,
        "sparsity": sparsity,
        "tier": "screening",
        "train_loss": 0.25,
        "diverged": False,
        "hardware": {"device": "cuda", "gpu": "NVIDIA H200"},
        **accuracies,
        **more,
    }


def with_fields(each: Record, **fields: Any) -> Record:
    return {**each, "config": {**each["config"], **fields}}


FALLING = {"weight_decay_power": 0.5}
WHOLE = {"weight_decay": 1e-3}


def test_a_row_a_method_and_a_column_a_sparsity() -> None:
    runs = [record("dense", 0.0, 92.0), record("scl", 0.5, 91.0), record("scl", 0.5, 92.0, seed=1)]
    runs += [record("dpf", 0.95, 89.0), record("dpf", 0.95, 90.0, seed=1), record("scl", 0.95, 90.0)]
    runs += [record("rigl", 0.98, 80.0), record("rigl", 0.98, 80.0, seed=1)]
    head, rows = table_of(*blocks_of(runs))
    assert head == ["method", "0 %", "50 %", "95 %", "98 %"]
    titles = {name: METHODS[name].title for name in ("dense", "scl", "dpf", "rigl")}
    assert rows == [  # best first at 95 %, where most can be compared
        [titles["dense"], "92.00 (1)", "–", "–", "–"],
        [titles["scl"], "–", "91.50 ± 0.71", "90.00 (1)", "–"],
        [titles["dpf"], "–", "–", "89.50 ± 0.71", "–"],
        [titles["rigl"], "–", "–", "–", "80.00 ± 0.00"],
    ]
    assert rows_of(runs, "train_loss")[0][1] == "0.250 (1)"
    assert rows_of([record("scl", 0.9, 90.0, validation_accuracy=None)], "validation_accuracy")[0][1] == "–"


def test_runs_that_have_diverged_are_counted() -> None:
    runs = [
        record("dpf", 0.9, 90.0),
        record("dpf", 0.9, 10.0, seed=1, train_loss=None, diverged=True),
        record("scl", 0.9, 91.0),
    ]
    rows = {row[0]: row[1] for row in rows_of(runs)}
    assert rows[METHODS["dpf"].title] == "50.00 ± 56.57 (1 diverged)"
    assert rows[METHODS["scl"].title] == "91.00 (1)"
    assert rows_of(runs, "train_loss")[1][1] == "0.250 (1) (1 diverged)"


def test_a_method_that_was_called_otherwise_has_one_row() -> None:
    runs = [record("dpf", 0.9, 90.0), record("magnitude", 0.9, 91.0, seed=1)]
    assert rows_of(runs) == [[METHODS["dpf"].title, "90.50 ± 0.71"]]


def test_a_record_from_before_a_default_changed_says_what_it_was_then() -> None:
    old = record("scl", 0.9, 90.0)
    old["options"] |= {"pruned_grad_scale": 1.0, "mask_decay": 0.0, "mask_decay_cap": 0.0}  # a cap of no decay
    assert labels([old]) == [f"{METHODS['scl'].title}, mask_decay=0, pruned_grad_scale=1"]


def test_a_row_says_what_differs_from_the_defaults() -> None:
    other_phases = {"warmup": "10ep", "sparsify": "20ep"}
    runs = [
        record("scl", 0.9, 90.0),
        record("scl", 0.9, 90.0, settings={"mask_lr": 0.03}, retired={"shares": [0.2, 0.8]}),
        record("dpf", 0.9, 90.0, fields={"weight_decay": 1e-4}, unused={"mask_lr": 0.03}),  # as early records have it
        record("scl", 0.9, 90.0, settings=other_phases, fields={"label_smoothing": 0.1}),
        record("scl", 0.9, 90.0, settings={**other_phases, "min_density": 0.0}, fields={"preset": "paper"}),
    ]
    title = METHODS["scl"].title
    assert labels([runs[0], *runs]) == [
        title,
        f"{title}, mask_lr=0.03, shares=0.2+0.8",
        f"{METHODS['dpf'].title}, weight_decay=0.0001",
        f"{title}, label_smoothing=0.1, phases=0.20+0.40+0.16+0.24",
        f"{title}, preset=paper, λ1=solved for, schedule=cosine, min_density=0",
    ]


STRONG = {"weight_decay": 1e-3, "weight_decay_power": 0.5}
SAID = "all with weight_decay=0.001, weight_decay_power=0.5"


def test_what_all_methods_have_is_said_once() -> None:
    runs = [record("dense", 0.0, 90.0, fields=WHOLE)]
    runs += [record(name, 0.9, 90.0, fields=STRONG) for name in ("scl", "dpf")]
    runs.append(record("scl", 0.9, 90.0, settings={"mask_lr": 0.1}, fields=STRONG, retired={"recalibrate": True}))
    (block,) = blocks_of(runs)
    assert (block.kind, block.shared) == ("single weights", ("weight_decay=0.001", "weight_decay_power=0.5"))
    assert block.title == f"single weights, {SAID}"
    ours = METHODS["scl"].title
    said = [row[0] for row in rows_of(runs)]
    assert sorted(said) == sorted(["dense", ours, f"{ours}, mask_lr=0.1, recalibrate=True", METHODS["dpf"].title])
    assert comparison_page(runs, "screening").splitlines()[2] == f"Single weights, {SAID}:"
    assert blocks_of([runs[1]])[0].title == "single weights"  # one method has only its row to say it
    assert rows_of([runs[1]])[0][0] == f"{ours}, weight_decay=0.001, weight_decay_power=0.5"


def test_a_title_keeps_the_capitals_of_values() -> None:
    runs = [record(name, 0.9, 90.0, retired={"recalibrate": True}) for name in ("scl", "dpf")]
    assert "\nSingle weights, all with recalibrate=True:\n" in comparison_page(runs, "screening")


def test_whole_filters_stand_apart() -> None:
    runs = [record(name, 0.5, 90.0) for name in ("slimming", "scl", "dpf")]
    blocks = blocks_of(runs)
    assert [(block.title, [row[0] for row in table_of(block)[1]]) for block in blocks] == [
        ("single weights", [METHODS["scl"].title, METHODS["dpf"].title]),
        ("whole filters", [METHODS["slimming"].title]),
    ]
    assert [line for line in comparison_page(runs, "screening").splitlines() if line.endswith(":")] == [
        "Single weights:",
        "Whole filters:",
    ]


def test_each_kind_has_what_its_own_methods_share() -> None:
    runs = [record(name, 0.5, 90.0, fields=STRONG) for name in ("scl", "dpf")]
    runs += [record(name, 0.5, 90.0) for name in ("slimming", "l1_filter")]
    assert [block.title for block in blocks_of(runs)] == [f"single weights, {SAID}", "whole filters"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without a run."""
    (tmp_path / "compare-resnet20").mkdir()
    (tmp_path / "step-overhead").mkdir()
    for name in ("cpu", "h200"):
        (tmp_path / "step-overhead" / f"{name}.json").write_text('{"rows": []}')
    return tmp_path


def rows_of_the_readme(checkout: Path, runs: Sequence[Record]) -> list[list[str]]:
    for number, each in enumerate(runs):
        (checkout / "compare-resnet20" / f"{number}.json").write_text(json.dumps({**each, "tier": "final"}))
    lines = [line for line in summary(checkout).splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def test_of_ours_what_is_nearest_to_the_defaults_is_shown_and_of_peers_what_suits_them() -> None:
    told = [record("dpf", 0.9, 89.0), record("dpf", 0.9, 89.5, fields=FALLING)]
    told += [record("scl", 0.9, 91.0), record("scl", 0.9, 92.0, settings={"mask_lr": 0.1})]
    shown, others = one_per_method(told)
    assert labels(shown) == [METHODS["scl"].title, f"{METHODS['dpf'].title}, weight_decay_power=0.5"]
    assert labels(others) == [f"{METHODS['scl'].title}, mask_lr=0.1", METHODS["dpf"].title]
    nowhere = [{**each, "validation_accuracy": None} for each in told]  # held out
    assert labels(one_per_method(nowhere)[0]) == [METHODS["scl"].title, METHODS["dpf"].title]


def test_ours_is_the_default_though_something_else_ran_at_more_sparsities_and_the_paper_stands_beside() -> None:
    told = [record("scl", at, 91.0, fields={"distil": 0.5}) for at in (0.5, 0.9)]
    told += [record("scl", 0.9, 91.0), record("scl", 0.9, 89.0, fields={"preset": "paper"}), record("dpf", 0.9, 90.0)]
    ours = METHODS["scl"].title
    shown, others = one_per_method(told)
    assert labels(shown) == [ours, METHODS["dpf"].title, f"{ours}, preset=paper, λ1=solved for, schedule=cosine"]
    assert labels(others) == [f"{ours}, distil=0.5"]


def test_where_one_method_runs_alone_its_settings_are_what_is_compared() -> None:
    told = [record("dense", 0.0, 93.0), record("scl", 0.9, 91.0), record("scl", 0.9, 92.0, settings={"mask_lr": 0.1})]
    assert displayed(told) == (told, [])
    rival = [*told, record("dpf", 0.9, 90.0)]
    assert labels(displayed(rival)[1]) == [f"{METHODS['scl'].title}, mask_lr=0.1"]


def test_the_readme_has_of_each_method_what_is_nearest_to_the_defaults_or_suits_it(checkout: Path) -> None:
    runs = [
        record("dense", 0.0, 93.0),
        record("scl", 0.9, 92.0, settings={"mask_lr": 0.1}, fields={"distil": 0.5}),
        record("scl", 0.9, 91.0, settings={"mask_lr": 0.1}),
        record("dpf", 0.9, 90.0),
        record("dpf", 0.5, 92.5, fields=WHOLE),  # which says nothing about 90 %
        record("gradual", 0.9, 89.0),
        record("gradual", 0.9, 89.5, fields=WHOLE),
    ]
    assert rows_of_the_readme(checkout, runs) == [
        ["dense", "93.00", "–"],
        [f"{METHODS['scl'].title}, mask_lr=0.1", "–", "91.00"],
        [METHODS["dpf"].title, "–", "90.00"],
        [f"{METHODS['gradual'].title}, weight_decay=0.001", "–", "89.50"],
    ]  # and no column for what is not there


def test_the_spread_over_several_lengths_is_given() -> None:
    short = [record("scl", 0.95, accuracy, seed, tier="final") for seed, accuracy in enumerate([90.0, 91.0])]
    others = [
        record("scl", 0.95, 80.0, settings={"mask_lr": 0.1}, tier="final"),
        record("dpf", 0.95, 70.0, tier="final"),
    ]
    longer = [
        record("scl", 0.95, accuracy, seed, tier="final", fields={"epochs": 60})
        for seed, accuracy in enumerate([92.0, 93.0])
    ]
    assert over_lengths([*short, *others]) == ""
    assert over_lengths([*short, *others, *longer]).startswith(
        "At 95 % zeros the defaults give 90.50 ± 0.71 in 50 epochs and 92.50 ± 0.71 in 60 epochs: 91.50 ± 1.29 over all"
    )


def test_longer_runs_of_fewer_methods_are_a_sentence_of_the_readme(checkout: Path) -> None:
    runs = [record("dense", 0.0, 92.0), record("scl", 0.9, 91.0), record("dpf", 0.9, 90.0)]
    longer = [record("dense", 0.0, 93.0), record("scl", 0.5, 92.5), record("scl", 0.9, 91.5)]
    shorter = [record("dense", 0.0, 90.0, fields={"epochs": 20})]
    rows = rows_of_the_readme(checkout, [*runs, *shorter, *(with_fields(each, epochs=350) for each in longer)])
    assert [row[-1] for row in rows] == ["–", "91.00", "90.00"]
    told = f"In 350 epochs, dense: 93.00; {METHODS['scl'].title}: 92.50 at 50 %, 91.50 at 90 %."
    assert f"{told} The paper prints" in summary(checkout)
    assert "In 20 epochs" not in summary(checkout)
    rivals = [record(name, 0.9, 91.0, fields={**WHOLE, "epochs": 350}) for name in ("scl", "dpf")]
    assert in_a_sentence(350, rivals).startswith("In 350 epochs, all with weight_decay=0.001, ")


def test_of_two_that_are_as_near_the_readme_has_the_better(checkout: Path) -> None:
    rates = {0.02: 90.0, 0.1: 92.0, 0.05: 91.0}
    runs = [record("scl", 0.9, accuracy, settings={"mask_lr": rate}) for rate, accuracy in rates.items()]
    assert rows_of_the_readme(checkout, runs) == [[f"{METHODS['scl'].title}, mask_lr=0.1", "92.00"]]


def test_methods_whose_titles_begin_alike_both_are_in_the_readme(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METHODS["dpf"], "title", "magnitude")
    monkeypatch.setattr(METHODS["gradual"], "title", "magnitude, gradual")
    runs = [
        record("dpf", 0.9, 90.0, fields=WHOLE),
        record("gradual", 0.9, 89.0),
        record("gradual", 0.9, 91.0, fields={"weight_decay": 2e-4}),
    ]
    assert rows_of_the_readme(checkout, runs) == [
        ["magnitude, gradual, weight_decay=0.0002", "91.00"],
        ["magnitude, weight_decay=0.001", "90.00"],
    ]


def test_a_page_names_tier_and_length() -> None:
    assert comparison_page([record("scl", 0.5, 90.0)], "screening").startswith(
        "Screening of resnet20 on cifar10: 50 epochs, 5,000 training images held out; "
    )
    assert comparison_page([record("scl", 0.5, 90.0)], "screening").splitlines()[0].endswith("by sparsity, one seed.")
    pair = comparison_page([record("scl", 0.5, 90.0, seed=seed) for seed in (0, 1)], "screening")
    assert pair.splitlines()[0].endswith("mean ± standard deviation over 2 seeds.")
    final = comparison_page([record("scl", 0.5, 90.0, fields={"epochs": 350, "validation": 0})], "final")
    assert final.startswith("Final of resnet20 on cifar10: 350 epochs, all training images; ")


@pytest.fixture
def page(tmp_path: Path) -> str:
    runs = [record("scl", 0.95, 87.0), record("dpf", 0.95, 86.0), record("slimming", 0.5, 85.0)]
    runs += [
        record("scl", 0.95, accuracy, tier="final", fields={"epochs": epochs})
        for accuracy, epochs in ((90.3, 350), (89.6, 200))
    ]
    runs += [record("scl", 0.95, 11.11, tier=tier) for tier in ("factors", "hypotheses")]
    early = record("scl", 0.95, 86.5, settings={"mask_lr": 0.1}, tier="early")
    (tmp_path / "compare-resnet20").mkdir()
    for number, each in enumerate([*runs, early]):
        (tmp_path / "compare-resnet20" / f"{number}.json").write_text(json.dumps(each))
    return comparisons(tmp_path)


def test_every_length_and_tier_has_its_section(page: str) -> None:
    titles = [line for line in page.splitlines() if line.startswith("###")]
    assert [title.split(":")[0] + title.split(":")[1][:4] for title in titles] == [
        "### Final 350",
        "### Final 200",
        "### Screening 50 ",
        "### Settings of learned masks against each other 50 ",
    ]
    sections = page.split("\n### ")
    assert "90.30" in sections[1]
    assert [section.count("\nSingle weights:\n") for section in sections] == [0, 2, 2, 3, 0]
    assert "89.60" in sections[2]
    assert "Whole filters:" in sections[3]
    assert "Trained at unknown (dpf, scl, slimming)." in sections[3]
    assert "86.50" in sections[4]
    assert not any("86.50" in section for section in sections[:4])


def test_a_section_shows_one_setting_of_each_method_and_folds_the_others_away(tmp_path: Path) -> None:
    """That with which most sparsities were run, though another is nearer to the defaults."""
    runs = [record("scl", 0.9, 91.0), record("dpf", 0.95, 88.5)]
    runs += [record("dpf", at, accuracy, fields=FALLING) for at, accuracy in ((0.9, 90.0), (0.95, 88.0))]
    folder = tmp_path / "results" / "compare-resnet20"
    folder.mkdir(parents=True)
    for number, each in enumerate(runs):
        (folder / f"{number}.json").write_text(json.dumps(each))
    shown, *folded = comparisons(tmp_path / "results").split("<details><summary>")
    assert f"| {METHODS['dpf'].title}, weight_decay_power=0.5 | 90.00 | 88.00 |" in shown
    assert "88.50" not in shown
    assert [part.split("<")[0] for part in folded][-1] == "The same methods with other settings"
    assert f"| {METHODS['dpf'].title} | 88.50 |" in folded[-1]
    assert "91.00" not in folded[-1]
    (drawn,) = drawings(tmp_path).values()
    assert sorted(each["accuracy"] for each in drawn) == [0.88, 0.9, 0.91]


def test_every_network_has_its_section(tmp_path: Path) -> None:
    for net in ("aaa", "resnet20", "vgg16_cifar"):
        (tmp_path / f"compare-{net}").mkdir()
    for net in ("aaa", "resnet20"):
        (tmp_path / f"compare-{net}" / "0.json").write_text(json.dumps(record("scl", 0.9, 90.0, fields={"model": net})))
    (tmp_path / "compare-resnet20" / "screening.svg").touch()
    page = comparisons(tmp_path)
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        "## ResNet-20 on CIFAR-10",
        "## aaa on CIFAR-10",
    ]
    assert "(../results/compare-resnet20/screening.svg)" in page
    assert "compare-aaa" not in page


def test_data_sets_are_not_mixed(tmp_path: Path) -> None:
    """A network that raced on two of them has a section and a plot for each."""
    folder = tmp_path / "results" / "compare-resnet20"
    folder.mkdir(parents=True)
    runs = [
        record("scl", 0.95, 87.0),
        record("dpf", 0.95, 86.0),
        record("scl", 0.95, 61.0, fields={"data": "cifar100"}),
    ]
    for number, each in enumerate(runs):
        (folder / f"{number}.json").write_text(json.dumps(each))
    first, second = comparisons(tmp_path / "results").split("\n## ")
    assert first.startswith("## ResNet-20 on CIFAR-10")
    assert second.startswith("ResNet-20 on CIFAR-100")
    assert "61.00" not in first
    assert "61.00" in second
    drawn = {path.name: [each["accuracy"] for each in own] for path, own in drawings(tmp_path).items()}
    assert drawn == {"screening.svg": [0.87, 0.86], "screening-resnet20-cifar100.svg": [0.61]}
    (folder / "other.json").write_text('{"tier": "screening"}')
    with pytest.raises(ValueError, match=r"the record of a run in .*other\.json, got one without run_id, config"):
        comparisons(tmp_path / "results")


def test_runs_that_try_settings_are_in_no_comparison(page: str) -> None:
    assert "11.11" not in page


def test_the_plot_has_a_line_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [("dense", 0.0, 92.0), ("scl", 0.9, 91.0), ("scl", 0.9, 91.5), ("scl", 0.5, 92.0), ("slimming", 0.5, 90.0)]
    records = [record(*point) for point in points]
    scl = plot.panels(records)[0].sparse[0]
    assert (scl.sparsity, scl.accuracy) == ((50.0, 90.0), (92.0, 91.25))
    assert scl.spread == (0.0, pytest.approx(0.5 / 2**0.5))
    plot.accuracy_against_sparsity(records, "final", tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    plot.accuracy_against_sparsity(records, "final", tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == drawn
    assert all(METHODS[name].title in drawn for name in ("dense", "scl", "slimming"))
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install 'gossamer\\[plot\\]'"):
        plot.accuracy_against_sparsity(records, "final", tmp_path / "plot.svg")


def test_a_run_that_has_collapsed_leaves_the_plot_to_the_others() -> None:
    points = [("scl", 0.9, 91.0), ("scl", 0.98, 85.0), ("dpf", 0.9, 90.0), ("dpf", 0.98, 70.0)]
    (panel,) = plot.panels([record(*point) for point in points])
    assert plot.lowest(panel) == 69.5
    (panel,) = plot.panels([record(*point) for point in (*points[:3], ("dpf", 0.98, 10.0))])
    assert plot.lowest(panel) == 84.5


def test_at_one_sparsity_the_plot_has_a_row_a_method_the_best_on_top(tmp_path: Path) -> None:
    points = [("dense", 0.0, 92.0), ("dpf", 0.9, 90.0), ("scl", 0.9, 91.0), ("rigl", 0.9, 89.0)]
    plot.accuracy_against_sparsity([record(*point) for point in points], "final", tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    places = {name: re.search(rf' y="([\d.]+)"[^>]*>{re.escape(METHODS[name].title)}<', drawn) for name in METHODS}
    height = {name: float(found[1]) for name, found in places.items() if found}  # from the top
    assert height["scl"] < height["dpf"] < height["rigl"]
    assert "90 % zeros" in drawn


def texts(drawn: Path) -> list[str]:
    return re.findall(r">([^<>]+)</t", drawn.read_text())


@pytest.mark.parametrize("at", [(0.9,), (0.9, 0.95)])
def test_a_panel_says_what_all_its_runs_share(tmp_path: Path, at: Sequence[float]) -> None:
    runs = [record("dense", 0.0, 92.0, fields=WHOLE)]
    for sparsity in at:
        runs += [record(name, sparsity, 90.0, fields={**STRONG, "distil": 0.5}) for name in ("scl", "dpf")]
        runs += [record(name, sparsity, 90.0) for name in ("slimming", "l1_filter")]
    single, whole = plot.panels(runs)
    zeros = ", 90 % zeros" if len(at) == 1 else ""
    assert single.title == f"single weights{zeros}, {SAID}, distil=0.5"
    assert [line.label for line in single.sparse] == [METHODS["scl"].title, METHODS["dpf"].title]
    assert [line.label for line in single.dense] == ["dense"]
    assert whole.title == f"whole filters{zeros}"
    assert [line.label for line in whole.dense] == ["dense, weight_decay=0.001"]  # here nothing above says it
    plot.accuracy_against_sparsity(runs, "final", tmp_path / "plot.svg")
    drawn = texts(tmp_path / "plot.svg")
    (first,) = [number for number, text in enumerate(drawn) if text.startswith("single weights")]
    assert single.title.startswith(drawn[first])
    assert " ".join(drawn[first:]).startswith(single.title)  # wrapped, but all there
    assert len(drawn[first]) <= (60 if zeros == "" else 40) < len(single.title)


def test_dense_runs_alone_have_a_panel(tmp_path: Path) -> None:
    (panel,) = plot.panels([record("dense", 0.0, 92.0)])
    assert (panel.sparse, [line.accuracy for line in panel.dense]) == ((), [(92.0,)])
    plot.accuracy_against_sparsity([record("dense", 0.0, 92.0)], "final", tmp_path / "plot.svg")
    assert "dense" in texts(tmp_path / "plot.svg")


def test_what_the_paper_prints_is_what_its_recipes_are_held_against() -> None:
    for (net, dataset), numbers in PUBLISHED.items():
        recipe = next(each for each in RECIPES if (each.run.model, each.run.data) == (net, dataset))
        printed = {each.sparsity: round(100 * each.value, 2) for each in recipe.published}
        assert dict(numbers) == printed
    said = published("resnet20", "cifar10")
    assert said == (
        "The paper prints 92.61, 92.35 and 90.08 at 50, 70 and 95 % zeros, and 91.25 for the dense network."
    )
    assert published("vgg16_cifar", "cifar10") == "The paper prints 94.39 at 97 % zeros."
    assert published("lenet5", "mnist") == ""


def test_pages_are_made_of_a_checkout_only(tmp_path: Path) -> None:
    def results(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gossamer.lab.results", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    refused = results()
    assert refused.returncode == 2
    assert f"expected a checkout with README.md and results/, got {tmp_path}" in refused.stderr
    assert "Write README.md, docs/results.md and the plots" in results("--help").stdout
    assert list(tmp_path.iterdir()) == []
