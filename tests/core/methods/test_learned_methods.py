"""Methods that learn something beside the weights, each against its own equations."""

import math

import numpy as np
import pytest
import torch

from gossamer.methods import Layout
from gossamer.methods.base import min_nonzeros
from gossamer.methods.l0 import final_gate, probability_of_open, sample_gate
from gossamer.methods.noise import uniform
from gossamer.methods.soft_threshold import soft_threshold
from gossamer.methods.variational_dropout import divergence_slope
from gossamer.schedule import Plan
from gossamer.target import make_target
from methods.toy import PLAN, begin, forward_weights, gradient_like, left, step, top, update


def cosine(number: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * number / (PLAN.sparsify + PLAN.stabilise)))


def test_scl_with_a_fixed_decay_is_the_papers_rule() -> None:
    target = make_target([24, 16], decay=0.5, floors=[0, 0])
    method, weights, timeline = begin("scl", 0.0, target=target, mask_lr=0.03, start_value=0.1, mask_decay=0.0)
    m = np.full(40, 0.1)
    for number in range(12):
        w, g = weights.numpy()[0].copy(), gradient_like(weights, number).numpy()[0]
        step(method, weights, timeline, number)
        m -= 0.03 * cosine(number) * (g * w / np.sqrt(np.mean((g * w) ** 2)) + 0.5)
        assert np.array_equal(method.mask.numpy()[0], m > 0)
    before = method.mask.clone()
    assert torch.equal(method.finalize(weights), before)  # no budget: the sparsity is what came out
    assert 5 < int(before.sum()) < 35


@pytest.mark.parametrize(
    ("estimator", "slope"), [("softplus", lambda m: 1 / (1 + np.exp(-m))), ("identity", np.ones_like)]
)
def test_scl_estimators_and_feature_scale(estimator: str, slope: object) -> None:
    method, weights, timeline = begin("scl", 0.6, estimator=estimator, mask_lr=0.2, scale="batch", anneal="constant")
    assert callable(slope)
    m = np.abs(weights.numpy()[0])
    for number in range(10):
        w, g = weights.numpy()[0].copy(), gradient_like(weights, number).numpy()[0]
        step(method, weights, timeline, number)
        direction = g * w * slope(m)
        rows = [*direction[:24].reshape(4, 6), *direction[24:].reshape(2, 8)]
        m = m - 0.2 * np.concatenate([row / np.sqrt(np.mean(row**2)) for row in rows])
        keep = left((number + 1) / 10, 40, 16)
        assert np.array_equal(method.mask.numpy()[0], top(m[None], keep)[0])
        m = m - (np.sort(m)[::-1][keep] if keep < 40 else 0.0)
        if keep == 40:
            m = np.maximum(m, 1e-300)


@pytest.mark.parametrize(("two_pass", "removed"), [(False, None), (True, None), (False, 0.25)])
@pytest.mark.parametrize("estimator", ["leaky_relu", "softplus"])
def test_autoprune_forgets_the_size_of_the_weight(estimator: str, two_pass: bool, removed: float | None) -> None:
    options = {"estimator": estimator, "alpha": 0.2, "mask_lr": 0.1, "two_pass": two_pass}
    method, weights, timeline = begin(
        "autoprune", 0.6, **options, **({} if removed is None else {"pruned_grad_scale": removed})
    )
    m = np.abs(weights.numpy()[0])
    for number in range(10):
        w, g = weights.numpy()[0].copy(), gradient_like(weights, number).numpy()[0]
        behind = np.where(method.mask.numpy()[0], g, (removed or 0.0) * g)  # what is removed rests
        _, gradient = step(method, weights, timeline, number)
        slope = 1 / (1 + np.exp(-m)) if estimator == "softplus" else np.where(m > 0, 1.0, 0.2)
        direction = g * np.sign(w) * slope
        rate = 0.1 * cosine(number)
        if two_pass:
            rate *= 2 * (number % 2)
            behind = behind if number % 2 == 0 else 0 * g
        assert np.array_equal(gradient.numpy()[0], behind)
        m = m - rate * direction / np.sqrt(np.mean(direction**2))
        keep = left((number + 1) / 10, 40, 16)
        assert np.array_equal(method.mask.numpy()[0], top(m[None], keep)[0])
        m = m - np.sort(m)[::-1][keep] if keep < 40 else np.maximum(m, 1e-300)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_str_follows_its_true_gradients_and_meets_the_budget(momentum: float) -> None:
    method, weights, timeline = begin("str", 0.6, momentum=momentum, start=-3.0, rate=0.5 * 15)
    update(method, torch.zeros_like(weights), weights)  # the first push
    velocity = torch.zeros(1, 2, dtype=torch.float64)
    for number in range(1, 6):
        s = method.state()["s"].clone().requires_grad_()
        w = weights.clone().requires_grad_()
        given = gradient_like(weights, number)
        reparametrised = w.sign() * torch.relu(
            w.abs() - torch.repeat_interleave(s.sigmoid(), torch.tensor([24, 16]), dim=1)
        )
        assert torch.equal(forward_weights(method, weights), reparametrised.detach())
        (reparametrised * given).sum().backward()
        gradient = given.clone()
        timeline.set(number)
        kept = torch.stack([method.mask[:, :24].sum(1), method.mask[:, 24:].sum(1)], dim=1)
        update(method, gradient, weights)
        assert w.grad is not None
        assert s.grad is not None
        torch.testing.assert_close(gradient, w.grad)
        share = 2 * kept / kept.sum()  # of a connection, not of a tensor
        velocity = momentum * velocity + s.grad / share
        pushed = method.state()["s"] - (s.detach() - 0.5 * 0.1 * velocity)
        torch.testing.assert_close(pushed[:, 0], pushed[:, 1])  # all thresholds rise together
        above = weights.abs() > torch.repeat_interleave(method.state()["s"].sigmoid(), torch.tensor([24, 16]), dim=1)
        keep = left((number + 1) / 10, 40, 16)
        assert int(method.mask.sum()) == keep
        assert int((above != method.mask).sum()) <= 1  # the first that goes is at the threshold itself
        weights.sub_(gradient)
    expected = soft_threshold(weights, torch.zeros(())).sign()
    mask = method.finalize(weights)
    assert int(mask.sum()) == 16 >= int((weights != 0).sum()) >= 15
    assert torch.equal(weights.sign(), expected * (weights != 0))


def test_str_keeps_min_density_of_each_tensor() -> None:
    layout = Layout(("small", "large"), ((4, 5), (20, 100)))
    method, weights, timeline = begin("str", 0.9, layout=layout, plan=Plan(0, 200, 50, 5), min_density=0.1)
    weights[:, :20] *= 0.01  # so small that one threshold for both would leave nothing of them
    method.update_topology(weights, 0)
    for number in range(250):
        update(method, torch.zeros_like(weights), weights, layout)
        timeline.set(number + 1)
        if method.topology_due(number + 1):
            method.update_topology(weights, number + 1)
    out = forward_weights(method, weights)
    assert int(method.mask.sum()) == 202
    assert int((out[:, :20] != 0).sum()) == 2
    none, _, timeline = begin("str", 0.9, layout=layout, plan=Plan(0, 200, 50, 5), min_density=0.0)
    for number in range(250):
        update(none, torch.zeros_like(weights), weights, layout)
        timeline.set(number + 1)
    assert int((forward_weights(none, weights)[:, :20] != 0).sum()) == 0


@pytest.mark.parametrize("min_density", [0.001, 0.01])
def test_str_lets_no_tensor_die_and_ends_with_min_density_of_each(min_density: float) -> None:
    """Also where weights wander, so that those that are large now were not when the protected ones were chosen."""
    layout = Layout(("large", "small", "few"), ((20, 30), (40, 50), (10, 10)))
    method, weights, timeline = begin("str", 0.98, layout=layout, plan=Plan(0, 400, 130, 10), min_density=min_density)
    for part, scale in zip(layout.split(weights), (1.0, 0.05, 0.3), strict=True):
        part *= scale
    method.update_topology(weights, 0)
    for number in range(530):
        step(method, weights, timeline, number, layout)
        assert all(bool(part.any()) for part in layout.split(method.mask)), number
    mask = method.finalize(weights)
    assert int(mask.sum()) == 54
    kept = [int(part.sum()) for part in layout.split(mask)]
    least = min_nonzeros(layout.sizes, min_density)
    assert all(count >= smallest for count, smallest in zip(kept, least, strict=True)), kept
    assert torch.equal(mask, weights != 0)


def test_gates_have_their_distribution_and_derivative() -> None:
    log_alpha = torch.linspace(-3, 3, 7, dtype=torch.float64).repeat(20_000, 1).requires_grad_()
    u = uniform(torch.arange(20_000), torch.zeros(1, dtype=torch.int64), 7, torch.float64)
    gate, slope = sample_gate(log_alpha.detach(), u)
    assert float(gate.min()) == 0.0
    assert float(gate.max()) == 1.0
    open_ = (gate > 0).double().mean(0)
    torch.testing.assert_close(open_, probability_of_open(log_alpha[0].detach()), atol=0.02, rtol=0)
    s = torch.sigmoid((torch.log(u) - torch.log(1 - u) + log_alpha) * 1.5)
    torch.clamp(s * 1.2 - 0.1, 0, 1).sum().backward()
    assert log_alpha.grad is not None
    torch.testing.assert_close(slope, log_alpha.grad, atol=1e-9, rtol=1e-6)
    assert final_gate(torch.tensor([-9.0, 9.0])).tolist() == [0.0, 1.0]


def test_l0_brings_the_expected_count_to_the_budget() -> None:
    method, weights, timeline = begin("l0", 0.75, plan=Plan(0, 300, 100, 1), gate_lr=0.02)
    for number in range(400):
        out = forward_weights(method, weights)
        gate = method.state()["gate"].clone()
        assert torch.equal(out, weights * gate)
        given, gradient = step(method, weights, timeline, number)
        assert torch.equal(gradient, given * gate)
    expected = float(probability_of_open(method.state()["log_alpha"]).sum())
    assert expected == pytest.approx(10, abs=0.5)
    log_alpha, before = method.state()["log_alpha"].clone(), weights.clone()
    mask = method.finalize(weights)
    assert np.array_equal(mask.numpy(), top(log_alpha.numpy(), 10))
    raised = max(0.0, math.log(0.1 / 1.1) - float(log_alpha.sort().values[0, 29]))  # so that ten are open
    torch.testing.assert_close(weights, before * final_gate(log_alpha + raised))


@pytest.mark.parametrize("sparsity", [0.0, 0.75])
def test_l0_gates_follow_the_gradient_of_the_loss_and_of_their_number(sparsity: float) -> None:
    """With 0.0 more gates may be open than are: nothing pushes them open."""
    method, weights, timeline = begin("l0", sparsity, gate_lr=0.02)
    for number in range(5):
        log_alpha = method.state()["log_alpha"].clone().requires_grad_()
        u = uniform(torch.tensor([7]), timeline.clock, 40, torch.float64)
        w = weights.clone()
        torch.testing.assert_close(forward_weights(method, weights), w * sample_gate(log_alpha, u)[0].detach())
        (w * sample_gate(log_alpha, u)[0] * gradient_like(weights, number)).sum().backward()
        step(method, weights, timeline, number)
        slope = log_alpha.grad
        assert slope is not None
        moved = (log_alpha - 0.02 * cosine(number) * slope / slope.square().mean().sqrt()).detach().requires_grad_()
        expected = probability_of_open(moved).sum()
        expected.backward()
        excess = float(expected.detach()) - left((number + 1) / 10, 40, 40 - int(40 * sparsity))
        pull = moved.grad
        assert pull is not None
        pressed = (max(0.0, excess) / pull.square().sum() * pull).clamp_max(1.0)
        assert bool(pressed.any()) is (sparsity > 0)
        torch.testing.assert_close(method.state()["log_alpha"], (moved - pressed).detach())


def test_what_l0_keeps_does_not_begin_at_zero() -> None:
    """Many gates that are hardly ever open can be the expected count, and all are zero after training."""
    method, weights, _ = begin("l0", 0.75)
    log_alpha = method.state()["log_alpha"]
    log_alpha.copy_(torch.linspace(-6.0, -2.0, 40))
    log_alpha[:, -3:] = 5.0
    before = weights.clone()
    mask = method.finalize(weights)
    assert int((final_gate(log_alpha) > 0).sum()) < int(mask.sum()) == 10
    assert torch.equal(weights != 0, mask)
    raised = log_alpha - log_alpha[0, 29] + math.log(0.1 / 1.1)  # the largest that goes is just closed
    gates = (raised.sigmoid() * 1.2 - 0.1).clamp(0.0, 1.0)
    torch.testing.assert_close(weights[mask], (before * gates)[mask])


def test_hyperflux_is_adam_under_pressure() -> None:
    method, weights, timeline = begin("hyperflux", 0.75, mask_lr=0.008, plan=Plan(0, 200, 40, 5), step=0.1)
    drawn = uniform(torch.tensor([7]), torch.zeros(1, dtype=torch.int64), 40, torch.float64)
    t = (0.2 + 0.3 * drawn).requires_grad_()
    torch.testing.assert_close(method.state()["t"], t.detach())
    adam = torch.optim.Adam([t], lr=1.0)
    base = rising = falling = 0.0
    reached = []
    for number in range(240):
        t.grad = gradient_like(weights, number) * weights * 0.25 + base**1.5 / 40 * (t.detach() > -0.3)
        adam.param_groups[0]["lr"] = 0.5 * 0.5 * (1 + math.cos(math.pi * number / 240))
        adam.step()
        open_ = method.mask.clone()
        given, gradient = step(method, weights, timeline, number)
        assert torch.equal(gradient, given * open_)  # what is removed rests
        torch.testing.assert_close(method.state()["t"], t.detach())
        done, now = number + 1, t.detach().numpy()
        expected = now >= 0 if number < 200 else top(now, 10)  # regrown ones take the place of the weakest
        if expected.any():
            assert np.array_equal(method.mask.numpy(), expected)
        if done == 200:
            base = 0.0
        elif done < 200 and done % 2 == 0:  # a hundred times
            reached.append(int((now >= 0).sum()))
            if reached[-1] > left(done / 200, 40, 10):
                base, rising, falling = base + 0.1 + rising, rising + 0.025, 0.0
            else:
                base, rising, falling = max(0.0, base - 0.1 - falling), 0.0, falling + 0.025
        assert float(method.state()["base"]) == pytest.approx(base)
    assert min(reached) < 20
    assert np.array_equal(method.finalize(weights).numpy(), top(t.detach().numpy(), 10))


def test_hyperflux_masks_come_as_far_in_short_phases() -> None:
    def first_step(steps: int) -> float:
        method, weights, timeline = begin("hyperflux", 0.75, plan=Plan(0, steps, 2, 2))
        before = method.state()["t"].clone()
        step(method, weights, timeline, 0)
        return float((method.state()["t"] - before).abs().max())  # Adam's first step is the learning rate

    assert first_step(12_500) == pytest.approx(1e-3, rel=1e-3)
    assert first_step(1250) == pytest.approx(1e-2, rel=1e-3)


def test_noise_is_a_function_of_seed_step_and_place() -> None:
    seeds, clock = torch.tensor([3, 4]), torch.tensor([5])
    both = uniform(seeds, clock, 100_000, torch.float64)
    assert torch.equal(both[1:], uniform(seeds[1:], clock, 100_000, torch.float64))
    assert not torch.equal(both, uniform(seeds, clock + 1, 100_000, torch.float64))
    assert float(both.min()) > 0
    assert float(both.max()) < 1
    assert float(both.mean()) == pytest.approx(0.5, abs=0.003)
    assert float(both.var()) == pytest.approx(1 / 12, abs=0.001)
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([both[0, 1:], both[0, :-1]]))[0, 1])) < 0.02


def test_the_divergence_of_variational_dropout_has_the_slope_of_its_formula() -> None:
    log_alpha = torch.linspace(-8, 8, 33, dtype=torch.float64).requires_grad_()
    gate = torch.sigmoid(1.87320 + 1.48695 * log_alpha)
    divergence = 0.63576 - 0.63576 * gate + 0.5 * torch.log1p(torch.exp(-log_alpha))
    divergence.sum().backward()
    torch.testing.assert_close(divergence_slope(log_alpha.detach()), log_alpha.grad)


def test_variational_dropout_follows_its_true_gradients_and_prunes_what_is_noise() -> None:
    method, weights, timeline = begin("sparse_vd", 0.6, divergence=0.3, noise_lr=0.05, start=-2.0)
    variance, mean, square = torch.full((1, 40), -2.0, dtype=torch.float64), 0.0, 0.0
    for number in range(10):
        shown = forward_weights(method, weights)
        theta, log_variance = weights.clone().requires_grad_(), variance.clone().requires_grad_()
        drawn = torch.special.ndtri(uniform(torch.tensor([7]), timeline.clock, 40, torch.float64))
        kept = method.mask.clone()
        noisy = torch.where(kept, theta + torch.exp(0.5 * log_variance) * drawn, 0.0)
        torch.testing.assert_close(shown, noisy.detach())
        log_alpha = log_variance - 2 * theta.abs().log()
        gate = torch.sigmoid(1.87320 + 1.48695 * log_alpha)
        divergence = -0.63576 * gate + 0.5 * torch.log1p(torch.exp(-log_alpha))
        given = gradient_like(weights, number)
        strength = 0.3 * (number + 1) / 10
        ((noisy * given) + strength * divergence).sum().backward()
        _, gradient = step(method, weights, timeline, number)
        assert theta.grad is not None
        assert log_variance.grad is not None
        torch.testing.assert_close(gradient, torch.where(kept, theta.grad, 0.0))
        slope = torch.where(kept, log_variance.grad, method.state()["mean"])
        mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope**2
        direction = mean / (1 - 0.9 ** (number + 1)) / ((square / (1 - 0.999 ** (number + 1))).sqrt() + 1e-8)
        variance = variance - 0.05 * cosine(number) * direction
        found = method.state()["log_variance"]
        torch.testing.assert_close(found[kept], variance[kept])
        variance = found.clone()
        noise_share = (variance - 2 * theta.detach().abs().log()).masked_fill(~kept, torch.inf)
        assert np.array_equal(method.mask.numpy(), top(-noise_share.numpy(), left((number + 1) / 10, 40, 16)))
        assert bool((weights[~method.mask] == 0).all())
