"""What a step that is captured in a CUDA graph must not do, seen on a CPU: look at values, bring data, move tensors."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer import budget
from gossamer.methods import METHODS, Layout, budgets, scl
from gossamer.methods.base import Norm
from gossamer.schedule import Plan
from methods.toy import begin, forward_weights, gradient_like, update

LAYOUT = Layout(("a", "b"), ((4, 3, 2), (2, 8)), (Norm(slice(0, 4), slice(4, 8)), None))
SYNCHRONISING = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "is_nonzero", "equal", "_to_copy")


class Watch(TorchDispatchMode):
    """Notes the operations that would make a GPU wait for the host, or the host for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        moves = name == "_to_copy" and "device" in (kwargs or {})
        if name in SYNCHRONISING and (name != "_to_copy" or moves):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the ways of methods that never synchronize, which are those of a GPU."""
    for module in (budget, budgets, scl):
        monkeypatch.setattr(module, "on_cpu", lambda matrix: False)


def test_the_watch_sees_what_it_should() -> None:
    watch = Watch()
    with watch:
        float(torch.ones(()))
        torch.tensor([1.0])
        torch.ones(3)[torch.ones(3) > 0]
    assert set(watch.seen) >= {"_local_scalar_dense", "lift_fresh"}


PATTERNED = [
    (name, pattern)
    for name, method in METHODS.items()
    if method.patterned
    for pattern in ("1:2", "block:2x1", "row")  # of the two tensors, the first has three inputs
]


@pytest.mark.parametrize(("name", "pattern"), [*((name, None) for name in METHODS), *PATTERNED])
def test_a_step_can_be_captured(name: str, pattern: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    settings = {"scl": {"scale": "batch"}, "autoprune": {"two_pass": True}}.get(name, {})
    sparsity = 0.2 if METHODS[name].structured else 0.6
    method, weights, timeline = begin(
        name, sparsity, sparsity, layout=LAYOUT, plan=Plan(0, 20, 5, 5), min_density=0.05, pattern=pattern, **settings
    )
    assert not weights.is_contiguous()
    assert all(tensor.is_contiguous() for tensor in (*method.state().values(), method.mask))  # as kernels need them
    places = {key: tensor.data_ptr() for key, tensor in {**method.state(), "masks": method.mask}.items()}
    others = torch.ones(2, 9, dtype=torch.float64)
    for number in range(25):
        gradient = gradient_like(weights, number)
        rest = torch.zeros_like(others)
        watch = Watch()
        out = torch.empty_like(weights)
        with watch:
            method.apply_masks(weights, out)
            method.add_penalty(rest, others)
            update(method, gradient, weights, LAYOUT)
            method.project(weights)
            method.project_others(others)
            timeline.clock += 1
        assert watch.seen == [], f"step {number}"
        assert torch.equal(
            forward_weights(method, weights), forward_weights(method, weights)
        )  # showing again changes nothing
        weights.sub_(0.1 * gradient)
        if method.topology_due(number + 1):
            method.update_topology(weights, number + 1)
        assert {key: tensor.data_ptr() for key, tensor in {**method.state(), "masks": method.mask}.items()} == places
