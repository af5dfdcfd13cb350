"""Methods that look at magnitudes, each against its own equations in NumPy."""

import numpy as np
import pytest
import torch

from gossamer.methods import Context, Layout, Request, make_options, surgery
from gossamer.methods.lottery import rewound
from gossamer.methods.narang import threshold
from gossamer.methods.rigl import erdos_renyi
from gossamer.schedule import Plan
from methods.toy import LAYOUT, PLAN, RATE, begin, forward_weights, gradient_like, left, step, top, update


def test_dpf_uses_the_largest_weights_and_trains_all() -> None:
    method, weights, timeline = begin("dpf", 0.75)
    for number in range(PLAN.sparsify):
        before = weights.clone()
        given, gradient = step(method, weights, timeline, number)
        expected = top(before.abs().numpy(), left((number + 1) / 10, 40, 10))
        assert np.array_equal(method.mask.numpy(), expected)
        assert torch.equal(gradient, given)
        assert torch.equal(forward_weights(method, weights), weights * torch.from_numpy(expected))
    assert int(method.finalize(weights).sum()) == 10


@pytest.mark.parametrize("name", ["gradual", "one_shot"])
def test_what_magnitude_has_pruned_stays_away(name: str) -> None:
    method, weights, timeline = begin(name, 0.5, 0.75)
    alive = np.ones((2, 40), dtype=bool)
    for number in range(12):
        scores = np.where(alive, weights.abs().numpy(), -1.0)
        _, gradient = step(method, weights, timeline, number)
        ramp = 1.0 if name == "one_shot" else min(1.0, (number + 1) / 10)
        assert (gradient.numpy()[~alive] == 0).all()
        for row, keep in enumerate((20, 10)):
            alive[row] = top(scores[row : row + 1], left(ramp, 40, keep))[0]
        assert np.array_equal(method.mask.numpy(), alive)
        assert (weights.numpy()[~alive] == 0).all()
        assert torch.equal(forward_weights(method, weights), weights)


def test_gradual_per_layer_gives_every_tensor_its_share() -> None:
    method, weights, timeline = begin("gradual_per_layer", 0.5, 0.9)
    for number in range(10):
        alive = method.mask.clone()
        moved = (weights - RATE * gradient_like(weights, number) * alive).abs() * alive
        step(method, weights, timeline, number)
        for part, mask in zip(LAYOUT.split(moved), LAYOUT.split(method.mask), strict=True):
            largest = [top(part[row : row + 1].numpy(), int(mask[row].sum()))[0] for row in range(2)]
            assert np.array_equal(mask.numpy(), largest)
        for row, keep in enumerate((20, 4)):
            total = left((number + 1) / 10, 40, keep)
            counts = [int(part[row].sum()) for part in LAYOUT.split(method.mask)]
            assert sum(counts) == total
            assert counts[0] in (int(24 * total / 40), int(24 * total / 40) + 1)
            for part, mask in zip(LAYOUT.split(weights), LAYOUT.split(method.mask), strict=True):
                assert (part[row][~mask[row]] == 0).all()
    before = weights.clone()
    assert torch.equal(method.finalize(weights), method.mask)
    assert torch.equal(weights, before)


def test_gradual_per_layer_with_sparsities_of_its_own_for_kinds_of_layers() -> None:
    layout = Layout(("plain", "depthwise", "linear"), ((10, 3, 20), (40, 5, 1), (10, 20)))  # 600 + 200 + 200
    method, weights, timeline = begin("gradual_per_layer", 0.5, layout=layout, depthwise=0.1, linear=0.6)
    for number in range(10):
        step(method, weights, timeline, number, layout)
        kept = [int(part.sum()) for part in layout.split(method.mask)]
        done = 1 - (1 - (number + 1) / 10) ** 3
        wanted = (600 * (1 - done * 0.6), 200 * (1 - done * 0.1), 200 * (1 - done * 0.6))
        assert all(abs(count - want) <= 1 for count, want in zip(kept, wanted, strict=True))
    assert kept == [240, 180, 80]
    message = "sparsity=0.05 cannot be met with depthwise=0.9 and linear=None: these prune 180 of 1,000 weights"
    with pytest.raises(ValueError, match=message):
        begin("gradual_per_layer", 0.05, layout=layout, depthwise=0.9)


def test_narang_has_the_lines_of_the_paper() -> None:
    q, freq, start, ramp, end = 0.17, 100, 4000, 9000, 21000
    theta = 2 * q * freq / (2 * (ramp - start) + 3 * (end - ramp))
    for now in (4000, 6500, 8999, 9000, 15000, 21000):
        if now < ramp:
            expected = theta * (now - start + 1) / freq
        else:
            expected = (theta * (ramp - start + 1) + 1.5 * theta * (now - ramp + 1)) / freq
        ours = q * threshold(now - start, end - start, ramp=ramp - start, slope=1.5)
        assert ours == pytest.approx(expected)
    assert q * threshold(end - start, end - start, ramp=ramp - start, slope=1.5) == pytest.approx(q, rel=1e-3)


def test_narang_prunes_what_is_below_and_ends_at_the_budget() -> None:
    method, weights, timeline = begin("narang", 0.75)
    quantiles = [np.sort(part[0].abs().numpy())[int(0.75 * part.shape[1]) - 1] for part in LAYOUT.split(weights)]
    typical = np.repeat(quantiles, LAYOUT.sizes)
    alive = np.ones(40, dtype=bool)
    for number in range(10):
        gradient = gradient_like(weights, number).numpy()[0]
        moved = weights.numpy()[0] - RATE * np.where(alive, gradient, 0.0)
        step(method, weights, timeline, number)
        alive &= np.abs(moved) / typical > threshold(number + 1, 10, ramp=2, slope=1.5)
        if number < 9 and alive.sum() >= 10:
            assert np.array_equal(method.mask.numpy()[0], alive)
        alive = method.mask.numpy()[0].copy()
        assert (weights.numpy()[0][~alive] == 0).all()
    assert int(method.mask.sum()) == 10


def test_surgery_leaves_weights_between_the_thresholds_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surgery, "_SPARED", 0.0)
    method, weights, timeline = begin("surgery", 0.75, gamma=0.0)
    parts = [part[0].abs().numpy() for part in LAYOUT.split(weights)]
    mean, spread = (np.repeat([f(part) for part in parts], LAYOUT.sizes) for f in (np.mean, np.std))
    alive, spliced = np.ones(40, dtype=bool), False
    for number in range(15):
        size = weights.abs().numpy()[0]
        given, gradient = step(method, weights, timeline, number)
        assert torch.equal(gradient, given)  # also of pruned weights, or none would return
        want = left(min(1.0, (number + 1) / 10), 40, 10)
        low, high = -10.0, 20.0
        mask = alive
        for _ in range(60):  # the published method, with c tried out
            t = mean + (low + high) / 2 * spread
            mask = np.where(size < 0.9 * t, False, np.where(size >= 1.1 * t, True, alive))
            if mask.sum() == want:
                break
            low, high = ((low + high) / 2, high) if mask.sum() > want else (low, (low + high) / 2)
        assert mask.sum() == want
        spliced |= bool((mask & ~alive).any())
        alive = mask
        assert np.array_equal(method.mask.numpy()[0], alive)
        weights.add_(torch.from_numpy(np.where(alive, -0.02, 0.05)) * weights.sign())  # so that some return
    assert spliced


def test_surgery_leaves_each_tensor_half_of_an_equal_share() -> None:
    """Of its own sparsity, whatever that of the run beside it is."""
    layout = Layout(("even", "long-tailed"), ((20, 10), (40, 10)))
    _, weights, timeline = begin("surgery", 0.5, 0.9, layout=layout)
    weights[:, :200] = 0.3 + 0.001 * torch.linspace(0, 1, 200)
    requests = [Request(sparsity, 7, make_options(surgery.Surgery, {"gamma": 0.0})) for sparsity in (0.5, 0.9)]
    method = surgery.Surgery(Context(layout, requests, timeline, weights, min_density=0.001))
    weights[:, :200] *= 0.5  # below all thresholds
    for number in range(10):
        update(method, torch.zeros_like(weights), weights, layout)
        timeline.set(number + 1)
    assert [[int(part[row].sum()) for part in layout.split(method.mask)] for row in (0, 1)] == [[50, 250], [10, 50]]


def test_surgery_updates_less_and_less_often() -> None:
    runs = 50
    method, weights, timeline = begin("surgery", *[0.5] * runs, plan=Plan(0, 1, 200, 1), gamma=0.1, power=1.0)
    changes = []
    for number in range(200):
        before = method.mask.clone()
        weights.copy_(gradient_like(weights, number))
        update(method, torch.zeros_like(weights), weights)
        timeline.set(number + 1)
        changes.append(float((before != method.mask).any(1).double().mean()))
    for first in (0, 50, 100, 150):
        expected = np.mean([1 / (1 + 0.1 * number) for number in range(first, first + 50)])
        error = 5 * np.sqrt(expected / (50 * runs))
        assert np.mean(changes[first : first + 50]) == pytest.approx(expected, abs=error)


def test_rewinding_trains_twice() -> None:
    plan = Plan(10, 10, 10, 10)
    rates = [rewound(plan, step, shared=lambda step: 1.0 - step / 100, peak=2.0) for step in range(40)]
    assert rates[:10] == [1.0 - step / 100 for step in range(10)]
    assert rates[10] == pytest.approx(0.9)
    assert rates[15] == pytest.approx(0.45)
    assert rates[20] == pytest.approx(2.0)
    assert rates[30] == pytest.approx(1.0)
    assert rates[39] == pytest.approx(1 + np.cos(np.pi * 19 / 20))


@pytest.mark.parametrize("rewind", ["rate", "weights"])
def test_the_lottery_prunes_once_and_goes_back(rewind: str) -> None:
    method, weights, timeline = begin("lottery", 0.75, rewind=rewind)
    early = weights.clone()
    for number in range(7):
        assert bool(method.mask.all())
        given = gradient_like(weights, number)
        trained = weights - given * RATE
        step(method, weights, timeline, number)
    expected = torch.from_numpy(top(trained.abs().numpy(), 10))
    assert torch.equal(method.mask, expected)
    assert torch.equal(weights, (early if rewind == "weights" else trained) * expected)
    fresh = method.update_topology(weights, 7)
    assert fresh is not None
    assert bool(fresh.all())


def test_snip_keeps_the_sensitive_weights() -> None:
    method, weights, timeline = begin("snip", 0.75, batches=2)
    first = weights.clone()
    step(method, weights, timeline, 0)
    second = weights.clone()
    step(method, weights, timeline, 1)
    sensitivity = gradient_like(first, 0) * first + gradient_like(first, 1) * second
    expected = top(sensitivity.abs().numpy(), 10)
    assert np.array_equal(method.mask.numpy(), expected)
    for number in range(2, 8):
        step(method, weights, timeline, number)
        assert np.array_equal(method.mask.numpy(), expected)
        assert (weights.numpy()[~expected] == 0).all()


def test_erdos_renyi_densities() -> None:
    densities = erdos_renyi(LAYOUT, 10)
    assert densities[0] / densities[1] == pytest.approx((9 / 24) / (10 / 16))
    assert 24 * densities[0] + 16 * densities[1] == pytest.approx(10)
    assert erdos_renyi(LAYOUT, 36) == [pytest.approx(20 / 24), 1.0]  # the second would be more than dense


@pytest.mark.parametrize("at", [6, 42])
def test_rigl_drops_small_weights_and_grows_large_gradients(at: int) -> None:
    method, weights, timeline = begin("rigl", 0.5, plan=Plan(0, 60, 20, 20), fraction=0.5)
    method.project(weights)
    counts = [int(part.sum()) for part in LAYOUT.split(method.mask)]
    assert sum(counts) == 20
    for number in range(at - 1):
        step(method, weights, timeline, number)
    before = method.mask.clone()
    given = gradient_like(weights, at - 1)
    moved = weights - RATE * given * before
    assert method.topology_due(at)
    step(method, weights, timeline, at - 1)
    share = 0.25 * (1 + np.cos(np.pi * at / 80))
    offset = 0
    for count, size in zip(counts, LAYOUT.sizes, strict=True):
        columns = slice(offset, offset + size)
        offset += size
        w, g, old = moved[0, columns].numpy(), given[0, columns].numpy(), before[0, columns].numpy()
        gone = int(share * count)
        assert gone > 0
        stays = top(np.where(old, np.abs(w), -1)[None], count - gone)[0]
        comes = top(np.where(stays, -1, np.abs(g))[None], gone)[0]
        assert np.array_equal(method.mask[0, columns].numpy(), stays | comes)
        np.testing.assert_array_equal(weights[0, columns].numpy(), np.where(stays, w, 0.0))
    assert not method.topology_due(80)


def test_rigl_starts_differ_by_seed_and_share_by_rule() -> None:
    method, _, _ = begin("rigl", 0.5, 0.5, distribution="uniform")
    assert not torch.equal(method.mask[0], method.mask[1])
    assert [int(part[0].sum()) for part in LAYOUT.split(method.mask)] == [12, 8]
    with pytest.raises(ValueError, match="distribution: expected one of erk, uniform, got 'even'"):
        begin("rigl", 0.5, distribution="even")
