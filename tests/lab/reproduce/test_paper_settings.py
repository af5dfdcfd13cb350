"""The paper's tables under its own settings, on a small network and a few images."""

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.lab import data
from gossamer.lab.batched import sweeps
from gossamer.lab.batched.optimizer import BatchedOptimizer
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.recipes import find
from gossamer.lab.recipes.recipe import Published
from gossamer.lab.reproduce import paper_settings
from gossamer.lab.reproduce.__main__ import main
from gossamer.lab.reproduce.paper_settings import Cell, cells, reproduce
from gossamer.lab.short_runs import find_decay, short_run
from gossamer.lab.training.optimise import learning_rate
from gossamer.schedule import Plan, make_plan

CPU = torch.device("cpu")
PHASES = ["settings.warmup=2ep", "settings.sparsify=3ep", "settings.stabilise=2ep"]
SMALL = ["model=digits_cnn", "model_options.width=3", "data=digits", "epochs=9", "batch_size=16", *PHASES]


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.Generator().manual_seed(7)
    pixels = torch.randint(0, 256, (90, 1, 8, 8), generator=numbers, dtype=torch.uint8)
    part = Labelled(pixels, torch.randint(0, 10, (90,), generator=numbers))
    few = ImageSet("digits", part, part, tuple("0123456789"), (0.5,), (0.3,), padding=1, flip=True)
    monkeypatch.setattr(data, "load", lambda name, root=None: few)


def test_the_recipe_follows_the_stages_of_the_paper() -> None:
    run = find("cifar10-resnet20-paper").run
    per_epoch, phases = 782, run.phases
    plan = make_plan(
        run.epochs * per_epoch,
        warmup=phases.warmup,
        sparsify=phases.sparsify,
        stabilise=phases.stabilise,
        steps_per_epoch=per_epoch,
    )
    assert [each // per_epoch for each in (plan.warmup, plan.sparsify, plan.stabilise, plan.finetune)] == [
        150,
        40,
        20,
        160,
    ]

    def rates(plan: Plan) -> list[float]:
        total = run.epochs * per_epoch
        return [
            learning_rate(run, plan, epoch * per_epoch, total_steps=total, steps_per_epoch=per_epoch)
            for epoch in range(run.epochs)
        ]

    assert rates(plan) == pytest.approx([0.1] * 190 + [0.01] * 100 + [0.001] * 80)
    assert rates(plan.leave_sparsify(160 * per_epoch)) == pytest.approx([0.1] * 160 + [0.01] * 115 + [0.001] * 95)
    assert (run.decay, run.leave_at, run.sparsity) == (0.01, 0.94, None)
    options = run.options
    assert (options.scale, options.start, options.mask_decay, options.pruned_grad_scale) == (
        "batch",
        "constant",
        0.0,
        1.0,
    )


def test_the_cells_are_those_of_the_paper() -> None:
    found = cells("cifar10-resnet20-paper")
    assert found[:3] == [Cell(0.5, 0.9261), Cell(0.7, 0.9235), Cell(0.95, 0.9008)]
    assert len(found) == 8
    assert Cell(0.95, 0.9013, "softplus") in found
    assert Cell(0.95, 0.8801, "leaky_relu", normalised=False) in found


def test_a_short_run_is_a_tenth_whose_masks_train_to_the_end() -> None:
    run = short_run(find("cifar10-resnet20-paper").run, 0.02)
    assert (run.epochs, run.decay, run.leave_at) == (37, 0.02, None)
    phases = run.phases
    plan = make_plan(37 * 782, warmup=phases.warmup, sparsify=phases.sparsify, stabilise=phases.stabilise)
    assert plan == Plan(15 * 782, 22 * 782, 0, 0)


def record(decay: float, *trace: float) -> dict[str, Any]:
    return {"config": {"decay": decay}, "sparsity_by_epoch": [*trace]}


def test_a_decay_is_interpolated_between_short_runs() -> None:
    records = [record(0.1, 0.6, 0.8, 0.9, 0.99), record(0.001, 0.2, 0.3, 0.4, 0.5), record(0.01, 0.4, 0.6, 0.7, 0.8)]
    found = find_decay(records, 0.8)
    assert found.decay == pytest.approx(0.01)
    assert found.leave_at == pytest.approx(0.6)
    assert found.reached
    middle = find_decay(records, 0.65)
    assert middle.decay == pytest.approx(math.sqrt(0.001 * 0.01), rel=0.01)
    assert 0.3 < middle.leave_at < 0.65
    # One that all reach at once is left soon; one that none reaches, with the largest λ1.
    assert find_decay(records, 0.15) == replace(found, decay=0.001, leave_at=0.05, reached=False)
    never = find_decay(records[1:], 0.95)
    assert (never.decay, never.leave_at, never.reached) == (0.01, 0.95, False)
    with pytest.raises(ValueError, match="records of short runs"):
        find_decay([], 0.5)


@pytest.mark.usefixtures("images")
def test_short_runs_choose_what_the_whole_runs_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(
        find("cifar10-resnet20-paper"), published=tuple(Published("t", 0.9, sparsity=s) for s in (0.5, 0.8))
    )
    monkeypatch.setattr(paper_settings, "find", lambda name: recipe)
    monkeypatch.setattr(paper_settings, "DECAYS", (0.0, 0.3, 3.0))
    monkeypatch.setattr(paper_settings, "RAW_DECAYS", (1e-4, 1e-3, 1e-2))

    def trained() -> list[dict[str, Any]]:
        return reproduce("any", tmp_path, seeds=2, epochs=4, device=CPU, changes=SMALL)

    records = trained()
    assert [each["paper_sparsity"] for each in records] == [0.5, 0.5, *[0.8] * 7]
    assert len({str(each["config"]["settings"]) for each in records}) == 6
    assert len(list((tmp_path / "short-runs").glob("*.json"))) == 3 * 6
    for each in records:
        config = each["config"]
        assert config["leave_at"] <= each["paper_sparsity"]
        left = each["left_sparsify_at"]
        assert left is None or 10 < left < 25
        assert each["paper_accuracy"]
        assert len(each["sparsity_by_epoch"]) <= 5
    monkeypatch.setattr(sweeps, "train_together", None)  # nothing is trained again
    assert trained() == records


@pytest.mark.usefixtures("images")
def test_the_program_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, waiting = (
        BatchedOptimizer.update_topology,
        [23],
    )  # in the sparsify phase of the whole runs; short ones have 15 steps

    def update_topology(self: BatchedOptimizer, steps: int) -> None:
        if waiting and steps == waiting[0]:
            waiting.pop()
            signal.raise_signal(signal.SIGTERM)
        real(self, steps)

    monkeypatch.setattr(BatchedOptimizer, "update_topology", update_topology)
    options = ["--seeds", "1", "--short-epochs", "3", "--device", "cpu", "--set", *SMALL]

    def run(out: Path) -> int:
        return main(["vgg16", "--out", str(out), *options])

    assert run(tmp_path / "cut") == 130
    assert list((tmp_path / "cut").glob("batch-*.pt"))
    assert run(tmp_path / "cut") == 0
    assert "resumes after step 23" in capsys.readouterr().out
    assert run(tmp_path / "whole") == 0

    def told(folder: Path) -> list[tuple[Any, ...]]:
        read = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        return [(each["run_id"], each["train_loss"], each["left_sparsify_at"], each["sparsity"]) for each in read]

    assert told(tmp_path / "cut") == told(tmp_path / "whole")
    assert "  94.39  " in capsys.readouterr().out


def test_the_program_needs_no_command_line_tools() -> None:
    absent = "import sys; sys.modules.update(tyro=None, matplotlib=None)"
    code = f"{absent}; from gossamer.lab.reproduce.__main__ import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "resnet110" in done.stdout
