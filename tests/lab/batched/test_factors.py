"""The design in which many settings are tried at once: even, clear of pairs, and effects that come back."""

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gossamer.lab.batched import Race
from gossamer.lab.batched.entries import lanes_of

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def factors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("factors")


def test_no_setting_is_blurred_by_another_or_by_a_pair(factors: ModuleType) -> None:
    columns = factors.design(23)
    assert (columns.T @ columns == 48 * np.eye(23)).all()
    for one in range(23):
        for other in range(one):
            assert not (columns.T @ (columns[:, one] * columns[:, other])).any()


def test_runs_are_what_their_row_says(factors: ModuleType) -> None:
    planned = factors.members()
    assert len({member for _, member in planned}) == 48
    names = [factor.name for factor in factors.FACTORS]
    for row, member in planned:
        level = dict(zip(names, row[1:], strict=True))
        told = member.to_dict()
        assert told["sparsity"] == (0.97 if row[0] > 0 else 0.9)
        assert (told.get("distil") == 0.5) == (level["learns from the dense run"] > 0)
        assert (told["weight_decay"] == 5e-4) == (level["weight decay 5e-4 instead of 1e-4"] > 0)
        (lane,) = lanes_of(Race(12, 18, 8, 12), [member], steps_per_epoch=10)
        assert lane.plan is not None
        assert lane.plan.warmup == (60 if level["half the warm-up"] > 0 else 120)
        assert lane.plan.warmup + lane.plan.sparsify == 300  # the target is met at the same time
        assert (lane.plan.finetune == 0) == (level["masks learn to the end"] > 0)


def test_effects_come_back_with_an_honest_error(factors: ModuleType) -> None:
    planned, noise = factors.members(), np.random.default_rng(0)
    rows, seeds = [row for row, _ in planned], [member.seed for _, member in planned]
    true = noise.normal(size=len(rows[0]))
    values = np.array(rows) @ true / 2 + 3.0 * np.array(seeds) + noise.normal(scale=0.3, size=48)
    found = factors.effects(rows, seeds, values)
    for (effect, error), wanted in zip(found, true, strict=True):
        assert abs(effect - wanted) < 4 * error
        assert error == pytest.approx(0.3 / np.sqrt(12), rel=0.3)


def test_the_table_has_the_best_setting_first(factors: ModuleType) -> None:
    planned = factors.members()
    place = [factor.name for factor in factors.FACTORS].index("hysteresis") + 1
    records = [
        {
            "seed": member.seed,
            "validation_accuracy": 88.5 + row[place],
            "of_the_last_weights": {"validation_accuracy": 88.0 + row[place]},
            "train_loss": 0.3 - 0.01 * row[place],
        }
        for row, member in planned
    ]
    lines = factors.tell([row for row, _ in planned], records)
    assert lines[0] == "averaged weights over the last ones: +0.50 ± 0.00"
    assert lines[2].startswith("hysteresis ")
    assert "+2.00 ± 0.00  +2.00 ± 0.00  -0.0200 ± 0.0000" in lines[2]
