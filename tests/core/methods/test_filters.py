"""Methods that remove whole filters, against their own definitions."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.lab.models.resnet import ResNet
from gossamer.methods import Layout, Rule
from gossamer.methods.filters import equal_share
from gossamer.methods.slimming import channels_to_keep, gains_of
from gossamer.schedule import Plan
from methods.toy import begin, gradient_like, shown, step

FILTERS = Layout(("a", "b", "c"), ((8, 2, 3), (4, 8, 1), (2, 8)), (slice(0, 8), slice(10, 14), None))  # 48 + 32 + 16


def rows(mask: torch.Tensor) -> list[list[bool]]:
    """Which filters of the two convolutions stay; every filter is whole."""
    a, b, rest = mask[0, :48].view(8, 6), mask[0, 48:80].view(4, 8), mask[0, 80:]
    assert bool(rest.all())
    for part in (a, b):
        assert torch.equal(part.any(1), part.all(1))
    return [part.all(1).tolist() for part in (a, b)]


def test_equal_shares_come_as_near_as_whole_filters_can() -> None:
    assert equal_share(FILTERS, 40 / 96) == [4, 2, 2]
    assert equal_share(FILTERS, 0.0) == [8, 4, 2]
    with pytest.raises(ValueError, match=r"sparsity=0.9 cannot be met by whole filters.*at most 0\.6875"):
        equal_share(FILTERS, 0.9)


@pytest.mark.parametrize(("share", "paper"), [(0.1, 0.241), (0.2, 0.214), (0.3, 0.188)])
def test_filters_are_counted_as_in_the_paper(share: float, paper: float) -> None:
    """Its table of ResNet-20: millions of weights that are left when that share of the filters goes."""
    shapes = tuple(tuple(each.shape) for each in ResNet(20).parameters() if each.dim() > 1)
    layout = Layout(tuple(map(str, range(len(shapes)))), shapes)
    kept = equal_share(layout, share)
    weights = sum(count * size // shape[0] for count, shape, size in zip(kept, shapes, layout.sizes, strict=True))
    assert weights / 1e6 == pytest.approx(paper, abs=0.0025)
    filters = [(count, shape[0]) for count, shape in zip(kept, shapes, strict=True) if len(shape) > 2]
    assert 1 - sum(count for count, _ in filters) / sum(all_ for _, all_ in filters) == pytest.approx(share, abs=0.01)


def test_l1_takes_the_filters_with_the_smallest_sum() -> None:
    rule, weights, timeline = begin("l1_filter", 40 / 96, layout=FILTERS)
    sums = [np.abs(part).sum(1) for part in (weights[0, :48].view(8, 6).numpy(), weights[0, 48:80].view(4, 8).numpy())]
    expected = [(each >= np.sort(each)[len(each) // 2]).tolist() for each in sums]
    assert rows(rule.mask) == expected
    rule.settle_(weights)
    _, gradient = step(rule, weights, timeline, 0)
    assert (gradient[~rule.mask] == 0).all()
    assert (weights[~rule.mask] == 0).all()
    assert rows(rule.freeze_(weights)) == expected


def test_soft_filters_are_zeroed_after_an_epoch_and_train_on() -> None:
    rule, weights, timeline = begin("soft_filter", 40 / 96, layout=FILTERS, plan=Plan(0, 20, 4, 4))

    def by_norm(values: torch.Tensor) -> list[list[bool]]:
        sizes = [part.norm(dim=1).numpy() for part in (values[0, :48].view(8, 6), values[0, 48:80].view(4, 8))]
        return [(each >= np.sort(each)[len(each) // 2]).tolist() for each in sizes]

    step(rule, weights, timeline, 0)
    moved = weights.clone()
    given = gradient_like(weights, 1)
    limited = given.clone()
    parts = (limited[0, :48].view(8, 6), limited[0, 48:80].view(4, 8))
    for part, kept in zip(parts, rows(rule.mask), strict=True):
        norms = [float(each.norm()) for each in part]
        usual = np.mean([norm for norm, stays in zip(norms, kept, strict=True) if stays])
        for number, stays in enumerate(kept):
            part[number] *= 1.0 if stays else min(1.0, usual / norms[number])
    assert not torch.equal(limited, given)
    moved -= 0.1 * limited
    _, gradient = step(rule, weights, timeline, 1)  # the second step of an epoch of two
    torch.testing.assert_close(gradient, limited)
    assert rows(rule.mask) == by_norm(moved)
    torch.testing.assert_close(weights, moved * rule.mask)
    step(rule, weights, timeline, 2)
    assert bool((weights[~rule.mask] != 0).all())
    assert torch.equal(shown(rule, weights), weights)
    for number in range(3, 19):
        step(rule, weights, timeline, number)
    soft = weights - 0.1 * limited_by(rule, weights, 19)
    forgotten = rule.refresh_(soft.clone(), 20)
    assert forgotten is not None
    assert torch.equal(forgotten, ~rule.mask)
    chosen = rule.mask.clone()
    assert rows(chosen) == by_norm(soft)  # from here on the choice stands
    _, gradient = step(rule, weights, timeline, 20)
    assert (gradient[~chosen] == 0).all()
    assert (weights[~chosen] == 0).all()
    assert torch.equal(rule.freeze_(weights), chosen)


def limited_by(rule: Rule[Any], weights: torch.Tensor, number: int) -> torch.Tensor:
    gradient = gradient_like(weights, number)
    rule.learn_(gradient, weights)
    return gradient


def test_slimming_presses_on_gains_and_cuts_by_them() -> None:
    rule, weights, timeline = begin("slimming", 40 / 96, layout=FILTERS, penalty=0.5)
    others = torch.zeros(1, 16, dtype=torch.float64)
    others[0, :8] = torch.tensor([0.9, -0.1, 0.2, 0.8, 0.7, 0.6, -0.95, 0.5])
    others[0, 10:14] = torch.tensor([0.15, 0.25, 2.0, 2.0])
    for number in range(11):
        gradient = torch.ones_like(others)
        rule.penalise_(gradient, others)
        inside = torch.zeros(16, dtype=torch.bool)
        inside[:8] = inside[10:14] = True
        pressed = 1.0 + 0.5 * others.sign() * inside if number < 10 else torch.ones_like(others)
        torch.testing.assert_close(gradient, pressed)
        step(rule, weights, timeline, number)
        assert bool(rule.mask.all()) is (number < 9)
    # In the order of |γ|: a1 (6), b0 (8), a2 (6), b1 (8), a7 (6), a5 (6): 40 weights.
    assert rows(rule.mask) == [[True, False, False, True, True, False, True, False], [False, False, True, True]]
    assert (weights[~rule.mask] == 0).all()


def test_at_least_one_channel_stays() -> None:
    kept = channels_to_keep(FILTERS, [0, 1], [0.0] * 8 + [1.0] * 4, 66)
    assert [sum(each) for each in kept] == [1, 1]
    with pytest.raises(ValueError, match="slimming needs a batch norm behind every convolution, got none behind a"):
        begin("slimming", 0.2, layout=Layout(("a",), ((4, 3, 2),), (None,)))


def test_gains_are_found_behind_their_convolutions() -> None:
    model = ResNet(8, 10)
    weights = [name for name, each in model.named_parameters() if each.dim() > 1]
    others = [(name, each.numel()) for name, each in model.named_parameters() if each.dim() == 1]
    flat = torch.cat([each.detach().flatten() for each in model.parameters() if each.dim() == 1])
    flat[:] = torch.arange(len(flat))
    places = gains_of(model, weights, others)
    assert places[-1] is None  # the last layer is linear
    offsets = np.cumsum([0, *(size for _, size in others)])
    for name, place in zip(weights[:-1], places[:-1], strict=True):
        assert place is not None
        behind = name.replace("conv", "bn") if "conv" in name else None
        if behind is not None:
            number = [other for other, _ in others].index(behind)
            assert (place.start, place.stop) == (offsets[number], offsets[number + 1])
    assert gains_of(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), ["0.weight"], [("1.weight", 3)]) == (None,)
