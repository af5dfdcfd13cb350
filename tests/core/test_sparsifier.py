"""What a user asks for is what comes out: exact budgets, the floor, phases, health, and errors that say what to do."""

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer
from gossamer.flops import positions
from gossamer.methods.scl import SCL
from gossamer.schedule import Phase
from gossamer.settings import RENAMED


def small_network(widths: list[int], *, convolution: bool) -> nn.Module:
    layers: list[nn.Module] = []
    if convolution:
        layers += [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, stride=2), nn.Flatten()]
    else:
        layers += [nn.Flatten()]
    before = 2 * 2 * 2 if convolution else 36
    for width in widths:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, 3))


def train(model: nn.Module, steps: int = 24, **asked: Any) -> gossamer.Sparsifier:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    phases = {"warmup": "4it", "sparsify": "10it", "stabilise": "4it"}
    sparsifier = gossamer.Sparsifier(model, optimizer, total_steps=steps, **{**phases, **asked})
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        images = torch.randn(8, 1, 6, 6, generator=generator)
        F.cross_entropy(model(images), images.mean((1, 2, 3)).gt(0).long()).backward()
        optimizer.step()
        optimizer.zero_grad()
    sparsifier.finish()
    return sparsifier


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.dim() > 1]


@given(
    widths=st.lists(st.integers(1, 20), max_size=3),
    convolution=st.booleans(),
    sparsity=st.floats(0.0, 0.9),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_sparsity_is_exact_on_any_model_and_seed(
    widths: list[int], convolution: bool, sparsity: float, seed: int
) -> None:
    torch.manual_seed(seed)
    model = small_network(widths, convolution=convolution)
    total = sum(weight.numel() for weight in weights_of(model))
    expected = total - math.floor(total * sparsity + 0.5)
    if expected < len(weights_of(model)):
        return  # less than the floor of one connection a tensor; refused, see below
    sparsifier = train(model, sparsity=sparsity)
    assert sum(int((weight != 0).sum()) for weight in weights_of(model)) == expected
    assert sparsifier.nonzeros == expected
    assert all((weight != 0).any() for weight in weights_of(model))


@pytest.mark.parametrize("flops", [0.05, 0.1, 0.5, 0.93])
@pytest.mark.parametrize("seed", range(3))
def test_flops_are_exact_to_one_connection(flops: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = small_network([20, 10], convolution=True)
    example = torch.randn(1, 1, 6, 6)
    sparsifier = train(model, flops=flops, example_input=example)
    cost = positions(model, sparsifier.weights, example)
    total = sum(weight.parameter.numel() * cost[weight.name] for weight in sparsifier.weights)
    spent = sum(int((weight.parameter != 0).sum()) * cost[weight.name] for weight in sparsifier.weights)
    budget = math.floor(total * flops)
    assert budget - max(cost.values()) < spent <= budget
    assert gossamer.report(model, example).flops_reduction == pytest.approx(1 - spent / total)


def test_the_floor_keeps_a_share_of_every_tensor_and_zero_lets_them_die() -> None:
    torch.manual_seed(1)
    model = small_network([30, 30], convolution=False)
    with torch.no_grad():
        weights_of(model)[1].mul_(1e-6)  # a layer that magnitude and loss both would remove
    frozen = {"mask_lr": 1e-9}
    kept = train(model, sparsity=0.9, min_density=0.05, **frozen)
    counts = [int((weight != 0).sum()) for weight in weights_of(model)]
    assert counts[1] == math.ceil(0.05 * 900)
    assert sum(counts) == kept.nonzeros == 2070 - math.floor(2070 * 0.9 + 0.5)
    torch.manual_seed(1)
    model = small_network([30, 30], convolution=False)
    with torch.no_grad():
        weights_of(model)[1].mul_(1e-6)
    train(model, sparsity=0.9, min_density=0.0, **frozen)
    assert int((weights_of(model)[1] != 0).sum()) < 5


def test_fixed_decay_and_the_rule_to_leave_the_sparsify_phase() -> None:
    torch.manual_seed(2)
    model = small_network([20], convolution=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparsifier = gossamer.Sparsifier(
        model, optimizer, decay=0.5, leave_at=0.5, preset="paper", total_steps=400, warmup="10it", sparsify="300it",
        stabilise="20it", start_value=1.0,
    )  # fmt: skip
    phases = []
    for _ in range(400):
        images = torch.randn(8, 1, 6, 6)
        F.cross_entropy(model(images), images.mean((1, 2, 3)).gt(0).long()).backward()
        optimizer.step()
        optimizer.zero_grad()
        phases.append(sparsifier.phase)
    assert phases.count(Phase.SPARSIFY) < 300
    assert phases.count(Phase.STABILISE) == 20
    assert sparsifier.sparsity >= 0.5
    assert set(sparsifier.health().decay) == {0.5}
    sparsifier.finish()


def test_health_tells_how_it_goes() -> None:
    torch.manual_seed(3)
    model = small_network([20], convolution=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparsifier = gossamer.Sparsifier(
        model,
        optimizer,
        sparsity=0.8,
        total_steps=60,
        steps_per_epoch=10,
        warmup="1ep",
        sparsify="3ep",
        stabilise="1ep",
    )
    health = sparsifier.health()  # in the warm-up there is nothing to tell yet
    assert (health.steps, health.flips, health.skipped_steps) == ((), (), 0)
    assert [layer.nonzeros for layer in health.layers] == [weight.parameter.numel() for weight in sparsifier.weights]
    assert not health.dead_layers
    assert sparsifier.health(layers=False).layers == ()
    for _ in range(45):
        images = torch.randn(8, 1, 6, 6)
        F.cross_entropy(model(images), images.mean((1, 2, 3)).gt(0).long()).backward()
        optimizer.step()
        optimizer.zero_grad()
    health = sparsifier.health()
    assert [layer.name for layer in health.layers] == [weight.name for weight in sparsifier.weights]
    assert [layer.nonzeros for layer in health.layers] == [int((w.parameter != 0).sum()) for w in sparsifier.weights]
    assert sum(layer.nonzeros for layer in health.layers) == health.nonzeros[-1] == sparsifier.nonzeros
    assert health.steps[0] == 10
    assert list(health.nonzeros) == sorted(health.nonzeros, reverse=True)
    assert all(layer.gradient_scale > 0 and layer.margin is not None for layer in health.layers)
    assert health.flips_per_epoch is not None
    assert sum(health.flips) >= 0.8 * sum(w.numel() for w in weights_of(model))
    assert health.skipped_steps == 0
    assert health.dead_layers == ()


def test_finishing_early_cuts_to_the_target_and_says_so() -> None:
    torch.manual_seed(4)
    model = small_network([20], convolution=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.75, total_steps=100)
    with pytest.warns(UserWarning, match="finish\\(\\) after 0 of 100 steps, in the warm-up phase"):
        sparsifier.finish()
    assert sum(int((weight != 0).sum()) for weight in weights_of(model)) == 780 - 585
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsifier.finish()
    with pytest.raises(RuntimeError, match="create a new Sparsifier"):
        sparsifier.advance()


def test_extra_memory_is_two_weight_sized_tensors_and_the_masks() -> None:
    model = small_network([200, 200], convolution=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.9, total_steps=10, warmup="0it")
    driver = sparsifier._begin()
    tensors = [driver.state.dense, *driver.training.state().values()]
    held = {id(t): t for t in tensors if t.shape == driver.mask.shape}
    total = sum(weight.numel() for weight in weights_of(model))
    assert sum(tensor.numel() * tensor.element_size() for tensor in held.values()) == (4 + 4 + 1) * total


def refused(message: str, *, model: nn.Module | None = None, **asked: Any) -> None:
    model = small_network([20], convolution=False) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((ValueError, TypeError), match=message):
        gossamer.Sparsifier(model, optimizer, **{"total_steps": 100, **asked})


def test_bad_requests_say_what_was_expected() -> None:
    refused("expected one of sparsity= .* got none of them")
    refused("got sparsity, decay", sparsity=0.5, decay=0.1)
    refused("expected sparsity to be at least 0 and below 1, such as 0.95, got 95", sparsity=95)
    refused("expected decay to be a number of at least 0", decay=-1.0)
    refused("expected flops to be the fraction to keep", flops=0.0)
    refused("flops= needs example_input=", flops=0.1)
    refused("leave_at= requires decay=", sparsity=0.9, leave_at=0.5)
    refused("keeps 1 of .* weights, but min_density requires 2", sparsity=0.999)
    refused("expected one of the presets default, paper, got 'papre'", sparsity=0.5, preset="papre")
    refused("unknown setting 'masks_lr' of method='scl': did you mean 'mask_lr'", sparsity=0.5, masks_lr=1.0)
    refused("estimator: expected one of identity, .* got 'ste'", sparsity=0.5, estimator="ste")
    refused("mask_decay: expected a number of at least 0 and below 1, got 1.0", sparsity=0.5, mask_decay=1.0)
    refused("mask_decay: expected a number of at least 0 and below 1, got -0.1", sparsity=0.5, mask_decay=-0.1)
    refused("mask_decay_cap: expected a number of at least 1, or 0, got 0.5", sparsity=0.5, mask_decay_cap=0.5)
    refused("mask_decay_cap: expected a number of at least 1, or 0, got nan", sparsity=0.5, mask_decay_cap=math.nan)
    refused("take 125 steps, but the run has only 100", sparsity=0.5, warmup="110it", sparsify="0it")


def test_weights_that_cannot_be_made_sparse_are_refused() -> None:
    refused("nothing", model=nn.Sequential(nn.BatchNorm1d(4)), sparsity=0.5)
    refused("sparse", model=nn.Sequential(nn.Embedding(10, 4, sparse=True)), sparsity=0.5)
    model = small_network([20], convolution=False)
    partial = torch.optim.SGD(list(model.parameters())[:1], lr=0.1)
    with pytest.raises(ValueError, match=r"3\.weight is not in the optimizer: pass the optimizer that updates it"):
        gossamer.Sparsifier(model, partial, sparsity=0.5, total_steps=100)
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"1\.weight is in 2 optimizers: keep it in one of them"):
        gossamer.Sparsifier(model, [whole, partial], sparsity=0.5, total_steps=100)


@pytest.mark.parametrize(
    ("steps", "asked", "expected"), [(6000, None, 0.01), (90000, None, 0.003), (60, None, 0.015), (400, 0.2, 0.2)]
)
def test_masks_learn_faster_where_they_have_few_steps(steps: int, asked: float | None, expected: float) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phases = {"warmup": "0it", "sparsify": f"{steps // 2}it", "stabilise": f"{steps // 2}it"}
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.5, total_steps=steps, mask_lr=asked, **phases)
    sparsifier.advance()
    assert sparsifier._driver is not None
    method = sparsifier._driver.method
    assert isinstance(method, SCL)
    assert float(sparsifier._driver.timeline.now(method._rate)) == pytest.approx(expected)


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_the_size_of_a_weight_counts_up_to_a_cap(cap: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(20, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    phases = {"warmup": "0it", "sparsify": "20it", "stabilise": "79it"}
    sparsifier = gossamer.Sparsifier(
        model, optimizer, sparsity=0.5, total_steps=100, mask_decay=0.2, mask_decay_cap=cap, mask_lr=1e-6, **phases
    )
    assert sparsifier._driver is not None
    state, method = sparsifier._driver.state, sparsifier._driver.method
    assert isinstance(method, SCL)
    for step in range(90):
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 40:
            where = int((~method.mask[0]).nonzero()[0])
            state.dense[0, where] = 1000.0
    highest = float(method.mask_variable[0, where] + method._level)
    cut = float(state.dense.abs()[method.mask].min())
    assert float(method._level) == pytest.approx(cut, rel=0.1)
    usual = float(method._usual)
    assert highest == pytest.approx(3 * max(cut, usual) if cap else 900.0, rel=0.15)


def test_with_a_flops_budget_the_cap_goes_with_what_a_connection_costs() -> None:
    """The weights rest, so that all sizes are known: m̃ is the size of a weight, less the level times its cost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    images = torch.randn(4, 1, 8, 8)
    sparsifier = gossamer.Sparsifier(
        model, optimizer, flops=0.4, example_input=images, total_steps=100, mask_decay=0.2, mask_decay_cap=3.0,
        mask_lr=1e-8, min_density=0.0, warmup="0it", sparsify="20it", stabilise="79it",
    )  # fmt: skip
    assert sparsifier._driver is not None
    state, method = sparsifier._driver.state, sparsifier._driver.method
    assert isinstance(method, SCL)
    sizes = torch.cat([model[0].weight.flatten(), model[2].weight.flatten()]).detach().abs().double()
    cost = torch.cat([torch.full((36,), 36), torch.full((432,), 1)])  # multiply-adds: 6 × 6 positions, or one
    usual = float(sizes.square().mean().sqrt())
    giants = []
    for step in range(98):
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 30:
            removed = (~method.mask[0]).nonzero().flatten().tolist()
            giants = [min(removed), max(removed)]  # one of each tensor
            state.dense[0, giants] = 1000.0
    assert giants[0] < 36 <= giants[1]
    sizes[giants] = 1000.0
    order = (sizes / cost).argsort(descending=True)
    fits = cost[order].cumsum(0) <= int(0.4 * (36 * 36 + 432))
    level = float((sizes / cost)[order][~fits][0])  # the first one that goes
    assert float(method._level) == pytest.approx(level, rel=1e-3)
    assert level * 1 < usual < level * 36  # so both sides of the bound are seen
    for giant in giants:
        highest = float(method.mask_variable[0, giant]) + level * int(cost[giant])
        assert highest == pytest.approx(3 * max(level * int(cost[giant]), usual), rel=1e-3)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_renamed_setting_still_works_under_its_old_name_and_says_so(old: str, new: str) -> None:
    value = 0.25 if old != "anchor_cap" else 2.0
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(DeprecationWarning, match=f"{old} is {new}"):
        sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.5, total_steps=9, **{old: value})
    assert value in (getattr(sparsifier.settings, new), getattr(sparsifier.phases, new, None))
    with pytest.raises(TypeError, match=f"{old} is the old name of {new}, and both are set"):
        gossamer.Sparsifier(model, optimizer, sparsity=0.5, total_steps=9, **{old: value, new: value})
