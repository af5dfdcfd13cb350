"""Every method still does, step by step, what it did when its trajectory was frozen."""

import json

import pytest

from goldens.trajectories import CASES, FILE, OPTIMIZERS, trajectory

FROZEN = json.loads(FILE.read_text())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_the_trajectory_is_the_frozen_one(case: str, optimizer: str) -> None:
    found, frozen = trajectory(case, optimizer), FROZEN[f"{case} | {optimizer}"]
    assert found["zeros"] == frozen["zeros"]
    assert found["sizes"] == pytest.approx(frozen["sizes"], rel=1e-8)


def test_every_frozen_trajectory_is_compared() -> None:
    assert set(FROZEN) == {f"{case} | {optimizer}" for case in CASES for optimizer in OPTIMIZERS}
