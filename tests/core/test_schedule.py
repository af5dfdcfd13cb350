"""Phases and durations."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gossamer.schedule import Phase, Plan, cubic_budget, make_plan, sparse_weight_decay, steps_of


@pytest.mark.parametrize(
    ("duration", "steps"), [("150ep", 15_000), ("2000it", 2000), ("0.3run", 3000), ("1.5ep", 150), (".5run", 5000)]
)
def test_durations_carry_units(duration: str, steps: int) -> None:
    assert steps_of(duration, total_steps=10_000, steps_per_epoch=100) == steps


@pytest.mark.parametrize("duration", ["150", "ep", "1.5it", "2run", "-1ep", "10 epochs"])
def test_a_bad_duration_says_what_is_expected(duration: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        steps_of(duration, total_steps=10_000, steps_per_epoch=100)


@pytest.mark.parametrize("number", [10, 0.3])
def test_a_number_without_unit_says_what_is_expected(number: Any) -> None:
    with pytest.raises(ValueError, match=f"duration with its unit.*got {number}"):
        make_plan(100, warmup=number, sparsify="0.3run", stabilise="0.1run")


def test_epochs_need_their_length() -> None:
    with pytest.raises(ValueError, match="steps_per_epoch=len\\(loader\\)"):
        steps_of("3ep", total_steps=100, steps_per_epoch=None)


def test_phases_follow_each_other() -> None:
    plan = make_plan(100, warmup="20it", sparsify="0.3run", stabilise="10it")
    assert plan == Plan(20, 30, 10, 40)
    phases = [plan.at(step).phase for step in range(120)]
    assert phases == ([Phase.WARMUP] * 20 + [Phase.SPARSIFY] * 30 + [Phase.STABILISE] * 10 + [Phase.FINETUNE] * 60)
    assert plan.at(49).ramp == 1.0
    assert plan.at(48).ramp < 1.0
    assert plan.at(20).settling == 0.0
    assert plan.at(59).settling < 1.0


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 50), st.integers(0, 50))
def test_ramp_and_settling_never_go_back(warmup: int, sparsify: int, stabilise: int, finetune: int) -> None:
    moments = [Plan(warmup, sparsify, stabilise, finetune).at(step) for step in range(200)]
    for before, after in pairwise(moments):
        assert before.ramp <= after.ramp <= 1
        assert before.settling <= after.settling <= 1


def test_phases_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="take 110 steps, but the run has only 100"):
        make_plan(100, warmup="50it", sparsify="50it", stabilise="10it")
    with pytest.raises(ValueError, match="sparsify phase of at least one step"):
        make_plan(100, warmup="50it", sparsify="0it", stabilise="10it")
    for total in (0, 40.5):
        with pytest.raises(ValueError, match=f"whole number of total_steps of at least 1 .* got {total}"):
            make_plan(total, warmup="50it", sparsify="0it", stabilise="10it")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps_per_epoch of at least 1"):
        make_plan(100, warmup="1ep", sparsify="50it", stabilise="10it", steps_per_epoch=0)
    with pytest.raises(ValueError, match="take 101 steps, but the run has only 100"):
        make_plan(100, warmup="0.5run", sparsify="50it", stabilise="1it")


@given(st.integers(4, 300), st.integers(1, 98), st.data())
def test_shares_that_make_up_the_run_fit_whatever_its_length(total: int, first: int, data: st.DataObject) -> None:
    """Each share is rounded to whole steps, and together they may round up past the end."""
    second = data.draw(st.integers(1, 99 - first))
    shares = [first / 100, second / 100, (100 - first - second) / 100]
    assume(shares[1] * total >= 1)
    plan = make_plan(total, warmup=f"{shares[0]}run", sparsify=f"{shares[1]}run", stabilise=f"{shares[2]}run")
    assert plan.total == total
    for length, share in zip((plan.warmup, plan.sparsify, plan.stabilise), shares, strict=True):
        assert abs(length - share * total) <= 1.5


def test_leaving_early_lengthens_fine_tuning() -> None:
    plan = Plan(20, 30, 10, 40).leave_sparsify(33)
    assert plan == Plan(20, 13, 10, 57)
    assert plan.at(33).phase is Phase.STABILISE


def test_budget_ramp_ends_exactly_at_the_target() -> None:
    budgets = [cubic_budget(step / 100, 1000, 50) for step in range(101)]
    assert budgets[0] == 1000
    assert budgets[-1] == 50
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[50] == 50 + round(950 / 8)


def test_weight_decay_falls_with_what_is_left() -> None:
    assert sparse_weight_decay(0.01, density=0.25, power=0.5) == pytest.approx(0.005)
    assert sparse_weight_decay(0.01, density=0.25, power=2.0) == pytest.approx(0.01 / 16)
    assert (
        sparse_weight_decay(0.01, density=0.25, power=0.0) == sparse_weight_decay(0.01, density=1.0, power=2.0) == 0.01
    )
