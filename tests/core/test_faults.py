"""Numbers that are not finite, steps that are nested or cut short, parameters that are replaced: nothing goes wrong in
silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import gossamer
from gossamer.methods import METHODS
from gossamer.schedule import Phase

TOTAL = 24  # optimizer steps: 6 of warm-up, 8 to sparsify, 4 to stabilise, 6 of fine-tuning
METHODS_OF_WEIGHTS = [name for name, method in METHODS.items() if not method.structured and name != "dense"]


class Training:
    """A small network in training."""

    def __init__(self, make: Callable[[Any], Optimizer] = lambda p: torch.optim.SGD(p, lr=0.05), **asked: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 4))
        self.optimizer = make(self.model.parameters())
        phases = {"warmup": "0.25run", "sparsify": "0.35run", "stabilise": "0.15run"}  # the same for every method
        asked = {"sparsity": 0.8, "total_steps": TOTAL, **phases} | asked
        self.sparsifier = gossamer.Sparsifier(self.model, self.optimizer, **asked)

    def backward(self, step: int) -> Tensor:
        inputs = torch.randn(8, 10, generator=torch.Generator().manual_seed(step))
        loss: Tensor = (self.model(inputs) - inputs[:, :4]).square().mean()
        loss.backward()
        return loss

    def steps(self, first: int = 0, last: int = TOTAL) -> "Training":
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.backward(step)
            self.optimizer.step()
        return self

    @property
    def weights(self) -> list[Tensor]:
        return [self.model[0].weight, self.model[2].weight]


class Nested(Adam):
    """An optimizer whose step calls its parent's, as many do."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("method", METHODS_OF_WEIGHTS)
def test_a_step_that_calls_its_parents_is_one_step(method: str, closure: bool) -> None:
    """torch runs the hooks twice then, once the parent class has been instantiated."""
    plain = Training(lambda p: Adam(p, lr=0.01), method=method).steps()  # instantiates the parent
    nested = Training(lambda p: Nested(p, lr=0.01), method=method)
    for step in range(TOTAL):
        nested.optimizer.zero_grad()
        if closure:
            nested.optimizer.step(lambda step=step: nested.backward(step))  # type: ignore[misc]
        else:
            nested.backward(step)
            nested.optimizer.step()
        assert nested.sparsifier.step == step + 1
    for ours, theirs in zip(nested.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert nested.sparsifier.phase is Phase.FINETUNE


def test_an_exception_in_a_nested_step_leaves_nothing_behind() -> None:
    Training(lambda p: Adam(p, lr=0.01))
    training = Training(lambda p: Nested(p, lr=0.01)).steps(0, 10)

    def fail() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.optimizer.step(fail)
    training.steps(10, 20)
    assert training.sparsifier.step == 21  # the failed step was one of the plan
    assert sum(int((weight != 0).sum()) for weight in training.weights) == 168 - 134


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("method", METHODS_OF_WEIGHTS)
def test_a_network_that_diverged_in_warm_up_is_named_where_masks_begin(method: str, value: float) -> None:
    if METHODS[method].from_start:
        pytest.skip("has no warm-up")
    training = Training(method=method).steps(0, 5)
    with torch.no_grad():
        training.model[2].weight[1, 2] = value
    with pytest.raises(RuntimeError, match=r"prunable weights are not finite .*2\.weight"):
        training.steps(5, 7)


def test_a_weight_that_is_never_used_stops_nothing_unseen() -> None:
    """NaN in one row of an embedding that no batch contains, which would stop all mask learning."""
    embedding = nn.Embedding(5, 4)
    model = nn.Sequential(embedding, nn.Linear(4, 3))
    with torch.no_grad():
        embedding.weight[4] = torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossamer.Sparsifier(model, optimizer, sparsity=0.5, total_steps=10, warmup="0it")
    model(torch.tensor([0, 1, 2, 3])).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"prunable weights are not finite .*: 0\.weight"):
        optimizer.step()


@pytest.mark.parametrize("when", [8, 16])
def test_weights_that_become_nan_while_masks_train_end_the_run_with_an_error(when: int) -> None:
    training = Training().steps(0, when)

    def spoil(parameter: Tensor) -> None:
        parameter.grad.fill_(torch.nan)  # type: ignore[union-attr]

    training.model[0].weight.register_post_accumulate_grad_hook(spoil)
    with (
        pytest.warns(UserWarning, match="not finite"),
        pytest.raises(RuntimeError, match=r"not finite .*: 0\.weight"),
    ):
        training.steps(when)


def test_weights_that_become_nan_in_fine_tuning_are_named_by_finish() -> None:
    training = Training().steps(0, 22)
    with torch.no_grad():
        training.model[2].weight[training.model[2].weight != 0] = torch.inf
    with pytest.raises(RuntimeError, match=r"weights that are not finite .* in 2\.weight"):
        training.sparsifier.finish()
    assert training.sparsifier.phase is Phase.FINISHED  # with its hooks gone


@pytest.mark.parametrize("when", [3, 10, 20])
def test_a_parameter_replaced_in_mid_run_is_an_error(when: int) -> None:
    training = Training().steps(0, when)
    training.model[0].weight = nn.Parameter(training.model[0].weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"the parameter 0\.weight of the model is not the one that was made sparse"):
        training.sparsifier.finish()


def test_what_finish_leaves_is_as_sparse_as_it_says() -> None:
    training = Training().steps()
    training.sparsifier.finish()
    zeros = sum(int((weight == 0).sum()) for weight in training.weights)
    assert zeros == 134
    assert training.sparsifier.sparsity == pytest.approx(zeros / 168)


@pytest.mark.parametrize("entry", ["dense", "mask", "mask_variable", "network", "log", "plan", "step", "topology_done"])
def test_a_state_that_lacks_an_entry_changes_nothing(entry: str) -> None:
    state = Training().steps(0, 10).sparsifier.state_dict()
    del state[entry]
    other = Training().steps(0, 12)
    before = other.sparsifier.state_dict()
    weights = [weight.detach().clone() for weight in other.weights]
    with pytest.raises(ValueError, match="state"):
        other.sparsifier.load_state_dict(state)
    after = other.sparsifier.state_dict()
    assert after.keys() == before.keys()
    for name in ("dense", "mask", "mask_variable"):
        assert all(torch.equal(after[name][key], before[name][key]) for key in before[name])
    assert after["step"] == before["step"]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(other.weights, weights, strict=True))
