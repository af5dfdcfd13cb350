"""Masks that follow the optimizer, and weights that fade in and out: the default of scl under adaptive rates."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.methods import DPF
from gossamer.methods.feather import fade
from gossamer.methods.scl import faded_weight, follow_step_

STEPS = 30
PHASES = {"warmup": "3it", "sparsify": "15it", "stabilise": "8it"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 5)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 12, generator=generator, dtype=torch.float64), torch.randint(5, (16,), generator=generator))
        for _ in range(STEPS)
    ]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def test_a_step_of_gradient_descent_moves_masks_along_the_sign_rule() -> None:
    weight, gradient = torch.randn(1, 50, dtype=torch.float64), torch.randn(1, 50, dtype=torch.float64)
    variable = weight.abs()
    follow_step_(variable, weight, weight - 0.1 * gradient, speed=2.0)
    torch.testing.assert_close(variable, weight.abs() - 0.2 * gradient * weight.sign())


def test_weights_fade_in_from_zero_along_feathers_curve() -> None:
    weight, level = torch.randn(1, 200, dtype=torch.float64), torch.tensor([[0.5]], dtype=torch.float64)
    variable = weight.abs() - level
    torch.testing.assert_close(faded_weight(weight, variable, level, power=3.0), fade(weight, level, 3.0))
    nearly = faded_weight(torch.ones(1, 1), torch.full((1, 1), 1e-6), torch.ones(1, 1), power=3.0)
    assert 0 < float(nearly) < 0.02
    pruned = faded_weight(torch.ones(1, 2), torch.tensor([[0.0, -1.0]]), torch.ones(1, 1), power=3.0)
    assert pruned.tolist() == [[0.0, 0.0]]


def test_without_a_threshold_and_for_protected_weights_nothing_fades() -> None:
    tiny = torch.finfo(torch.float32).tiny
    ones, level = torch.ones(1, 2), torch.ones(1, 1)
    assert faded_weight(ones, torch.tensor([[tiny, 0.3]]), level, power=3.0)[0, 0] == 1.0
    assert faded_weight(ones, torch.tensor([[0.2, 3.0]]), 0.0 * level, power=3.0).tolist() == [[1.0, 1.0]]


def explicit(optimizer_name: str) -> list[np.ndarray[Any, Any]]:
    """The same training written out: w̃ and m̃ apart from the network, thresholds by sorting."""
    model = network()
    optimizer = make_optimizer(optimizer_name, model)
    weights = [model[0].weight, model[2].weight]
    total, kept = sum(each.numel() for each in weights), round(0.2 * sum(each.numel() for each in weights))
    dense = variable = np.zeros(0)
    level, usual, size, mask = 0.0, 0.0, 0.0, np.ones(total, dtype=bool)

    def flat() -> np.ndarray[Any, Any]:
        return np.concatenate([each.detach().numpy().ravel().copy() for each in weights])

    def write(values: np.ndarray[Any, Any]) -> None:
        start = 0
        for each in weights:
            each.data.copy_(torch.from_numpy(values[start : start + each.numel()].reshape(each.shape)))
            start += each.numel()

    def faded() -> np.ndarray[Any, Any]:
        shrunk = np.zeros(total)
        shrunk[mask] = (1.0 - (max(level, 0.0) / variable[mask]) ** 3) ** (1.0 / 3.0)
        return dense * shrunk

    for number, batch in enumerate(batches()):
        if number < 3:
            step(model, optimizer, batch)
            dense, variable = flat(), np.abs(flat())
            usual = math.sqrt(np.square(dense).mean())
            continue
        if number == 26:  # masks are final, and the weights are those that the forward pass used
            dense = faded()
            write(dense)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        if number < 26:
            write(dense)
        optimizer.step()
        if number >= 26:
            write(flat() * mask)
            continue
        phase = number - 3
        annealed = 0.5 * (1.0 + math.cos(math.pi * phase / 23))
        direction = (flat() - dense) * np.sign(dense)
        if size > 0:  # of the step before
            variable = variable + 2.0 / math.sqrt(23) * annealed * usual / size * direction
        size = math.sqrt(np.square(direction).mean())
        dense = flat()
        share = min(1.0, (phase + 1) / 15)
        budget = gossamer.schedule.cubic_budget(share, total, kept)
        order = np.sort(variable)[::-1]
        level = order[budget] if budget < total else min(order[-1], 0.0)
        mask = variable > level if budget < total else np.ones(total, dtype=bool)
        write(faded())
    return [each.detach().numpy() for each in weights]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_training_equals_the_same_written_out(name: str) -> None:
    model = network()
    optimizer = make_optimizer(name, model)
    sparsifier = gossamer.Sparsifier(
        model, optimizer, sparsity=0.8, total_steps=STEPS, mask_travel=2.0, fade=3.0, pruned_grad_scale=1.0,
        min_density=0.0, **PHASES,
    )  # fmt: skip
    for batch in batches():
        step(model, optimizer, batch)
    sparsifier.finish()
    for ours, theirs in zip((model[0].weight, model[2].weight), explicit(name), strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-9, atol=1e-12)


def sparsify(optimizer: type[torch.optim.Optimizer], **settings: Any) -> gossamer.Sparsifier:
    model = network()
    target = {} if settings.keys() & {"decay", "pattern"} else {"sparsity": 0.8}
    return gossamer.Sparsifier(model, optimizer(model.parameters(), lr=1e-3), total_steps=100, **target, **settings)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop])
def test_masks_follow_optimizers_with_adaptive_rates(kind: type[torch.optim.Optimizer]) -> None:
    sparsifier = sparsify(kind)
    assert (sparsifier.settings.mask_travel, sparsifier.settings.fade) == (1.0, 3.0)
    assert (sparsifier.plan.warmup, sparsifier.plan.finetune) == (10, 10)


@pytest.mark.parametrize(
    "settings", [{"mask_lr": 0.01}, {"preset": "paper"}, {"pattern": "1:4"}, {"decay": 0.1}], ids=str
)
def test_settings_of_gradients_and_other_targets_make_masks_learn_from_gradients(settings: dict[str, Any]) -> None:
    if settings.get("pattern"):
        settings["include"] = ["0.weight"]
    assert sparsify(torch.optim.AdamW, **settings).settings.mask_travel == 0


def test_setting_the_length_of_a_phase_leaves_the_others_as_usual() -> None:
    plan = sparsify(torch.optim.AdamW, warmup="0.5run").plan
    assert (plan.warmup, plan.sparsify, plan.stabilise) == (50, 35, 15)


def test_masks_learn_from_gradients_under_sgd() -> None:
    assert sparsify(torch.optim.SGD).settings.mask_travel == 0


def test_an_adaptive_optimizer_that_owns_no_prunable_weight_does_not_count() -> None:
    model = network()
    weights = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() == 1]
    optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(others, lr=1e-3)]
    assert gossamer.Sparsifier(model, optimizers, sparsity=0.8, total_steps=100).settings.mask_travel == 0


def test_a_method_that_follows_without_saying_how_is_told_what_lacks() -> None:
    class Mute(DPF):
        name, follows = "mute", True

    model = network()
    optimizer = make_optimizer("sgd", model)
    gossamer.Sparsifier(model, optimizer, method=Mute, sparsity=0.8, total_steps=10, warmup="0it")
    with pytest.raises(TypeError, match=r"'mute' sets follows=True, so it has to define follow\(\) and settle\(\)"):
        step(model, optimizer, batches()[0])


def test_both_ways_of_learning_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mask_travel: expected .* got 2\.0"):
        sparsify(torch.optim.SGD, mask_travel=2.0, mask_lr=0.1)
    with pytest.raises(ValueError, match="mask_travel and fade need a target of sparsity="):
        sparsify(torch.optim.SGD, mask_travel=2.0, decay=0.1)


def test_fading_needs_no_memory_of_the_size_of_the_weights() -> None:
    model = network()
    optimizer = make_optimizer("adamw", model)
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.8, total_steps=STEPS, **PHASES)
    for batch in batches()[:10]:
        step(model, optimizer, batch)
    driver = sparsifier._driver
    assert driver is not None
    assert driver._forward is None
    held = {name for name, each in driver.training.state().items() if each.shape == driver.mask.shape}
    assert held == {"mask_variable", "mask"}


@pytest.mark.parametrize("stop", [5, 12, 20, 27])
def test_a_resumed_run_ends_with_the_same_bits(stop: int) -> None:
    def train(interrupted: bool) -> list[Tensor]:
        model = network()
        optimizer = make_optimizer("adamw", model)
        sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.8, total_steps=STEPS, **PHASES)
        for number, batch in enumerate(batches()):
            if interrupted and number == stop:
                states = model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()
                model = network()
                optimizer = make_optimizer("adamw", model)
                sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.8, total_steps=STEPS, **PHASES)
                for each, state in zip((model, optimizer, sparsifier), states, strict=True):
                    each.load_state_dict(state)
            step(model, optimizer, batch)
        sparsifier.finish()
        return list(model.state_dict().values())

    assert all(map(torch.equal, train(True), train(False)))
