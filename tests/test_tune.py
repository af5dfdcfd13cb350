"""λ1 by short runs."""

import math

import pytest

import gossamer


def test_finds_the_decay_of_a_known_curve_from_above() -> None:
    asked: list[float] = []

    def short_run(decay: float) -> float:
        asked.append(decay)
        return 1 - math.exp(-40 * decay)

    tuned = gossamer.tune_decay(short_run, 0.9, start=1.0, tolerance=0.001)
    assert tuned.within_tolerance
    assert tuned.decay == pytest.approx(math.log(10) / 40, rel=0.02)
    assert tuned.sparsity == pytest.approx(0.9, abs=0.001)
    assert [trial.decay for trial in tuned.trials] == asked
    assert asked[0] == 1.0
    assert asked[1] < asked[0]


def test_goes_up_where_the_start_is_too_small() -> None:
    tuned = gossamer.tune_decay(lambda decay: min(1.0, decay), 0.5, start=0.001, factor=10.0, tolerance=0.02)
    assert tuned.within_tolerance
    assert tuned.sparsity == pytest.approx(0.5, abs=0.02)


def test_says_when_the_target_was_not_reached() -> None:
    tuned = gossamer.tune_decay(lambda decay: 0.3, 0.9, max_trials=4)
    assert not tuned.within_tolerance
    assert tuned.sparsity == 0.3
    assert len(tuned.trials) == 4


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="share between 0 and 1, got 95"):
        gossamer.tune_decay(lambda decay: 0.5, 95)
    with pytest.raises(ValueError, match="expected start > 0"):
        gossamer.tune_decay(lambda decay: 0.5, 0.5, start=0.0)
    with pytest.raises(ValueError, match="expected short_run to return a sparsity from 0 to 1, got 50"):
        gossamer.tune_decay(lambda decay: 50.0, 0.5)
