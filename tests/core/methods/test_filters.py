"""Methods that prune whole filters, against their own definitions."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gossamer
from gossamer.lab.models.resnet import ResNet
from gossamer.methods import Layout, Method
from gossamer.methods.base import Norm
from gossamer.methods.filters import channels_to_keep, equal_share, norms_of
from gossamer.schedule import Plan
from methods.toy import begin, forward_weights, gradient_like, step, update

NORMS = (Norm(slice(0, 8), slice(14, 22)), Norm(slice(10, 14), slice(22, 26)), None)
FILTERS = Layout(("a", "b", "c"), ((8, 2, 3), (4, 8, 1), (2, 8)), NORMS)  # 48 + 32 + 16


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


def test_the_geometric_median_is_redundant() -> None:
    method, weights, _ = begin("fpgm", 40 / 96, layout=FILTERS, plan=Plan(0, 20, 4, 4))
    expected = []
    for part in (weights[0, :48].view(8, 6).numpy(), weights[0, 48:80].view(4, 8).numpy()):
        distances = np.sqrt(((part[:, None] - part[None]) ** 2).sum(2)).sum(1)
        expected.append((distances >= np.sort(distances)[len(part) // 2]).tolist())
    assert rows(method.mask) == expected
    by_norm, *_ = begin("soft_filter", 40 / 96, layout=FILTERS, plan=Plan(0, 20, 4, 4))
    moved = weights.clone()
    moved[0, :48].view(8, 6).add_(torch.arange(6))  # all filters of a layer, so that only norms change
    for soft in (method, by_norm):
        soft.update_topology(moved.clone(), 2)
    assert rows(method.mask) == expected
    assert rows(by_norm.mask) != expected


def test_a_group_lasso_shrinks_filters_by_a_constant() -> None:
    method, weights, timeline = begin("ssl", 40 / 96, layout=FILTERS, penalty=0.5)
    for number in range(10):
        before = weights.clone()
        given, gradient = step(method, weights, timeline, number, FILTERS)
        parts = (before[:, :48].view(1, 8, 6), before[:, 48:80].view(1, 4, 8))
        pulls = [(part / part.norm(dim=2, keepdim=True)).flatten(1) for part in parts]
        pull = torch.cat([*pulls, torch.zeros(1, 16, dtype=torch.float64)], dim=1)
        torch.testing.assert_close(gradient, given + 0.5 * pull)
    norms = torch.cat([part.norm(dim=2) for part in parts], dim=1)[0].tolist()
    kept = channels_to_keep(FILTERS, [0, 1], norms, 40)
    assert sum(not stays for each in kept for stays in each) > 3
    moved = before - 0.1 * gradient  # the ranking is that after the step
    norms = torch.cat([moved[0, :48].view(8, 6).norm(dim=1), moved[0, 48:80].view(4, 8).norm(dim=1)]).tolist()
    assert rows(method.mask) == channels_to_keep(FILTERS, [0, 1], norms, 40)
    given, gradient = step(method, weights, timeline, 10, FILTERS)
    torch.testing.assert_close(gradient, given * method.mask)  # no penalty after the sparsify phase


def test_scaling_factors_follow_the_accelerated_proximal_gradient() -> None:
    method, weights, timeline = begin("dss", 40 / 96, layout=FILTERS, penalty=2.0, momentum=0.5)
    others = torch.full((1, 26), 0.7, dtype=torch.float64)
    inside = torch.zeros(26, dtype=torch.bool)
    inside[:8] = inside[10:14] = True
    factor, velocity = others[0].numpy().copy(), np.zeros(26)
    dead, ever_zero = np.zeros(26, dtype=bool), False
    for number in range(12):
        given = gradient_like(others, number) * 100
        gradient = given.clone()
        method.add_penalty(gradient, others)
        assert torch.equal(gradient, given)  # the optimizer's own step of the factors is overwritten
        step(method, weights, timeline, number, FILTERS)
        z = factor - 0.1 * given[0].numpy()
        near = np.sign(z) * np.maximum(np.abs(z) - 0.1 * (2.0 if number < 10 else 0.0), 0)
        ever_zero |= bool((near[inside.numpy()] == 0).any())
        velocity = near - factor + 0.5 * velocity
        factor = near + 0.5 * velocity
        factor = np.where(dead, 0.0, factor)
        others.sub_(0.3)
        others.copy_(others.where(~inside, torch.nan))
        method.project_others(others)
        torch.testing.assert_close(others[0, inside], torch.tensor(factor)[inside])
        assert not bool(others.isnan().any())
        if number == 9:
            kept = rows(method.mask)
            scores = np.abs(factor[inside.numpy()]).tolist()
            assert kept == channels_to_keep(FILTERS, [0, 1], scores, 40)
            dead = np.ones(26, dtype=bool)
            dead[:8], dead[10:14] = [not each for each in kept[0]], [not each for each in kept[1]]
    assert ever_zero
    before = method.state()["gains"].clone()
    method.add_penalty(torch.full_like(others, torch.inf), others)
    torch.testing.assert_close(method.state()["gains"], before)  # a step that cannot be taken


def test_soft_channel_pruning_presses_on_the_share_that_passes() -> None:
    method, weights, timeline = begin("scp", 40 / 96, layout=FILTERS, penalty=0.5)
    others = torch.randn(1, 26, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()
    gains = torch.cat([others[:, :8], others[:, 10:14]], dim=1)
    biases = torch.cat([others[:, 14:22], others[:, 22:26]], dim=1)
    shares = torch.distributions.Normal(0.0, 1.0).cdf(biases / gains.abs())
    (expected,) = torch.autograd.grad(0.5 * shares.sum(), others)
    for number in range(11):
        gradient = torch.zeros_like(others)
        method.add_penalty(gradient, others.detach())
        torch.testing.assert_close(gradient, expected if number < 10 else torch.zeros_like(expected))
        step(method, weights, timeline, number, FILTERS)
    assert rows(method.mask) == channels_to_keep(FILTERS, [0, 1], shares[0].tolist(), 40)


def test_zeros_are_counted_where_relu_follows_and_compared_within_a_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    phases = {"warmup": "0it", "sparsify": "6it", "stabilise": "0it"}
    sparsifier = gossamer.Sparsifier(model, optimizer, method="apoz", sparsity=0.2, total_steps=10, **phases)
    active = np.zeros(14)
    for number in range(6):
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(5, 2, 6, 6, generator=generator, dtype=torch.float64)
        outputs: list[torch.Tensor] = []
        watches = [model[index].register_forward_hook(lambda *call, to=outputs: to.append(call[2])) for index in (2, 4)]
        model(images).square().mean().backward()
        for watch in watches:
            watch.remove()
        with torch.no_grad():
            model(images)  # an evaluation does not count
        zeros = [(output == 0).double().mean((0, 2, 3)).numpy() for output in outputs]
        active = 0.99 * active + 0.01 * (1 - np.concatenate(zeros))
        optimizer.step()
        optimizer.zero_grad()
    layers = (active[:8], active[8:])
    scores = np.concatenate([(each - each.mean()) / each.std() for each in layers]).tolist()
    layout = Layout(("a", "b", "c"), ((8, 2, 9), (6, 8, 9), (3, 24)))
    expected = channels_to_keep(layout, [0, 1], scores, round(0.2 * layout.count))
    found = [mask.flatten(1).any(1).tolist() for mask in sparsifier.masks.values()][:2]
    assert found == expected
    assert not all(map(all, found))
    copy.deepcopy(model)(images)  # a copy is not watched


def test_a_forward_pass_that_is_not_seen_is_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gossamer.Sparsifier(model, optimizer, method="apoz", sparsity=0.01, total_steps=10, warmup="0it")
    trained = copy.deepcopy(model)
    trained(torch.ones(1, 2, 6, 6)).sum().backward()
    for ours, theirs in zip(model.parameters(), trained.parameters(), strict=True):
        ours.grad = theirs.grad
    with pytest.raises(RuntimeError, match="saw no forward pass of the model before this step"):
        optimizer.step()


def test_gains_are_found_behind_their_convolutions() -> None:
    model = ResNet(8, 10)
    weights = [name for name, each in model.named_parameters() if each.dim() > 1]
    others = [(name, each.numel()) for name, each in model.named_parameters() if each.dim() == 1]
    flat = torch.cat([each.detach().flatten() for each in model.parameters() if each.dim() == 1])
    flat[:] = torch.arange(len(flat))
    places = norms_of(model, weights, others)
    assert places[-1] is None  # the last layer is linear
    offsets = np.cumsum([0, *(size for _, size in others)])
    for name, place in zip(weights[:-1], places[:-1], strict=True):
        assert place is not None
        behind = name.replace("conv", "bn") if "conv" in name else None
        if behind is not None:
            number = [other for other, _ in others].index(behind)
            assert place == Norm(slice(*offsets[number : number + 2]), slice(*offsets[number + 1 : number + 3]))
    assert norms_of(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), ["0.weight"], [("1.weight", 3)]) == (None,)
