"""The contract that every method meets, in any driver."""

import pytest
import torch

from gossamer.methods import METHODS, Layout
from gossamer.methods.base import Norm
from gossamer.schedule import Plan
from methods.toy import begin, forward_weights, gradient_like, step, update

LAYOUT = Layout(("a", "b"), ((4, 3, 2), (2, 8)), (Norm(slice(0, 4), slice(4, 8)), None))
PLAN = Plan(0, 20, 5, 5)


def sparsity_of(name: str) -> float:
    return 0.2 if METHODS[name].structured else 0.6


@pytest.mark.parametrize("name", METHODS)
def test_the_gradient_of_a_closure_is_that_of_the_step(name: str) -> None:
    """`weight_gradient` alone makes of a gradient what `update_masks` makes of it."""
    settings = {"autoprune": {"two_pass": True}, "feather": {"pruned_grad_scale": 0.5}}.get(name, {})
    method, weights, timeline = begin(name, sparsity_of(name), layout=LAYOUT, plan=PLAN, **settings)
    method.project(weights)
    changed = False
    for number in range(25):
        forward_weights(method, weights)
        given = gradient_like(weights, number)
        alone, learned = given.clone(), given.clone()
        method.weight_gradient(alone, weights)
        update(method, learned, weights, LAYOUT)
        assert torch.equal(alone, learned), number
        changed |= not torch.equal(alone, given)
        weights.sub_(0.1 * learned)
        method.project(weights)
        timeline.set(number + 1)
        if method.topology_due(number + 1):
            method.update_topology(weights, number + 1)
    assert changed or name in ("dense", "dpf", "surgery", "soft_filter", "proximal", "platon")


@pytest.mark.parametrize("name", METHODS)
def test_the_forward_pass_uses_masked_weights_where_it_says_so(name: str) -> None:
    method, weights, timeline = begin(name, sparsity_of(name), layout=LAYOUT, plan=PLAN)
    method.project(weights)
    differs = False
    for number in range(25):
        masked = torch.where(method.mask, weights, 0.0)
        differs |= not torch.equal(forward_weights(method, weights), masked)
        step(method, weights, timeline, number, LAYOUT)
    assert differs is not METHODS[name].masked_forward


@pytest.mark.parametrize("name", METHODS)
def test_tabulated_numbers_are_those_that_are_set_before_each_step(name: str) -> None:
    found = []
    for tabulated in (True, False):
        method, weights, timeline = begin(
            name, *[sparsity_of(name)] * 2, layout=LAYOUT, plan=PLAN, tabulated=tabulated, min_density=0.05
        )
        method.project(weights)
        for number in range(25):
            forward_weights(method, weights)
            step(method, weights, timeline, number, LAYOUT)
        found.append((method.finalize(weights), weights))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", METHODS)
def test_a_method_goes_on_from_its_state(name: str) -> None:
    method, weights, timeline = begin(name, sparsity_of(name), layout=LAYOUT, plan=PLAN, min_density=0.05)
    other, other_weights, other_timeline = begin(name, sparsity_of(name), layout=LAYOUT, plan=PLAN, min_density=0.05)
    method.project(weights)
    for number in range(25):
        if number == 13:
            other.load_state({key: tensor.clone() for key, tensor in method.state().items()})
            other_weights.copy_(weights)
            other_timeline.set(number)
        forward_weights(method, weights)
        step(method, weights, timeline, number, LAYOUT)
        if number >= 13:
            forward_weights(other, other_weights)
            step(other, other_weights, other_timeline, number, LAYOUT)
            assert torch.equal(other.mask, method.mask)
            assert torch.equal(other_weights, weights)
    assert torch.equal(other.finalize(other_weights), method.finalize(weights))
