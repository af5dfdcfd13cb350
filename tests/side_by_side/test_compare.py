"""Comparisons: records, going on after an interruption, the command."""

from pathlib import Path

import pytest
import torch

from gossamer import cli
from gossamer.side_by_side import compare as module
from gossamer.side_by_side.compare import Comparison, compare

CPU = torch.device("cpu")
SMALL = Comparison(
    "lenet300", "mnist", methods=("dense", "scl"), sparsity=(0.9,), seeds=1, epochs=4, validation=16, commit="abc"
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few random images in the place of the real ones."""
    from gossamer.data.sets import ImageSet, Labelled

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (208, 1, 28, 28), dtype=torch.uint8, generator=generator)
    part = Labelled(images, torch.randint(0, 10, (208,), generator=generator))
    loaded = ImageSet("mnist", part, part, tuple("0123456789"), (0.5,), (0.25,))
    monkeypatch.setattr(module.data, "load", lambda name: loaded)


@pytest.mark.usefixtures("tiny")
def test_one_record_a_run_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = compare(SMALL, tmp_path, device=CPU)
    assert [record["method"] for record in records] == ["dense", "scl"]
    keys = [
        "method",
        "preset",
        "net",
        "data",
        "sparsity",
        "seed",
        "epochs",
        "accuracy",
        "validation_accuracy",
        "commit",
        "hardware",
    ]
    assert all(key in record for record in records for key in keys)
    assert records[1]["sparsity"] == pytest.approx(0.9, abs=1e-5)
    assert len(list(tmp_path.glob("*.json"))) == 2

    trained = []
    real = module.run_race
    monkeypatch.setattr(
        module, "run_race", lambda race, runs, *a, **k: trained.extend(runs) or real(race, runs, *a, **k)
    )
    assert compare(SMALL, tmp_path, device=CPU) == records
    assert trained == []
    next(tmp_path.glob("*scl*")).unlink()
    again = compare(SMALL, tmp_path, device=CPU)
    assert [member.method for member in trained] == ["scl"]
    assert again[1]["accuracy"] == records[1]["accuracy"]


@pytest.mark.usefixtures("tiny")
def test_the_command_shows_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(
            f"compare --out {tmp_path} --net lenet300 --data mnist --methods scl magnitude --sparsity 0.8 --seeds 2 "
            "--epochs 4 --validation 16 --device cpu".split()
        )
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "gossamer (learned masks)" in shown
    assert "80 %" in shown


def test_too_few_epochs_and_no_gpu_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="expected at least 4 epochs"):
        Comparison("lenet300", "mnist", epochs=2).race()
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as exit_:
            cli.main(["compare", "--out", str(tmp_path)])
        assert exit_.value.code == 2
        assert "expected a CUDA GPU" in capsys.readouterr().err
