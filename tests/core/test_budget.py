"""The exact budget: both ways of finding the threshold against the NumPy reference, which sorts."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import scl
from torch import Tensor

from gossamer import budget
from gossamer.budget import Costs, Met, meet_budgets_

CPU = torch.device("cpu")
# Few distinct values make ties; the wide range makes every digit of the keys matter.
VALUES = st.one_of(
    st.integers(-3, 3).map(float),
    st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    st.floats(-1.0, 1.0, width=32, allow_subnormal=False),
)


def by_digits(values: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    mask = torch.zeros(values.numel(), dtype=torch.bool)
    budget._lower_rows_by_digits_(values[None], mask[None], torch.tensor([keep]), None, None)
    return values, mask


def by_bracket(values: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    mask = torch.zeros(values.numel(), dtype=torch.bool)
    budget._lower_by_bracket_(values, mask, keep)
    return values, mask


WAYS = pytest.mark.parametrize("way", [by_digits, by_bracket])


def meet_budget_(
    values: Tensor,
    mask: Tensor,
    keep: Tensor,
    *,
    protected: Tensor | None = None,
    costs: Costs | None = None,
    reach: float = 0.0,
) -> Met:
    """Meet the budget of one network, given as vectors."""
    places = None if protected is None else protected[None]
    found = meet_budgets_(values[None], mask[None], keep.reshape(1), places, costs=costs, reach=[reach])
    return Met(found.threshold[0], found.flips[0])


@given(st.lists(st.integers(-40, 40), min_size=1, max_size=300), st.floats(0, 1), st.floats(0, 30), st.integers(0, 3))
def test_what_thresholds_were_before_does_not_matter(
    integers: list[int], share: float, reach: float, repeats: int
) -> None:
    """Few or many values within reach, the threshold among them or not."""
    values = torch.tensor(integers, dtype=torch.float32).repeat(8**repeats) / 8
    keep = torch.tensor(round(share * len(values)))
    outcomes = []
    for told in (0.0, reach):
        lowered, mask = values.clone(), torch.ones(len(values), dtype=torch.bool)
        met = meet_budget_(lowered, mask, keep, reach=told)
        outcomes.append((lowered, mask, *met))
    for without, known in zip(*outcomes, strict=True):
        assert torch.equal(without, known)


@WAYS
@given(values=st.lists(VALUES, min_size=1, max_size=60), data=st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_sorting(way, dtype: torch.dtype, values: list[float], data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    keep = data.draw(st.integers(0, len(values)))
    lowered, mask = way(torch.tensor(values, dtype=dtype), keep)
    array = np.array(values, dtype=np.float64 if dtype == torch.float64 else np.float32)
    expected = scl.exact_budget((array,), costs=(1,), budget=keep)
    assert mask.sum() == keep
    assert mask.tolist() == (expected.mask_variables[0] > 0).tolist()
    assert ((lowered > 0) == mask).all()
    torch.testing.assert_close(lowered, torch.from_numpy(expected.mask_variables[0]), rtol=1e-6, atol=1e-30)


@given(values=st.lists(VALUES, min_size=1, max_size=60), data=st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("kind", ["bracket", "costs"])
def test_counts_the_masks_that_changed(kind: str, values: list[float], data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, len(values)))
    before = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    mask = before.clone()
    costs = Costs.of([len(values)], [1], CPU) if kind == "costs" else None
    met = meet_budget_(torch.tensor(values), mask, torch.tensor(keep), costs=costs)
    assert int(met.flips) == sum(a != b for a, b in zip(before.tolist(), mask.tolist(), strict=True))


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    data=st.data(),
    seed=st.integers(0, 10_000),
    rounded=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_costs_agree_with_the_reference(sizes: list[int], data: st.DataObject, seed: int, rounded: bool) -> None:
    costs = [data.draw(st.sampled_from([0, 1, 2, 7, 49])) for _ in sizes]
    total = sum(s * c for s, c in zip(sizes, costs, strict=True))
    allowed = data.draw(st.integers(0, total))
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    if rounded:
        arrays = [np.round(array).astype(np.float32) for array in arrays]
    expected = scl.exact_budget(tuple(arrays), costs=tuple(costs), budget=allowed)
    values = torch.from_numpy(np.concatenate(arrays))
    mask = torch.zeros(values.numel(), dtype=torch.bool)
    meet_budget_(values, mask, torch.tensor(allowed), costs=Costs.of(sizes, costs, CPU))
    assert mask.tolist() == (np.concatenate(expected.mask_variables) > 0).tolist()
    spent = sum(int(part.sum()) * cost for part, cost in zip(mask.split(sizes), costs, strict=True))
    assert spent <= allowed
    assert ((values > 0) == mask).all()


@pytest.mark.parametrize("with_costs", [False, True])
def test_protected_connections_are_kept_and_counted(with_costs: bool) -> None:
    values = torch.tensor([5.0, 4.0, 3.0, -9.0, -8.0])
    mask = torch.zeros(5, dtype=torch.bool)
    costs = Costs.of([5], [1], CPU) if with_costs else None
    threshold, _ = meet_budget_(values, mask, torch.tensor(3), protected=torch.tensor([3]), costs=costs)
    assert mask.tolist() == [True, True, False, True, False]
    assert float(threshold) == 3.0
    assert ((values > 0) == mask).all()


ODD = st.one_of(VALUES, st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40]))


@given(values=st.lists(ODD, min_size=1, max_size=60), data=st.data())
@settings(max_examples=300, deadline=None)
def test_counts_are_exact_for_any_values_even_nan(values: list[float], data: st.DataObject) -> None:
    """In this step and in the next, whatever is left in the mask variables."""
    lowered, mask = torch.tensor(values), torch.ones(len(values), dtype=torch.bool)
    reach = data.draw(st.sampled_from([0.0, 0.1, np.inf, np.nan]))
    for _ in range(2):
        keep = data.draw(st.integers(0, len(values)))
        meet_budget_(lowered, mask, torch.tensor(keep), reach=reach)
        assert int(mask.sum()) == keep


@WAYS
@pytest.mark.parametrize(("count", "keep"), [(1, 0), (1, 1), (1000, 0), (1000, 1000), (1000, 37)])
def test_all_equal_values_are_kept_in_order(way, count: int, keep: int) -> None:  # type: ignore[no-untyped-def]
    _, mask = way(torch.full((count,), 0.25), keep)
    assert mask.tolist() == [index < keep for index in range(count)]


def test_the_sample_brackets_a_large_vector() -> None:
    values = torch.randn(3_000_000, generator=torch.Generator().manual_seed(1))
    keep = 150_000
    low, high = budget._bracket(values.numpy(), keep)
    exact = float(values.kthvalue(values.numel() - keep).values)
    assert low < exact <= high
    assert ((values > low) & (values <= high)).sum() < 0.05 * values.numel()
    _, mask = by_bracket(values.clone(), keep)
    assert mask.sum() == keep
    assert (mask == (values > exact)).all()


def test_a_matrix_with_different_columns_is_bracketed_by_few_values() -> None:
    """A sample of every n-th value would only see some of its columns."""
    generator = torch.Generator().manual_seed(2)
    matrix = torch.randn(4096, 1024, generator=generator) * torch.linspace(0.01, 1, 1024)
    values = matrix.flatten()
    keep = values.numel() // 10
    low, high = budget._bracket(values.numpy(), keep)
    assert ((values > low) & (values <= high)).sum() < 0.05 * values.numel()
    exact = values.kthvalue(values.numel() - keep).values
    assert low < exact <= high


@given(st.integers(0, 5000), st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_strongest_of_a_large_tensor_are_those_of_topk(count: int, ties: bool) -> None:
    values = torch.rand(2, budget._LARGE + 3, generator=torch.Generator().manual_seed(count))
    values = (values * 1000).floor() if ties else values
    found = budget.strongest(values, count)
    assert found.shape == (2, count)
    for row, places, expected in zip(values, found, values.topk(count, dim=1).values, strict=True):
        assert len(set(places.tolist())) == count
        assert torch.equal(row[places].sort(descending=True).values, expected)


def test_a_misleading_sample_costs_time_but_not_exactness() -> None:
    values = torch.zeros(2_000_000)
    values[1::2] += torch.linspace(0, 1, values[1::2].numel())
    values[torch.from_numpy(budget._sample(values.numel(), budget._SAMPLE))] = 1000.0
    keep = 900_000
    expected = torch.zeros(values.numel(), dtype=torch.bool)
    expected[values.sort(descending=True, stable=True).indices[:keep]] = True
    _, mask = by_bracket(values.clone(), keep)
    assert mask.sum() == keep
    assert (mask == expected).all()


def test_hundred_million_connections_in_bounded_memory() -> None:
    """Beside the values and the masks the solver needs only what lies in the bracket: about a percent."""
    count, keep = 100_000_000, 5_000_000
    values = torch.randn(count)
    mask = torch.ones(count, dtype=torch.bool)
    before = _peak_resident_bytes(lambda: None)
    peak = _peak_resident_bytes(lambda: meet_budget_(values, mask, torch.tensor(keep)))
    assert mask.count_nonzero() == keep
    assert peak - before < 60e6  # the bracket, its copies and the sample; the values themselves are 400 MB


def _peak_resident_bytes(work) -> int:  # type: ignore[no-untyped-def]
    """The most memory the process holds while `work` runs, looked at every millisecond."""
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while True:
            with open("/proc/self/statm") as file:
                most = max(most, int(file.read().split()[1]) * 4096)
            if done.wait(0.001):
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return most


def test_rows_one_by_one_and_all_at_once_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    first = torch.randn(5, 20_000, generator=torch.Generator().manual_seed(1))
    first[:, :40] = 0.25  # ties
    first[2, 7] = torch.inf  # as what the floor protects
    first[1, 8_030:] = first[4, 300:] = -torch.inf  # as what is gone for good
    budgets = torch.tensor([20, 8_030, 19_999, 20_000, 310])
    results = []
    for one_by_one in (True, False):
        monkeypatch.setattr(budget, "on_cpu", lambda matrix, answer=one_by_one: answer)
        values, mask = first.clone(), torch.ones_like(first, dtype=torch.bool)
        met = budget.meet_budgets_(values, mask, budgets)
        assert mask.sum(1).tolist() == budgets.tolist()
        assert torch.equal(values > 0, mask)
        assert torch.equal(mask[[1, 4]], torch.arange(20_000) < torch.tensor([[8_030], [310]]))
        assert values[1, :8_030].isfinite().all()
        results.append((values, mask, *met))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
