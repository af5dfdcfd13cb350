"""`metrics()` in the loggers that people use: a flat dict of floats, whatever the phase."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer

STEPS = 20


def logged(log: Any) -> list[float]:
    """Log in each step; what was logged as the sparsity."""
    torch.manual_seed(0)
    model = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with gossamer.Sparsifier(model, optimizer, sparsity=0.8, total_steps=STEPS) as sparsifier:
        for step in range(STEPS):
            model(torch.randn(4, 10)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            log(sparsifier.metrics(), step)
            found.append(sparsifier.metrics()["sparsity"])
    assert (found[0], found[-1]) == (0.0, pytest.approx(0.8))
    return found


def test_tensorboard(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        expected = logged(lambda metrics, step: [writer.add_scalar(name, metrics[name], step) for name in metrics])
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.value for event in events.Scalars("sparsity")] == pytest.approx(expected)


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        expected = logged(lambda metrics, step: mlflow.log_metrics(metrics, step=step))
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "sparsity")
    assert [each.value for each in history] == pytest.approx(expected)


def test_wandb(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True)) as run:
        expected = logged(lambda metrics, step: run.log(metrics, step=step))
        assert run.summary["sparsity"] == pytest.approx(expected[-1])
