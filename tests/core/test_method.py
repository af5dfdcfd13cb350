"""methods/scl.py against the NumPy reference and against the paper's statements. Each equation is claimed by a test."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import scl
from torch import Tensor, nn

import gossamer
from gossamer.methods import scl as method
from gossamer.prunable import along_features, by_feature
from gossamer.schedule import cosine

LAYOUTS = [
    ((5, 7), 0, 1),
    ((6, 2, 3, 3), 0, 1),
    ((6, 4, 3), 1, 1),
    ((6, 4, 3, 3), 1, 3),
]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.equation("step")
def test_unit_step_is_zero_at_exactly_zero() -> None:
    m = torch.tensor([-1.0, -0.0, 0.0, 1e-45, 2.0])
    assert method.unit_step(m).tolist() == [False, False, False, True, True]


@pytest.mark.equation("mask", "sparseweights")
def test_masked_weight_is_the_weight_or_positive_zero() -> None:
    w = torch.tensor([-1.5, -2.5, 3.0])
    result = method.masked_weight(w, torch.tensor([True, False, False]))
    assert result.tolist() == [-1.5, 0.0, 0.0]
    assert not torch.signbit(result[1:]).any()


@pytest.mark.equation("identity", "lrelu", "softplus", "relu", "crelu", "step_redefine3")
@pytest.mark.parametrize("name", method.ESTIMATORS)
def test_estimators_agree_with_the_reference(name: str) -> None:
    m = torch.cat([numbers(200), torch.tensor([0.0, 0.1])])
    ours = method.ESTIMATORS[name](m, 0.1)
    theirs = scl.estimator(name, 0.1).derivative(m.numpy())
    torch.testing.assert_close(ours, torch.from_numpy(np.asarray(theirs, dtype=np.float64)), rtol=1e-12, atol=0)


@pytest.mark.equation("ste_l2_gradient_0")
@pytest.mark.parametrize(
    ("name", "positive"), [(n, n in ("identity", "leaky_relu", "softplus")) for n in method.ESTIMATORS]
)
def test_which_estimators_are_positive_everywhere(name: str, positive: bool) -> None:
    m = torch.linspace(-3, 3, 601)
    assert bool((method.ESTIMATORS[name](m, 0.5) > 0).all()) is positive


@pytest.mark.equation("weight_redefine", "w_gradient")
@pytest.mark.parametrize("asked", [1.0, 0.25, 0.0, None])
def test_pruned_weights_follow_their_share_of_the_gradient_of_the_weights_in_use(asked: float | None) -> None:
    layer = nn.Linear(6, 4, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    phases = {"warmup": "0it", "sparsify": "1it", "stabilise": "5it"}
    sparsifier = gossamer.Sparsifier(
        layer, optimizer, sparsity=0.5, total_steps=9, min_density=0.0, pruned_grad_scale=asked, **phases
    )
    share = 0.5**0.4 if asked is None else asked
    x, y = numbers(8, 6, seed=1), numbers(8, 4, seed=2)
    layer(x).sum().backward()
    optimizer.step()  # the budget is met in this one
    for _ in range(3):
        before, used = sparsifier.state_dict()["dense"]["weight"], sparsifier.masks["weight"].clone()
        optimizer.zero_grad()
        (layer(x) - y).square().mean().backward()
        assert layer.weight.grad is not None
        gradient = layer.weight.grad.clone()
        optimizer.step()
        after, mask = sparsifier.state_dict()["dense"]["weight"], sparsifier.masks["weight"]
        followed = torch.where(used, gradient, share * gradient)
        torch.testing.assert_close(after, before - 0.1 * followed, rtol=1e-12, atol=0)
        torch.testing.assert_close(
            method.weight_gradient_(gradient.clone(), used, used.to(gradient.dtype), pruned_scale=share),
            followed,
            rtol=0,
            atol=0,
        )
        assert not layer.weight[~mask].any()
        assert gradient[~mask].abs().min() > 0  # there is something to follow


class Twice(torch.optim.Optimizer):
    """Evaluates twice a step, as LBFGS does, and descends each time."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            loss = closure()
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.sub_(0.1 * parameter.grad)
        return loss


def test_removed_weights_rest_also_where_an_optimizer_evaluates_again() -> None:
    net = nn.Linear(6, 8, bias=False, dtype=torch.float64)
    optimizer = Twice(net.parameters())
    phases = {"warmup": "0it", "sparsify": "1it", "stabilise": "8it"}
    sparsifier = gossamer.Sparsifier(net, optimizer, sparsity=0.5, total_steps=9, pruned_grad_scale=0.0, **phases)
    x, y = numbers(16, 6, seed=1), numbers(16, 8, seed=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    for _ in range(4):
        before, used = sparsifier.state_dict()["dense"]["weight"], sparsifier.masks["weight"].clone()
        optimizer.step(closure)
        after, mask = sparsifier.state_dict()["dense"]["weight"], sparsifier.masks["weight"]
        assert torch.equal(after[~used & ~mask], before[~used & ~mask])
        assert (after != before)[used & mask].all()


@pytest.mark.equation("step_redefine", "loss")
@pytest.mark.parametrize("name", method.ESTIMATORS)
@pytest.mark.parametrize("l2", [0.0, 0.03])
def test_mask_gradient_agrees_with_the_reference(name: str, l2: float) -> None:
    g, w, m = numbers(5, 4, seed=1), numbers(5, 4, seed=2), numbers(5, 4, seed=3)
    ours = method.mask_gradient(g, w, m, estimator=name, alpha=0.2, l2=l2)
    theirs = scl.mask_gradient(g.numpy(), w.numpy(), m.numpy(), sigma=scl.estimator(name, 0.2), l2=l2)
    torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=1e-12, atol=1e-15)


@pytest.mark.equation("grad_norm")
@pytest.mark.parametrize(("shape", "axis", "groups"), LAYOUTS)
@given(seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_feature_scale_agrees_with_the_reference(shape: tuple[int, ...], axis: int, groups: int, seed: int) -> None:
    g = numbers(*shape, seed=seed)
    layout = scl.Layout(transposed=axis == 1, groups=groups)
    scale = method.feature_scale(g, axis, groups)
    ours = g / along_features(method.divisor(scale), g, axis, groups)
    theirs = scl.normalise(g.numpy(), scl.batch_scale(g.numpy(), layout))
    torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=1e-10, atol=1e-14)


@pytest.mark.equation("grad_norm")
@pytest.mark.parametrize(("shape", "axis", "groups"), LAYOUTS)
def test_sample_scale_is_the_literal_equation(shape: tuple[int, ...], axis: int, groups: int) -> None:
    samples = 6
    per_sample, w = numbers(samples, *shape, seed=4), numbers(*shape, seed=5)
    layout = scl.Layout(transposed=axis == 1, groups=groups)
    literal = scl.per_sample_scale(per_sample.numpy(), w.numpy(), layout)
    # Autograd delivers the gradients of a mean: each already divided by the number of samples.
    totals = sum(by_feature((g / samples * w).square(), axis, groups).sum(1) for g in per_sample)
    assert isinstance(totals, Tensor)
    ours = method.sample_scale(totals, samples, w.numel() // totals.numel())
    ours_laid_out = along_features(ours, w, axis, groups).expand_as(w)
    theirs = torch.from_numpy(np.broadcast_to(literal, w.shape).copy())
    torch.testing.assert_close(ours_laid_out, theirs, rtol=1e-10, atol=0)


def test_global_scale_is_one_root_mean_square() -> None:
    tensors = [numbers(3, 4, seed=6), numbers(7, seed=7)]
    squares = torch.stack([t.square().sum() for t in tensors])
    expected = torch.cat([t.flatten() for t in tensors]).square().mean().sqrt()
    torch.testing.assert_close(method.global_scale(squares, 19), expected[None])


@pytest.mark.equation("grad_norm")
def test_a_feature_without_gradient_is_left_alone_and_tiny_ones_are_not() -> None:
    scale = torch.tensor([0.0, 1e-9, 2.0])
    assert method.divisor(scale).tolist() == pytest.approx([1.0, 1e-9 + 1e-12, 2.0], rel=1e-6)


@pytest.mark.equation("connectivity")
def test_decay_pushes_every_mask_variable_down_alike() -> None:
    m, g = numbers(4, 3, seed=8), numbers(4, 3, seed=9)
    expected = torch.from_numpy(scl.decay_step(m.numpy(), np.zeros(m.shape), g.numpy(), rate=0.1, decay=0.03)[0])
    direction = method.descent_direction_(g.clone(), decay=0.03)
    method.update_mask_variable_(m, direction, learning_rate=torch.tensor(0.1, dtype=torch.float64))
    torch.testing.assert_close(m, expected, rtol=1e-12, atol=0)


def test_cosine_goes_from_one_to_zero() -> None:
    assert [cosine(t) for t in (-1.0, 0.0, 0.5, 1.0, 2.0)] == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0])


def test_every_equation_of_the_file_is_claimed_by_a_test() -> None:
    tagged = set(re.findall(r"Eqs?\. \((\w+)\)", Path(method.__file__).read_text()))
    claims = re.findall(r"mark\.equation\(([^)]*)\)", Path(__file__).read_text())
    claimed = set(re.findall(r'"(\w+)"', " ".join(claims)))
    assert tagged - {"name"} == claimed
