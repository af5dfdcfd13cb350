"""Masks learned alone: the small experiment of the paper."""

import json
from pathlib import Path
from typing import Any

import pytest

from gossamer import cli
from gossamer.lab.reproduce import map_fitting
from gossamer.lab.reproduce.map_fitting import Fit, fit_masks, reproduce
from gossamer.lab.training.folder_lock import NAME
from gossamer.methods.scl import ESTIMATORS


def test_masks_are_recovered_by_identity_and_not_by_clipped_relu() -> None:
    fits = [Fit(seed, "identity", "none", "cosine", 3000.0) for seed in range(2)]
    good = fit_masks(fits, steps=400, batch_size=128, samples=512)
    bad = fit_masks([Fit(0, "clipped_relu", "none", "cosine", 3000.0)], steps=400, batch_size=128, samples=512)
    assert all(each.recovered > 0.75 for each in good)
    assert all(each.error < 0.5 * each.curve[0] for each in good)
    assert bad[0].recovered < 0.7


def test_fits_side_by_side_equal_a_fit_alone() -> None:
    one = Fit(1, "softplus", "batch", "constant", 0.1)
    other = Fit(0, "softplus", "none", "cosine", 10.0)
    together = fit_masks([other, one], steps=30, batch_size=32, samples=128)
    alone = fit_masks([one], steps=30, batch_size=32, samples=128)
    assert together[1].error == pytest.approx(alone[0].error, rel=1e-4)


def test_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_fitting, "RATES", {"none": (0.1,), "batch": (0.1,)})
    shares: list[float] = []
    first = reproduce(tmp_path, seeds=1, steps=10, moved=shares.append)
    assert len(first) == 5
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert len({int(7 * share) for share in shares}) == 7  # in each of the seven records
    assert len(shares) > 50
    stored = json.loads((tmp_path / "identity.json").read_text())
    assert {fit["fit"]["scale"] for fit in stored["fits"]} == {"none", "batch"}
    drawn = (tmp_path / "curves.svg").read_text()
    assert all(f"{estimator}, {kind}" in drawn for estimator in ESTIMATORS for kind in ("raw", "normalised"))
    monkeypatch.setattr(map_fitting, "fit_masks", lambda *a, **k: pytest.fail("trained again"))
    assert reproduce(tmp_path, seeds=1, steps=10) == first
    for asked in ({"seeds": 2, "steps": 10}, {"seeds": 1, "steps": 20}):
        with pytest.raises(ValueError, match=r"identity\.json has 10 steps and 1 seeds, not .*: ask for the same"):
            reproduce(tmp_path, **asked)
    with pytest.raises(ValueError, match="at least 1 seed and 1 step, got 0 and 10"):
        reproduce(tmp_path, seeds=0, steps=10)
    (tmp_path / "relu.json").write_text("{}")
    with pytest.raises(ValueError, match=r"expected the fits of an estimator in .*relu\.json, got no steps, fits: del"):
        reproduce(tmp_path, seeds=1, steps=10)
    with pytest.raises(ValueError, match=r"expected a folder for records, got .*relu\.json, which is a file"):
        reproduce(tmp_path / "relu.json", seeds=1, steps=10)


def test_one_process_repeats_an_exhibit_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, held = cli.Reproduce("map-fitting", tmp_path, seeds=1, steps=10), []

    def fit(*arguments: Any, **options: Any) -> Any:
        held.append((tmp_path / NAME).exists())
        return fit_masks(*arguments, **options)

    monkeypatch.setattr(map_fitting, "fit_masks", fit)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run(command) == 2
    assert "expected one process" in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE")
    assert cli.run(command) == 0
    assert held == [True] * (len(ESTIMATORS) + len(map_fitting.ALPHAS))
    assert not (tmp_path / NAME).exists()
