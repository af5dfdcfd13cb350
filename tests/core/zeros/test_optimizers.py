"""Whichever optimizer trains: masks hold exactly in every step, and learn the same however the step is called."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import SGD, Optimizer

from gossamer.schedule import Phase
from gossamer.sparsifier import Sparsifier
from gossamer.zeros import keep_zeros
from zeros.networks import BY_NAME
from zeros.running import SPARSITY, TOTAL, Run, assert_zeros, differences, everything, start

MLP, CNN = BY_NAME["mlp"], BY_NAME["cnn"]
Parameters = Iterable[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "sgd_fused": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2, fused=True),
    "sgd_foreach": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2, foreach=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_fused": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adamw_foreach": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adam_amsgrad": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p, lr=0.01, weight_decay=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.003, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "adagrad_fused": lambda p: optim.Adagrad(p, lr=0.05, fused=True),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "asgd": lambda p: optim.ASGD(p, lr=0.01, weight_decay=1e-2),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.2, max_iter=3, history_size=4),
    "lbfgs_wolfe": lambda p: optim.LBFGS(p, lr=1.0, max_iter=4, line_search_fn="strong_wolfe"),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def train_with_closure(run: Run, until: int = TOTAL, watch: Callable[[], None] = lambda: None) -> Run:
    for step in range(run.sparsifier.step, until):

        def closure(step: int = step) -> torch.Tensor:
            watch()
            run.optimizer.zero_grad()
            loss = run.loss(step)
            loss.backward()
            return loss

        run.optimizer.step(closure)
    return run


@every_optimizer
def test_zeros_are_exact_in_every_step(name: str) -> None:
    run = start(MLP, OPTIMIZERS[name])
    seen: set[Phase] = set()

    def watch() -> None:
        # Also in each evaluation inside a step: the loss is always that of the sparse network.
        if run.sparsifier.phase is not Phase.WARMUP:
            assert_zeros(run.model, run.sparsifier)

    for step in range(1, TOTAL + 1):
        train_with_closure(run, step, watch)
        watch()
        seen.add(run.sparsifier.phase)
    assert seen == {Phase.WARMUP, Phase.SPARSIFY, Phase.STABILISE, Phase.FINETUNE}
    assert run.sparsifier.nonzeros == 640 - 512
    assert all(torch.isfinite(parameter).all() for parameter in run.model.parameters())


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.startswith("lbfgs")])
def test_a_closure_changes_nothing(name: str) -> None:
    plain, closed = start(CNN, OPTIMIZERS[name]), start(CNN, OPTIMIZERS[name])
    assert not differences(everything(plain.train()), everything(train_with_closure(closed)))


@pytest.mark.parametrize("given", ["positional", "keyword"])
def test_the_value_of_the_closure_is_returned(given: str) -> None:
    run = start(MLP)
    for step in range(TOTAL):
        losses: list[torch.Tensor] = []

        def closure(step: int = step, losses: list[torch.Tensor] = losses) -> torch.Tensor:
            run.optimizer.zero_grad()
            losses.append(run.loss(step))
            losses[-1].backward()
            return losses[-1]

        value = run.optimizer.step(closure) if given == "positional" else run.optimizer.step(closure=closure)
        assert len(losses) == 1
        assert value is losses[0]


@every_optimizer
def test_zeros_stay_under_keep_zeros(name: str) -> None:
    run = start(MLP).train()
    run.sparsifier.finish()
    optimizer = OPTIMIZERS[name](run.model.parameters())
    masks = run.sparsifier.masks
    with keep_zeros(run.model, optimizer):
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = run.loss(step)
                loss.backward()
                return loss

            optimizer.step(closure)
            parameters = dict(run.model.named_parameters())
            assert all(not parameters[key][~mask].any() for key, mask in masks.items())


@pytest.mark.parametrize("pair", [("sgd_fused", "sgd_foreach"), ("adamw_fused", "adamw_foreach")])
def test_fused_and_foreach_learn_the_same_masks(pair: tuple[str, str]) -> None:
    one, other = (start(MLP, OPTIMIZERS[name], dtype=torch.float64).train() for name in pair)
    assert not differences(one.sparsifier.masks, other.sparsifier.masks)
    torch.testing.assert_close(one.model.state_dict(), other.model.state_dict())


def two_optimizers(run: Run) -> list[Optimizer]:
    weights = [parameter for name, parameter in run.model.named_parameters()]
    return [SGD(weights[:2], lr=0.05, momentum=0.9), SGD(weights[2:], lr=0.05, momentum=0.9)]


def test_two_optimizers_equal_one_with_all_parameters() -> None:
    one = start(MLP, lambda p: SGD(p, lr=0.05, momentum=0.9))
    model = MLP.fresh()
    two = Run(MLP, model, one.optimizer, one.sparsifier, model)
    optimizers = two_optimizers(two)
    two.sparsifier = Sparsifier(model, optimizers, sparsity=SPARSITY, total_steps=TOTAL)
    for step in range(TOTAL):
        one.train(step + 1)
        model.zero_grad()
        two.loss(step).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert not differences(model.state_dict(), one.model.state_dict()), step
        assert not differences(two.sparsifier.masks, one.sparsifier.masks), step


def test_an_optimizer_that_evaluates_again_sees_the_weights_of_the_other_one_sparse() -> None:
    model = MLP.fresh()
    run = start(MLP)
    run = Run(MLP, model, run.optimizer, run.sparsifier, model)
    weights = list(model.parameters())
    optimizers = [optim.LBFGS(weights[:2], lr=0.2, max_iter=3), SGD(weights[2:], lr=0.05)]
    run.sparsifier = Sparsifier(model, optimizers, sparsity=SPARSITY, total_steps=TOTAL)
    evaluations = 0
    for step in range(TOTAL):

        def closure(step: int = step) -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            masks, named = run.sparsifier.masks, dict(model.named_parameters())
            assert all(not named[name][~mask].any() for name, mask in masks.items())
            model.zero_grad()
            loss = run.loss(step)
            loss.backward()
            return loss

        optimizers[0].step(closure)
        optimizers[1].step()
    assert evaluations > TOTAL


def test_a_weight_in_no_optimizer_or_in_two_is_refused() -> None:
    model = MLP.fresh()
    parameters = list(model.parameters())
    optimizers = [SGD(parameters[:2], lr=0.1), SGD([parameters[0]], lr=0.1)]
    with pytest.raises(ValueError, match="cannot be made sparse") as caught:
        Sparsifier(model, optimizers, sparsity=0.5, total_steps=10)
    message = str(caught.value)
    assert "0.weight is in 2 optimizers" in message
    assert "2.weight is not in the optimizer" in message
    assert "4.weight is not in the optimizer" in message


@pytest.mark.parametrize("several", [False, True])
def test_something_else_than_an_optimizer_is_refused(several: bool) -> None:
    model = MLP.fresh()
    schedule: Any = optim.lr_scheduler.LinearLR(SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer or a list of them, got a LinearLR"):
        Sparsifier(model, [schedule] if several else schedule, sparsity=0.5, total_steps=10)


def test_a_parameter_group_added_in_mid_run() -> None:
    class WithExtra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.extra = MLP.build(), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.extra(self.body(x))

    torch.manual_seed(0)
    model = WithExtra()
    optimizer = SGD(model.body.parameters(), lr=0.05, momentum=0.9)
    sparsifier = Sparsifier(model, optimizer, sparsity=SPARSITY, total_steps=TOTAL, exclude=model.extra)
    run = Run(MLP, model, optimizer, sparsifier, model).train(12)
    before = model.extra.weight.detach().clone()
    optimizer.add_param_group({"params": list(model.extra.parameters()), "lr": 0.01})
    run.train()
    assert_zeros(model, sparsifier)
    assert sparsifier.nonzeros == 128
    assert (model.extra.weight != before).all()


def test_a_learning_rate_schedule_runs_as_usual() -> None:
    run = start(MLP)
    schedule: Any = optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.1, total_steps=TOTAL + 1)
    rates = []
    for step in range(TOTAL):
        run.train(step + 1)
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    plain = SGD(MLP.fresh().parameters(), lr=0.05, momentum=0.9)
    expected: Any = optim.lr_scheduler.OneCycleLR(plain, max_lr=0.1, total_steps=TOTAL + 1)
    for rate in rates:
        plain.step()
        expected.step()
        assert rate == expected.get_last_lr()[0]
    assert_zeros(run.model, run.sparsifier)
