"""`torch.compile` of the optimizer's step: the hooks still run, and the trajectory is the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from gossamer.sparsifier import Sparsifier
from gossamer.zeros import keep_zeros
from zeros.networks import BY_NAME
from zeros.running import SPARSITY, TOTAL, Run, assert_zeros, differences, everything, sgd, start, zeros

# The compiler imports code of torch that warns about itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
MLP = BY_NAME["mlp"]


@pytest.fixture(autouse=True)
def _no_compiled_code_left() -> None:
    torch._dynamo.reset()


def _method(optimizer: Optimizer) -> Callable[[], Any]:
    return torch.compile(optimizer.step, backend="aot_eager")


def _function(optimizer: Optimizer) -> Callable[[], Any]:
    return torch.compile(lambda: optimizer.step(), backend="aot_eager")


def train(run: Run, step: Callable[[], Any], steps: int = TOTAL) -> None:
    for number in range(steps):
        run.optimizer.zero_grad()
        run.loss(number).backward()
        step()


@pytest.mark.parametrize("compiled", [_method, _function], ids=["method", "function"])
@pytest.mark.parametrize("make", [sgd, lambda p: AdamW(p, lr=0.01)], ids=["sgd", "adamw"])
def test_a_compiled_step_is_the_same_step(compiled: Callable[..., Any], make: Callable[..., Optimizer]) -> None:
    eager, run = start(MLP, make).train(), start(MLP, make)
    train(run, compiled(run.optimizer))
    assert run.sparsifier.step == TOTAL
    assert_zeros(run.model, run.sparsifier)
    assert not differences(eager.sparsifier.masks, run.sparsifier.masks)
    # Weights that fade in (AdamW) change fast near the threshold, and rounding with them.
    torch.testing.assert_close(run.model.state_dict(), eager.model.state_dict(), rtol=1e-3, atol=1e-4)


def test_hooks_do_not_make_the_step_compile_again() -> None:
    run = start(MLP)
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    train(run, torch.compile(run.optimizer.step, backend=count))
    assert 1 <= graphs <= 3  # the first step is another one: it makes the momentum buffers


def test_a_step_compiled_before_there_was_a_sparsifier() -> None:
    model = MLP.fresh()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = torch.compile(optimizer.step, backend="aot_eager")
    (model(MLP.batch(0)[0]) ** 2).mean().backward()
    step()
    sparsifier = Sparsifier(model, optimizer, sparsity=SPARSITY, total_steps=TOTAL)
    train(Run(MLP, model, optimizer, sparsifier, model), step)
    assert sparsifier.step == TOTAL
    assert abs(sparsifier.sparsity - SPARSITY) < 0.01
    assert_zeros(model, sparsifier)


def test_fullgraph_says_what_to_do() -> None:
    run = start(MLP)
    run.loss(0).backward()
    with pytest.raises(Exception, match="without fullgraph=True"):
        torch.compile(run.optimizer.step, backend="aot_eager", fullgraph=True)()


def test_a_whole_compiled_training_step() -> None:
    eager, run = start(MLP).train(), start(MLP)

    @torch.compile(backend="aot_eager")
    def train_step(number: int) -> None:
        run.optimizer.zero_grad()
        run.loss(number).backward()
        run.optimizer.step()

    for number in range(TOTAL):
        train_step(number)
    assert not differences(eager.sparsifier.masks, run.sparsifier.masks)
    assert_zeros(run.model, run.sparsifier)


def test_a_compiled_step_under_keep_zeros() -> None:
    run = start(MLP).train()
    run.sparsifier.finish()
    before = zeros(run.model)
    with keep_zeros(run.model, run.optimizer):
        train(run, _method(run.optimizer), steps=4)
    after = zeros(run.model)
    assert all(torch.equal(after[name], before[name]) for name in run.sparsifier.masks)


def test_compiling_leaves_eager_runs_as_they_are() -> None:
    before = everything(start(MLP).train())
    torch.compile(MLP.fresh(), backend="aot_eager")(MLP.batch(0)[0])
    assert not differences(before, everything(start(MLP).train()))
