import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from gossamer.lab.training.optimise import (
    Plateau,
    learning_rate,
    make_optimizer,
    out_of_reach,
    plan_without_masks,
    weight_decay,
)
from gossamer.lab.training.run import Run
from gossamer.schedule import Plan

PLAN = Plan(warmup=10, sparsify=6, stabilise=4, finetune=20)


def rates(run: Run) -> list[float]:
    return [learning_rate(run, PLAN, step, total_steps=40, steps_per_epoch=10) for step in range(40)]


def test_constant_and_cosine() -> None:
    assert rates(Run(schedule="constant", lr=0.3)) == [0.3] * 40
    expected = [0.3 * math.cos(math.pi * step / 80) ** 2 for step in range(40)]
    assert rates(Run(schedule="cosine", lr=0.3)) == pytest.approx(expected)


def test_steps_drop_at_their_moments() -> None:
    run = Run(schedule="steps", lr=1.0, lr_drops=("1ep", "0.75run"), lr_factor=0.5)
    assert rates(run) == [1.0] * 10 + [0.5] * 20 + [0.25] * 10


def test_phases_are_those_of_the_paper() -> None:
    assert rates(Run(schedule="phases", lr=1.0)) == pytest.approx([1.0] * 16 + [0.1] * 14 + [0.01] * 10)


def test_phases_cosine_comes_down_inside_the_mask_phases() -> None:
    found = rates(Run(schedule="phases_cosine", lr=1.0))
    assert found[:11] == [1.0] * 11
    assert found[15] == pytest.approx(0.1 + 0.9 / 2)
    assert all(later < earlier for earlier, later in pairwise(found[10:20]))
    assert found[20:] == pytest.approx([0.1] * 10 + [0.01] * 10)


@pytest.mark.parametrize("again", [None, 0.05])
def test_restart_finishes_the_warm_up_and_begins_anew(again: float | None) -> None:
    run = Run(method="scl", sparsity=0.5, schedule="restart", lr=0.2, lr_restart=again)
    peak = 0.2 if again is None else again
    expected = [0.2 * math.cos(math.pi * step / 20) ** 2 for step in range(10)]
    expected += [peak * math.cos(math.pi * step / 60) ** 2 for step in range(30)]
    assert rates(run) == pytest.approx(expected)


def test_the_learning_rate_rises_in_equal_steps() -> None:
    run = Run(schedule="constant", lr=1.0, lr_warmup="4it")
    assert rates(run)[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_a_dense_run_is_not_refused_for_phases_of_masks_that_it_has_not() -> None:
    phases = {"warmup": "80ep", "sparsify": "90ep", "stabilise": "26ep"}
    run = Run(schedule="phases_cosine", lr=1.0, settings=phases)
    assert plan_without_masks(run, 2600, 10) == Plan(800, 900, 260, 640)
    with pytest.warns(UserWarning, match=r"settings\.warmup=80ep.* take 1960 steps, and the run ends after 1000"):
        plan = plan_without_masks(run, 1000, 10)
    whole = plan_without_masks(run, 2600, 10)
    assert [learning_rate(run, plan, step, total_steps=1000, steps_per_epoch=10) for step in range(1000)] == [
        learning_rate(run, whole, step, total_steps=2600, steps_per_epoch=10) for step in range(1000)
    ]
    assert plan_without_masks(Run(schedule="phases", preset="paper"), 5, 5) == Plan(2, 1, 0, 2)
    assert plan_without_masks(run, 10, 10, leads=False) is not None
    assert plan_without_masks(Run(), 10, 10) is None


def test_what_the_learning_rate_never_comes_to_is_told() -> None:
    run = Run(schedule="steps", lr_drops=("4it", "0.5run", "1ep", "3ep"), lr_warmup="9it")
    assert out_of_reach(run, 20, 10) == [
        "lr_drops=3ep comes after the end of the run, of 20 steps, so the learning rate does not fall then: set it as "
        "a fraction of the run, such as 0.5run"
    ]
    rates = [learning_rate(Run(lr_warmup="2ep"), None, step, total_steps=20, steps_per_epoch=10) for step in range(20)]
    assert max(rates) < 0.1
    assert ["never reaches lr=0.1" in told for told in out_of_reach(Run(lr_warmup="2ep"), 20, 10)] == [True]
    assert out_of_reach(Run(), 1, 1) == []


def test_optimizers_have_the_settings_of_the_run() -> None:
    model = nn.Linear(2, 2)
    sgd = make_optimizer(Run(lr=0.3, momentum=0.8, nesterov=True, weight_decay=0.01), model)
    assert isinstance(sgd, torch.optim.SGD)
    group = sgd.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (0.3, 0.8, True, 0.01)
    adamw = make_optimizer(Run(optimizer="adamw", lr=0.001, weight_decay=0.05), model)
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.param_groups[0]["weight_decay"] == 0.05


def test_weight_decay_goes_with_what_shall_be_left() -> None:
    usual = {"weight_decay": 0.01, "weight_decay_power": 0.5}

    def decays(**request: object) -> list[float]:
        return [weight_decay(Run(**usual, **request), PLAN, step) for step in (0, 9, 10, 39)]  # type: ignore[arg-type]

    assert decays(method="scl", sparsity=0.96) == pytest.approx([0.01, 0.01, 0.002, 0.002])
    assert decays(method="scl", flops=0.25) == pytest.approx([0.01, 0.01, 0.005, 0.005])
    for same in ({"method": "scl", "decay": 0.1}, {"method": "dense"}):  # nobody knows what will be left; all is
        assert decays(**same) == [0.01] * 4
    assert weight_decay(Run(**usual), None, 39) == 0.01  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight_decay_power: expected from 0 to 10, got -1"):
        Run(weight_decay_power=-1.0)


def test_on_a_plateau_the_rate_falls_and_the_best_stays() -> None:
    run = Run(schedule="plateau", lr_factor=0.5)
    state, factors = Plateau(), []
    for perplexity in (100.0, 90.0, 89.99, 95.0, 80.0, 80.0):
        state = state.see(run, "perplexity", perplexity)
        factors.append(state.factor)
    assert factors == [1.0, 1.0, 0.5, 0.25, 0.25, 0.125]  # 89.99 is an improvement of less than 1e-4 of the loss
    worse = Plateau().see(run, "perplexity", 80.0).see(run, "perplexity", 95.0, shrinking=True)
    assert worse.factor == 1.0
    assert worse.see(run, "perplexity", 90.0).factor == 1.0  # better than the network that has just shrunk
    assert worse.see(run, "perplexity", 96.0).factor == 0.5
    assert Plateau().see(run, "accuracy", 0.8).see(run, "accuracy", 0.9).factor == 1.0
    assert Plateau().see(run, "accuracy", 0.8).see(run, "accuracy", 0.7).factor == 0.5
    assert Plateau().see(Run(), "accuracy", 0.8).see(Run(), "accuracy", 0.7) == Plateau()
