"""Methods that prune whole filters, against their own definitions."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.lab.models.resnet import ResNet
from gossamer.methods import Layout, Method
from gossamer.methods.filters import equal_share
from gossamer.methods.slimming import channels_to_keep, gains_of
from gossamer.schedule import Plan
from methods.toy import begin, forward_weights, gradient_like, step, update

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
    method, weights, timeline = begin("l1_filter", 40 / 96, layout=FILTERS)
    sums = [np.abs(part).sum(1) for part in (weights[0, :48].view(8, 6).numpy(), weights[0, 48:80].view(4, 8).numpy())]
    expected = [(each >= np.sort(each)[len(each) // 2]).tolist() for each in sums]
    assert rows(method.mask) == expected
    method.project(weights)
    _, gradient = step(method, weights, timeline, 0, FILTERS)
    assert (gradient[~method.mask] == 0).all()
    assert (weights[~method.mask] == 0).all()
    assert rows(method.finalize(weights)) == expected


def test_soft_filters_are_zeroed_after_an_epoch_and_train_on() -> None:
    method, weights, timeline = begin("soft_filter", 40 / 96, layout=FILTERS, plan=Plan(0, 20, 4, 4))

    def by_norm(values: torch.Tensor) -> list[list[bool]]:
        sizes = [part.norm(dim=1).numpy() for part in (values[0, :48].view(8, 6), values[0, 48:80].view(4, 8))]
        return [(each >= np.sort(each)[len(each) // 2]).tolist() for each in sizes]

    step(method, weights, timeline, 0, FILTERS)
    moved = weights.clone()
    given = gradient_like(weights, 1)
    limited = given.clone()
    parts = (limited[0, :48].view(8, 6), limited[0, 48:80].view(4, 8))
    for part, kept in zip(parts, rows(method.mask), strict=True):
        norms = [float(each.norm()) for each in part]
        usual = np.mean([norm for norm, stays in zip(norms, kept, strict=True) if stays])
        for number, stays in enumerate(kept):
            part[number] *= 1.0 if stays else min(1.0, usual / norms[number])
    assert not torch.equal(limited, given)
    moved -= 0.1 * limited
    _, gradient = step(method, weights, timeline, 1, FILTERS)  # the second step of an epoch of two
    torch.testing.assert_close(gradient, limited)
    assert rows(method.mask) == by_norm(moved)
    torch.testing.assert_close(weights, moved * method.mask)
    step(method, weights, timeline, 2, FILTERS)
    assert bool((weights[~method.mask] != 0).all())
    assert torch.equal(forward_weights(method, weights), weights)
    for number in range(3, 19):
        step(method, weights, timeline, number, FILTERS)
    soft = weights - 0.1 * limited_by(method, weights, 19)
    forgotten = method.update_topology(soft.clone(), 20)
    assert forgotten is not None
    assert torch.equal(forgotten, ~method.mask)
    chosen = method.mask.clone()
    assert rows(chosen) == by_norm(soft)  # from here on the choice stands
    _, gradient = step(method, weights, timeline, 20, FILTERS)
    assert (gradient[~chosen] == 0).all()
    assert (weights[~chosen] == 0).all()
    assert torch.equal(method.finalize(weights), chosen)


def limited_by(method: Method[Any], weights: torch.Tensor, number: int) -> torch.Tensor:
    gradient = gradient_like(weights, number)
    update(method, gradient, weights, FILTERS)
    return gradient


def test_slimming_presses_on_gains_and_prunes_by_them() -> None:
    method, weights, timeline = begin("slimming", 40 / 96, layout=FILTERS, penalty=0.5)
    others = torch.zeros(1, 16, dtype=torch.float64)
    others[0, :8] = torch.tensor([0.9, -0.1, 0.2, 0.8, 0.7, 0.6, -0.95, 0.5])
    others[0, 10:14] = torch.tensor([0.15, 0.25, 2.0, 2.0])
    for number in range(11):
        gradient = torch.ones_like(others)
        method.add_penalty(gradient, others)
        inside = torch.zeros(16, dtype=torch.bool)
        inside[:8] = inside[10:14] = True
        pressed = 1.0 + 0.5 * others.sign() * inside if number < 10 else torch.ones_like(others)
        torch.testing.assert_close(gradient, pressed)
        step(method, weights, timeline, number, FILTERS)
        assert bool(method.mask.all()) is (number < 9)
    # In the order of |γ|: a1 (6), b0 (8), a2 (6), b1 (8), a7 (6), a5 (6): 40 weights.
    assert rows(method.mask) == [[True, False, False, True, True, False, True, False], [False, False, True, True]]
    assert (weights[~method.mask] == 0).all()


def test_at_least_one_channel_stays() -> None:
    kept = channels_to_keep(FILTERS, [0, 1], [0.0] * 8 + [1.0] * 4, 66)
    assert [sum(each) for each in kept] == [1, 1]
    with pytest.raises(ValueError, match="slimming needs a batch norm after every convolution, got none after a"):
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
