"""λ1 by short runs, on made-up runs whose sparsity is known."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gossamer
from gossamer.tune import TunedDecay


def sparsity_of(decay: float) -> float:
    """Grows with log λ1 from 0 to 1; 0.9 comes out at λ1 = 0.09."""
    return decay / (decay + 0.01)


@pytest.mark.parametrize("start", [1e-5, 0.05, 0.1, 30.0])
def test_finds_the_decay_from_wherever_it_starts(start: float) -> None:
    tuned = gossamer.tune_decay(sparsity_of, 0.9, start=start, tolerance=0.001, max_trials=30)
    assert tuned.within_tolerance
    assert tuned.decay == pytest.approx(0.09, rel=0.02)
    assert tuned.sparsity == sparsity_of(tuned.decay)


def test_brackets_from_above_and_halves_in_the_logarithm() -> None:
    tuned = gossamer.tune_decay(sparsity_of, 0.9, start=1.6, factor=4.0, tolerance=1e-9, max_trials=7)
    expected = [1.6, 0.4, 0.1, 0.025]
    low, high = 0.025, 0.1
    while len(expected) < 7:
        expected.append(math.sqrt(low * high))
        low, high = (expected[-1], high) if sparsity_of(expected[-1]) < 0.9 else (low, expected[-1])
    assert [trial.decay for trial in tuned.trials] == pytest.approx(expected)
    assert not tuned.within_tolerance
    best = min(tuned.trials, key=lambda trial: abs(trial.sparsity - 0.9))
    assert (tuned.decay, tuned.sparsity) == (best.decay, best.sparsity)


def test_noise_ends_after_so_many_runs_with_the_best_of_them() -> None:
    noise = random.Random(0)

    def noisy(decay: float) -> float:
        return min(1.0, max(0.0, sparsity_of(decay) + noise.uniform(-0.05, 0.05)))

    tuned = gossamer.tune_decay(noisy, 0.9, tolerance=1e-6, max_trials=9)
    assert len(tuned.trials) == 9
    assert abs(tuned.sparsity - 0.9) == min(abs(trial.sparsity - 0.9) for trial in tuned.trials)


def test_a_sparsity_out_of_reach_is_told() -> None:
    tuned = gossamer.tune_decay(lambda decay: 0.3, 0.9, max_trials=4)
    assert not tuned.within_tolerance
    assert [trial.decay for trial in tuned.trials] == pytest.approx([0.1, 0.4, 1.6, 6.4])


def test_a_tensor_of_one_number_will_do() -> None:
    assert gossamer.tune_decay(lambda decay: torch.tensor(0.5), 0.5) == TunedDecay(
        0.1, 0.5, (gossamer.tune.Trial(0.1, 0.5),), True
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gossamer.tune_decay(sparsity_of, 1.0), "sparsity to be between 0 and 1, got 1.0"),
        (lambda: gossamer.tune_decay(sparsity_of, 0.9, factor=1.0), "factor > 1"),
        (lambda: gossamer.tune_decay(lambda decay: 95.0, 0.9), "a sparsity from 0 to 1, got 95.0 for a decay of 0.1"),
        (lambda: gossamer.tune_decay(lambda decay: math.nan, 0.9), "got nan"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_on_short_runs_of_a_network() -> None:
    def short_run(decay: float) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))
        inputs = torch.randn(64, 12)
        targets = inputs[:, :3]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sparsifier = gossamer.Sparsifier(model, optimizer, decay=decay, total_steps=60)
        for _ in range(60):
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
        sparsifier.finish()
        return gossamer.report(model).sparsity

    tuned = gossamer.tune_decay(short_run, 0.8, start=10.0, tolerance=0.02)
    assert tuned.within_tolerance
    assert abs(short_run(tuned.decay) - 0.8) <= 0.02
