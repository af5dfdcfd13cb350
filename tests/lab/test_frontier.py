"""The accuracy of one network at every sparsity, and what is kept for it while it trains."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fuzz.limits import Bounds, judge
from safetensors.torch import load_file
from torch import Tensor, nn

import gossamer
from gossamer import cli
from gossamer.lab.frontier import (
    Frontier,
    Point,
    frontier,
    frontier_table,
    masks_at,
    read_frontier,
    scores_of,
    write_frontier,
)
from gossamer.lab.recipes import find
from gossamer.lab.report_pages import page_of_run
from gossamer.lab.training import mask_variables, train
from gossamer.lab.training.mask_variables import MASK_VARIABLES

SMALL = ["epochs=6", "model_options.width=6", "device=cpu", "sparsity=0.8"]


def trained(folder: Path, changes: Sequence[str] = (), *, keep: bool = True) -> Path:
    train(find("digits").run.with_settings([*SMALL, *changes]), folder, keep_mask_variables=keep)
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run") / "kept")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run") / "plain", keep=False)


def test_masks_keep_the_highest_scores_of_the_whole_network_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = {"a": torch.randn(7, 5, generator=generator), "b": torch.randn(4, 3, 2, generator=generator)}
    before: dict[str, Tensor] = {}
    for sparsity in (0.99, 0.9, 0.5, 0.1, 0.0):
        masks = masks_at(scores, sparsity)
        kept = sum(int(mask.sum()) for mask in masks.values())
        assert kept == 59 - int(sparsity * 59 + 0.5)
        lowest = min((float(scores[name][mask].min()) for name, mask in masks.items() if mask.any()), default=0)
        assert all(bool((scores[name][~mask] <= lowest).all()) for name, mask in masks.items())
        assert all(bool((masks[name] | ~mask).all()) for name, mask in before.items())  # nested
        before = masks


def test_keeping_mask_variables_changes_nothing_else(kept: Path, plain: Path) -> None:
    one, other = load_file(kept / "model.safetensors"), load_file(plain / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (kept / MASK_VARIABLES).is_file()
    assert not (plain / MASK_VARIABLES).exists()


def test_mask_variables_cut_to_the_sparsity_of_the_run_are_its_masks(kept: Path) -> None:
    final = load_file(kept / "model.safetensors")
    state, variables = mask_variables.read(kept)
    assert state.keys() == final.keys()
    masks = masks_at(variables, 0.8)
    differ = sum(int((mask != (final[name] != 0)).sum()) for name, mask in masks.items())
    kept_weights = sum(int(mask.sum()) for mask in masks.values())
    assert differ < 0.05 * kept_weights  # those of the last step
    assert all(bool((state[name] != 0).all()) for name in variables)  # dense weights


def test_the_curve_of_mask_variables(kept: Path) -> None:
    untouched = {path.name: path.read_bytes() for path in kept.iterdir() if path.is_file()}
    found = frontier(kept, sparsities=(0.0, 0.5, 0.95, 0.999))
    assert found == frontier(kept, sparsities=(0.0, 0.5, 0.95, 0.999))
    assert found.order == "mask variables"
    assert [each.sparsity for each in found.points] == [0.0, 0.5, 0.8, 0.95, 0.999]
    own = found.points[2]
    result = json.loads((kept / "result.json").read_text())
    assert (own.trained, own.runs) == (result["accuracy"], 1)
    assert own.gap == pytest.approx(result["accuracy"] - own.test)
    assert abs(own.test - result["accuracy"]) < 0.1
    assert found.points[-1].test < 0.5 < own.test
    assert [each.trained for each in found.points if each is not own] == [None] * 4
    assert {path.name: path.read_bytes() for path in kept.iterdir() if path.is_file()} == untouched


def test_without_them_the_curve_begins_at_the_sparsity_of_the_run(plain: Path) -> None:
    found = frontier(plain, sparsities=(0.0, 0.5, 0.9))
    assert found.order == "magnitudes"
    assert [each.sparsity for each in found.points] == [0.8, 0.9]


def test_recalibration_is_needed(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the statistics of the dense network a sparse one is worse, as long as it has anything to lose."""
    with_it = frontier(plain, sparsities=(0.9,)).points[-1]
    monkeypatch.setattr("gossamer.lab.frontier.update_bn", lambda batches, model: None)
    without = frontier(plain, sparsities=(0.9,)).points[-1]
    assert with_it.test > without.test


def test_runs_for_other_sparsities_are_compared_with_and_others_refused(kept: Path, tmp_path: Path) -> None:
    denser = trained(tmp_path / "denser", ["sparsity=0.5", "seed=1"], keep=False)
    result = json.loads((denser / "result.json").read_text())
    found = frontier(kept, sparsities=(0.9,), against=[denser])
    assert [(each.sparsity, each.trained) for each in found.points[:1]] == [(0.5, result["accuracy"])]
    (denser / "result.json").write_text(json.dumps(result | {"epochs": 7}))
    with pytest.raises(ValueError, match="epochs=6, got none among 1"):
        frontier(kept, against=[denser])
    with pytest.raises(ValueError, match="expected sparsities from 0 to below 1"):
        frontier(kept, sparsities=(0.5, 1.0))


POINTS = tuple(
    Point(sparsity, test, validation, None, 0)
    for sparsity, test, validation in ((0.0, 0.90, 0.91), (0.9, 0.93, 0.92), (0.95, 0.91, 0.912), (0.99, 0.95, 0.5))
)


def test_the_knee_is_chosen_on_the_validation_set() -> None:
    assert Frontier("magnitudes", POINTS).knee.sparsity == 0.95
    assert "← knee" in frontier_table(Frontier("magnitudes", POINTS))[1][2][0]
    without = tuple(Point(each.sparsity, each.test, None, None, 0) for each in POINTS)
    assert Frontier("magnitudes", without).knee.sparsity == 0.99


def test_the_file_comes_back_and_damage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "frontier.json"
    found = Frontier("mask variables", POINTS)
    write_frontier(found, path)
    assert read_frontier(path) == found
    values = json.loads(path.read_text())
    for damaged in ({}, {"points": []}, {**values, "order": 3}, {**values, "points": [{"sparsity": 0.5}]}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="expected the result of gossamer frontier"):
            read_frontier(path)
    values["points"][0]["test"] = "0.9"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="expected the result of gossamer frontier"):
        read_frontier(path)


def test_from_the_command_line_to_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        return int(stop.value.code or 0)

    out = str(tmp_path / "run")
    settings = ["--epochs", "4", "--set", "model_options.width=4"]
    assert run("train", "digits", "--out", out, "--keep-mask-variables", *settings) == 0
    assert run("frontier", out, "--sparsity", "0.5", "0.9", "0.99") == 0
    shown = capsys.readouterr().out
    assert "by mask variables" in shown
    assert "← knee" in shown
    found = read_frontier(tmp_path / "run" / "frontier.json")
    assert [each.sparsity for each in found.points] == [0.5, 0.9, 0.95, 0.99]
    page = page_of_run(tmp_path / "run")
    assert "Accuracy against sparsity" in [chart.title for chart in page.charts]
    assert "cut at many places" in "".join(page.parts)
    assert run("frontier", str(tmp_path)) == 2
    assert "expected a finished run" in capsys.readouterr().err


def test_a_damaged_frontier_is_refused_or_shown_in_no_time(tmp_path: Path) -> None:
    point = {"sparsity": 0.5, "test": 0.9, "validation": None, "trained": None, "runs": 0}
    path = tmp_path / "frontier.json"
    for wrong in ({"test": 1e308}, {"test": -1}, {"trained": "x"}, {"runs": -1}, {"sparsity": 1.0}):
        path.write_text(json.dumps({"order": "x", "points": [point | wrong]}))
        with pytest.raises(ValueError, match=r"expected the result of gossamer frontier in .*delete it"):
            read_frontier(path)
    for count, allowed in ((10_000, True), (10_001, False)):
        path.write_text(json.dumps({"order": "x", "points": [point] * count}))
        verdict = judge(lambda: frontier_table(read_frontier(path)), path.stat().st_size, Bounds())
        assert not verdict.problem
        assert verdict.accepted == allowed


def test_mask_variables_of_another_network_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    state = {f"state:{name}": tensor for name, tensor in model.state_dict().items()}
    right = {f"mask_variable:{name}": torch.ones_like(model.get_parameter(name)) for name in ("0.weight", "1.weight")}
    gossamer.save(state | right, tmp_path / MASK_VARIABLES)
    assert scores_of(tmp_path, model)[0].keys() == {"0.weight", "1.weight"}
    for wrong, message in (
        ({"mask_variable:2.weight": torch.ones(2, 2)}, "expected a mask variable for each of 2"),
        ({"mask_variable:0.weight": torch.ones(2, 2)}, "expected a mask variable for each of 2"),
        ({"state:0.weight": torch.ones(2, 2)}, "expected the tensors of this run"),
    ):
        gossamer.save(state | right | wrong, tmp_path / MASK_VARIABLES)
        with pytest.raises(ValueError, match=message):
            scores_of(tmp_path, model)
