"""The accuracies of the paper beside ours, from records."""

import json
from pathlib import Path
from typing import Any

import pytest

from gossamer.lab.recipes import find
from gossamer.lab.results import paper_cells
from gossamer.lab.results.exhibits import figures
from gossamer.lab.training.run import Run


def write(folder: Path, run: Run, accuracy: float, **further: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "run_id": run.run_id,
        "complete": True,
        "accuracy": accuracy,
        "validation_accuracy": None,
        "sparsity": run.sparsity or 0.95,
        "train_loss": 0.1,
        "diverged": False,
        "seed": run.seed,
        "epochs": run.epochs,
        "method": run.method,
        "model": run.model,
        "data": run.data,
        "seconds": 60.0,
        "config": run.to_dict(),
        "options": {},
        "hardware": {"gpu": "NVIDIA H200"},
        **further,
    }
    (folder / f"{run.run_id}.json").write_text(json.dumps(record))


def row_of(rows: list[dict[str, Any]], network: str, sparsity: float, **further: Any) -> dict[str, Any]:
    wanted = {"network": network, "sparsity": sparsity, "estimator": "identity", "normalised": True, **further}
    (found,) = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
    return found


def test_rows_are_means_over_the_records_that_belong_to_them(tmp_path: Path) -> None:
    paper, ours = find("cifar10-resnet20-paper").run, find("cifar10-resnet20").run
    results = tmp_path / "results"
    told = {"paper_sparsity": 0.95, "flops": 10, "flops_dense": 100}
    for seed, accuracy in ((0, 0.89), (1, 0.91)):
        write(results / "paper-resnet20", paper.with_settings([f"seed={seed}"]), accuracy, **told)
    raw = paper.with_settings(["settings.scale=none", "settings.mask_lr=30"])
    write(results / "paper-resnet20", raw, 0.5, **told)
    write(results / "paper-resnet20", paper.with_settings(["leave_at=0.6"]), 0.6, **{**told, "paper_sparsity": 0.7})
    sizes = [100, 0, 0]
    write(results / "compare-resnet20", ours, 0.92, flops=20, flops_dense=100, nonzeros_by_tensor=sizes)
    for change in ("epochs=400", "settings.mask_lr=0.5", "validation=5000", "weight_decay=0.1"):  # of other questions
        write(results / "compare-resnet20", ours.with_settings([change]), 0.1)
    queue = tmp_path / "benchmarks" / "gpu_queue.toml"
    queue.parent.mkdir()
    queue.write_text(
        '[[run]]\nname = "paper-resnet110"\ncommand = "python -m gossamer.lab.reproduce resnet110"\nminutes = 45\n'
        '[[run]]\nname = "default-wrn28-10"\ncommand = "sweep --set sparsity=0.51,0.91"\nminutes = 20\n'
    )
    rows = paper_cells.rows(tmp_path)
    found = row_of(rows, "ResNet-20", 0.95)
    assert (found["paper"], found["paper_settings"], found["ours"]) == (90.08, 90.0, 92.0)
    assert (found["seeds"], found["epochs"]) == (1, 240)
    assert (found["seeds_paper_settings"], found["epochs_paper_settings"]) == (2, 370)
    assert (found["flops_reduction_paper_settings"], found["flops_reduction"]) == (0.9, 0.8)
    assert (found["state"], found["gpu_minutes"]) == ("measured", 3.0)
    assert row_of(rows, "ResNet-20", 0.95, normalised=False)["paper_settings"] == 50.0
    assert row_of(rows, "ResNet-20", 0.7)["paper_settings"] == 60.0
    waiting = row_of(rows, "ResNet-110", 0.9)
    assert "about 45 GPU minutes, in the queue as `paper-resnet110`" in waiting["state"]
    assert waiting["paper_settings"] is None
    queued = "our defaults: not run yet, about 20 GPU minutes, in the queue as `default-wrn28-10`"
    assert queued in row_of(rows, "WRN-28-10", 0.91)["state"]
    for sparsity in (0.0, 0.2):  # which the command does not train
        assert "our defaults: not run yet, not in the queue" in row_of(rows, "WRN-28-10", sparsity)["state"]
    assert "| ResNet-20 | 95 % | 90.08 | 90.00 | -0.08 | 92.00 | +1.92 | 2 / 1 | 370 / 240 |" in paper_cells.section(
        tmp_path
    )


def test_runs_that_are_trained_alone_fill_the_rows_of_the_language_model(tmp_path: Path) -> None:
    """Their records are results of `gossamer train`, as NAME.json."""
    of_a_batch = ("accuracy", "validation_accuracy", "train_loss", "diverged")
    for kind, recipe, perplexity in (("paper", "wikitext2-lstm-paper", 92.5), ("default", "wikitext2-lstm", 90.25)):
        run = find(recipe).run.with_settings(["sparsity=0.813"])
        folder = tmp_path / "results" / f"{kind}-wikitext2-lstm"
        write(folder, run, 0.0, mode="float32", perplexity=perplexity)
        (path,) = folder.glob("*.json")
        record = {name: value for name, value in json.loads(path.read_text()).items() if name not in of_a_batch}
        path.unlink()
        (folder / f"{kind}-wikitext2-lstm-0.813.json").write_text(json.dumps(record))
    found = row_of(paper_cells.rows(tmp_path), "LSTM WikiText-2", 0.813)
    assert (found["paper"], found["paper_settings"], found["ours"]) == (83.16, 92.5, 90.25)
    assert found["state"] == "its settings but for λ1, which is solved for"
    rivals = find("wikitext2-lstm").run.with_settings(["sparsity=0.947", "method=narang"])
    write(tmp_path / "results" / "rivals-wikitext2-lstm", rivals, 0.0, perplexity=95.0)
    shown = figures(tmp_path / "results")
    assert "| gossamer (learned masks) | 81.3 % | 90.25 |" in shown
    assert "94.7 % | 95.00 |" in shown


def test_every_number_of_the_paper_has_a_row(tmp_path: Path) -> None:
    rows = paper_cells.rows(tmp_path)
    assert {row["network"] for row in rows} == {
        "Fully connected DenseNet MNIST",
        "ResNet-20",
        "ResNet-110",
        "VGG-16",
        "DenseNet-40",
        "DenseNet-BC-100",
        "WRN-28-10",
        "WRN-28-10 CIFAR-100",
        "LSTM WikiText-2",
        "VGG-16 ImageNet",
    }
    assert all(row["paper"] is not None and row["ours"] is None and row["paper_settings"] is None for row in rows)
    assert row_of(rows, "LSTM WikiText-2", 0.813)["paper"] == 83.16
    assert row_of(rows, "DenseNet-40", 0.71)["flops_reduction_paper"] == 0.70
    assert row_of(rows, "ResNet-110", 0.95, estimator="softplus")["paper"] == 93.44
    assert len(rows) == 50


def test_flops_are_counted_from_the_nonzeros_where_a_record_has_none() -> None:
    run = find("cifar10-resnet20").run
    _, sizes = paper_cells._costs("resnet20", "cifar10", 10)
    record = {"config": run.to_dict(), "nonzeros_by_tensor": [size // 2 for size in sizes]}
    assert paper_cells._flops_reduction(record) == pytest.approx(0.5)
    record["nonzeros_by_tensor"] = [0, *sizes[1:]]
    # The first convolution: 432 weights at 32 × 32 places.
    assert paper_cells._flops_reduction(record) == pytest.approx(432 * 1024 / 40_551_040, rel=0.01)
