"""Rivals published since 2020, each against its own equations, written down a second time in NumPy."""

import math

import numpy as np
import pytest
import torch

from gossamer.methods import find
from gossamer.methods.feather import fade
from gossamer.schedule import make_plan
from gossamer.settings import choose
from methods.toy import PLAN, Array, begin, forward_weights, gradient_like, left, step, top

RAMP, LENGTH = PLAN.sparsify, PLAN.sparsify + PLAN.stabilise


class Adam:
    def __init__(self, size: int) -> None:
        self.mean, self.square, self.steps = np.zeros(size), np.zeros(size), 0

    def __call__(self, gradient: Array) -> Array:
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        corrected = self.square / (1 - 0.999**self.steps)
        direction: Array = self.mean / (1 - 0.9**self.steps) / (np.sqrt(corrected) + 1e-8)
        return direction


def rate(value: float, number: int) -> float:
    """The cosine to zero over the mask phases."""
    return value * 0.5 * (1 + math.cos(math.pi * number / LENGTH))


def budget(number: int) -> int:
    """The nonzeros of 40 weights at 60 % after this many steps."""
    return left(min(1.0, number / RAMP), 40, 16)


def test_soft_movement_keeps_weights_that_move_away_from_zero() -> None:
    method, weights, timeline = begin("soft_movement", 0.6, mask_lr=0.1)
    score, adam = np.zeros(40), Adam(40)
    for number in range(LENGTH):
        w, g, before = (
            weights.numpy()[0].copy(),
            gradient_like(weights, number).numpy()[0],
            method.mask.numpy()[0].copy(),
        )
        _, gradient = step(method, weights, timeline, number)
        assert np.array_equal(gradient.numpy()[0], np.where(before, g, 0.0))
        score -= rate(0.1, number) * adam(g * w)
        assert np.array_equal(method.mask.numpy()[0], top(score[None], budget(number + 1))[0])
    assert int(method.finalize(weights).sum()) == 16


def test_hard_movement_keeps_its_share_of_each_tensor() -> None:
    method, weights, timeline = begin("movement", 0.6, mask_lr=0.1)
    score, adam = np.zeros(40), Adam(40)
    for number in range(LENGTH):
        w, g = weights.numpy()[0].copy(), gradient_like(weights, number).numpy()[0]
        step(method, weights, timeline, number)
        score -= rate(0.1, number) * adam(g * w)
    mask = method.finalize(weights).numpy()[0]
    first, second = round(16 * 24 / 40), 16 - round(16 * 24 / 40)
    assert np.array_equal(mask[:24], top(score[None, :24], first)[0])
    assert np.array_equal(mask[24:], top(score[None, 24:], second)[0])


@pytest.mark.parametrize(
    ("name", "power", "rescale"), [("feather", 3.0, False), ("feather", 1.0, True), ("proximal", 1.0, False)]
)
def test_weights_fade_in_and_out_at_the_threshold(name: str, power: float, rescale: bool) -> None:
    settings = {"power": power, "rescale": rescale} if name == "feather" else {}
    method, weights, timeline = begin(name, 0.6, **settings)
    for number in range(LENGTH):
        size, given = np.abs(weights.numpy()[0]), gradient_like(weights, number)
        before = weights.clone()
        _, gradient = step(method, weights, timeline, number)
        assert torch.equal(gradient, given)  # straight through
        keep = budget(number + 1)
        assert np.array_equal(method.mask.numpy()[0], top(size[None], keep)[0])
        threshold = np.sort(size)[::-1][keep] if keep < 40 else 0.0
        kept = method.mask.numpy()[0]
        used = np.sign(before.numpy()[0]) * np.maximum(size**power - threshold**power, 0.0) ** (1 / power) * kept
        if rescale:
            for part in (slice(0, 24), slice(24, 40)):
                used[part] *= size[part].sum() / (size * kept)[part].sum()
        np.testing.assert_allclose(forward_weights(method, before).numpy()[0], used, rtol=1e-9, atol=1e-12)
    used = forward_weights(method, weights)
    mask = method.finalize(weights)
    assert int(mask.sum()) == int((weights != 0).sum()) == 16
    assert torch.equal(weights != 0, mask)
    assert name == "feather" or float((weights - used).abs().max()) < 0.1


def test_feather_scales_the_gradient_of_pruned_weights_above_95_percent() -> None:
    for sparsity, share in ((0.9, 1.0), (0.975, 0.5)):
        method, weights, timeline = begin("feather", sparsity)
        for number in range(RAMP):
            step(method, weights, timeline, number)
        given, gradient = step(method, weights, timeline, RAMP)
        pruned = gradient != given
        assert bool(pruned.any()) is (share < 1)
        ratio = gradient / given
        assert set(ratio[0].tolist()) <= {1.0, share}
    _, weights, _ = begin("feather", 0.9)
    hard = fade(weights, torch.tensor([[0.2]], dtype=weights.dtype), 200.0)
    torch.testing.assert_close(hard, torch.where(weights.abs() > 0.2, weights, 0.0), atol=1e-2, rtol=0.05)


def test_feather_moves_its_masks_to_the_end_unless_phases_are_given() -> None:
    phases, _ = choose(find("feather"), "default", {})
    plan = make_plan(
        100, steps_per_epoch=10, warmup=phases.warmup, sparsify=phases.sparsify, stabilise=phases.stabilise
    )
    assert (plan.warmup, plan.sparsify, plan.stabilise, plan.finetune) == (0, 50, 50, 0)
    phases, _ = choose(find("feather"), "default", {"warmup": "10it"})
    assert phases.warmup == "10it"
    assert choose(find("dpf"), "default", {})[0].warmup == "0.25run"


def test_acdc_alternates_and_forgets_the_momentum() -> None:
    method, weights, timeline = begin("acdc", 0.6, cycles=3)
    method.project(weights)
    switches, counts = [], []
    for number in range(LENGTH):
        counts.append(int(method.mask.sum()))
        pruned = ~method.mask
        assert not bool(weights[pruned].any())
        given, gradient = gradient_like(weights, number), None
        if method.topology_due(number + 1):
            switches.append(number + 1)
        before = weights.clone()
        given, gradient = step(method, weights, timeline, number)
        assert torch.equal(gradient, given.masked_fill(pruned, 0.0))
        if method.topology_due(number + 1) and bool(method.mask.all()):
            assert torch.equal(weights, before - 0.1 * gradient)  # the dense phase begins with the zeros of the sparse
    assert switches == [2, 5, 7, 10, 12]
    assert sorted(set(counts)) == [16, 40]
    assert counts[0] == 16
    assert counts[LENGTH - 1] == 40
    size = weights.abs().numpy()
    assert np.array_equal(method.finalize(weights).numpy(), top(size, 16))
    fresh = begin("acdc", 0.6, cycles=3)[0].update_topology(weights, 2)
    assert fresh is not None
    assert bool(fresh.all())


def test_granet_prunes_along_the_cubic_and_regrows_by_gradient() -> None:
    method, weights, timeline = begin("granet", 0.6, fraction=0.5, every=1)
    mask = np.ones(40, dtype=bool)
    for number in range(LENGTH):
        w, g = weights.numpy()[0].copy(), gradient_like(weights, number).numpy()[0]
        w = np.where(mask, w - 0.1 * g, 0.0)
        step(method, weights, timeline, number)
        keep = budget(number + 1)
        share = 0.5 * 0.5 * (1 + math.cos(math.pi * (number + 1) / LENGTH))
        grown = min(int(share * keep), 40 - keep)
        stays = top(np.where(mask, np.abs(w), -np.inf)[None], keep - grown)[0]
        grows = top(np.where(stays, -np.inf, np.abs(g))[None], grown)[0]
        mask = stays | grows
        assert np.array_equal(method.mask.numpy()[0], mask)
        np.testing.assert_allclose(weights.numpy()[0], np.where(stays, w, 0.0))
    assert int(method.finalize(weights).sum()) == 16


def test_platon_keeps_what_matters_or_might() -> None:
    method, weights, timeline = begin("platon", 0.6)
    importance, uncertainty = np.zeros(40), np.zeros(40)
    for number in range(LENGTH):
        w, g = weights.numpy()[0].copy(), gradient_like(weights, number).numpy()[0]
        step(method, weights, timeline, number)
        now = np.abs(w * g)
        importance = 0.85 * importance + 0.15 * now
        uncertainty = 0.95 * uncertainty + 0.05 * np.abs(now - importance)
        expected = top((importance * uncertainty)[None], budget(number + 1))[0]
        assert np.array_equal(method.mask.numpy()[0], expected)
        np.testing.assert_allclose(weights.numpy()[0], np.where(expected, w - 0.1 * g, 0.0))
    assert int(method.finalize(weights).sum()) == 16


def test_elsa_is_admm() -> None:
    method, weights, timeline = begin("elsa", 0.6, penalty=0.5, every=1)
    w = weights.numpy()[0].copy()
    z, u = np.where(top(np.abs(w)[None], 16)[0], w, 0.0), np.zeros(40)
    for number in range(LENGTH):
        g = gradient_like(weights, number).numpy()[0]
        assert torch.equal(forward_weights(method, weights), weights)  # dense to the end
        step(method, weights, timeline, number)
        w = w - 0.1 * (g + 0.5 * (w - z + u))
        z = np.where(top(np.abs(w + u)[None], 16)[0], w + u, 0.0)
        u = u + w - z
        np.testing.assert_allclose(weights.numpy()[0], w)
    assert np.array_equal(method.finalize(weights).numpy(), top(np.abs(w)[None], 16))


def test_elsa_pulls_weights_towards_the_constraint() -> None:
    method, weights, _ = begin("elsa", 0.6, penalty=1.0, every=1)
    target = torch.where(torch.arange(40) % 5 < 2, 1.0, 0.2).to(weights)[None]  # of the loss ½‖w - target‖²
    for number in range(300):
        gradient = weights - target
        method.weight_gradient(gradient, weights)
        weights.sub_(0.1 * gradient)
        method.update_topology(weights, number + 1)
    torch.testing.assert_close(weights, torch.where(target == 1.0, 1.0, 0.0).to(weights), atol=1e-3, rtol=0)
    assert torch.equal(method.finalize(weights), target == 1.0)


def test_spred_trains_two_factors_with_weight_decay() -> None:
    method, weights, timeline = begin("spred", 0.6, mask_lr=0.02, decay=3.0)
    v, m, adam = weights.numpy()[0].copy(), np.ones(40), Adam(40)
    for number in range(LENGTH):
        np.testing.assert_allclose(forward_weights(method, weights).numpy()[0], m * v)
        g = gradient_like(weights, number).numpy()[0]
        step(method, weights, timeline, number)
        decay = 3.0 * (number + 1) / RAMP if number < RAMP else 0.0
        now = rate(0.02, number)
        direction = adam(g * v)
        gradient = g * m
        v = v * (1 - now * decay) - 0.1 * gradient
        m = m - now * (direction + decay * m)
        np.testing.assert_allclose(weights.numpy()[0], v)
    mask = method.finalize(weights)
    np.testing.assert_allclose(weights.numpy()[0], m * v)
    assert np.array_equal(mask.numpy(), top(np.abs(m * v)[None], 16))
