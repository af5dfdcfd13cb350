"""The sparsifier's trajectory is, bit for bit, that of the explicit autograd formulation (float32, CPU)."""

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from explicit import Explicit, ExplicitMasks
from reference import mlp
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer
from gossamer.schedule import Phase, cosine

STEPS = 300


def problem() -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(256, 1, 6, 6, generator=generator)
    y = (x.flatten(1)[:, :9] @ torch.randn(9, 4, generator=generator)).argmax(1)
    batches = [torch.randint(0, 256, (16,), generator=generator) for _ in range(STEPS)]
    return x, y, batches


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


WEIGHTS = ["0.weight", "3.weight", "6.weight"]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-momentum-decay": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}

REQUESTS: dict[str, dict[str, Any]] = {
    "decay-raw": {"decay": 5e-3, "scale": "none", "mask_lr": 0.3, "start": "constant", "start_value": 0.1},
    "decay-batch": {"decay": 0.02, "scale": "batch", "mask_lr": 0.01, "start": "magnitude"},
    "decay-momentum": {"decay": 0.01, "scale": "none", "mask_lr": 0.01, "mask_momentum": 0.9},
    "decay-anchored": {"decay": 0.5, "scale": "global", "mask_lr": 0.01, "mask_decay": 0.05},
    "default": {"sparsity": 0.8, "scale": "global"},
    "budget-anchored": {"sparsity": 0.8, "mask_lr": 0.01, "scale": "global", "mask_decay": 0.25, "mask_decay_cap": 0.0},
    "budget-capped": {"sparsity": 0.8, "mask_lr": 0.01, "scale": "global", "mask_decay": 0.25, "mask_decay_cap": 1.5},
    "budget-global": {"sparsity": 0.8, "scale": "global", "mask_lr": 0.01, "mask_decay": 0.0},
    "budget-raw": {"sparsity": 0.6, "scale": "none", "mask_lr": 1.0},
    "budget-damped": {"sparsity": 0.8, "mask_lr": 0.01, "scale": "global", "pruned_grad_scale": 0.3},
    "budget-paper-gradient": {"sparsity": 0.8, "mask_lr": 0.01, "scale": "global", "pruned_grad_scale": 1.0},
}


def share_left(count: int, sparsity: float) -> float:
    """In whole connections, of which a half is rounded away."""
    return (count - math.floor(count * sparsity + 0.5)) / count


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
def test_equals_the_explicit_formulation_bit_for_bit(request_: str, optimizer: str, closure: bool) -> None:
    x, y, batches = problem()
    asked = {"min_density": 0.0, "warmup": "40it", "sparsify": "150it", "stabilise": "50it", **REQUESTS[request_]}

    ours = network()
    our_optimizer = OPTIMIZERS[optimizer](ours.parameters())
    sparsifier = gossamer.Sparsifier(ours, our_optimizer, total_steps=STEPS, **asked)

    plain = network()
    count = sum(plain.get_parameter(name).numel() for name in WEIGHTS)
    left = share_left(count, asked.get("sparsity", 0.0))
    theirs = Explicit(plain, WEIGHTS, asked.get("pruned_grad_scale", left**0.4 if "sparsity" in asked else 0.5))
    their_optimizer = OPTIMIZERS[optimizer](plain.parameters())
    masks = ExplicitMasks(theirs, asked["scale"], asked.get("decay", 0.0), asked.get("mask_momentum", 0.0))
    mask_lr = asked.get("mask_lr", 0.015)
    masks.mask_decay, masks.mask_lr = sparsifier.settings.mask_decay, mask_lr
    masks.cap = sparsifier.settings.mask_decay_cap

    flips = 0
    for step, batch in enumerate(batches):
        moment = sparsifier.plan.at(step)

        def backward(model: nn.Module, batch: Tensor = batch) -> Tensor:
            loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            return loss

        if closure:
            value = our_optimizer.step(lambda: backward(ours))
            assert isinstance(value, Tensor)
        else:
            backward(ours)
            our_optimizer.step()
        our_optimizer.zero_grad()

        if moment.phase is Phase.SPARSIFY and theirs.mask_variables[WEIGHTS[0]] is None:
            constant = asked.get("start") == "constant"
            theirs.start(lambda w: torch.full_like(w, asked["start_value"]) if constant else w.abs())  # noqa: B023
        backward(theirs)
        if moment.phase.masks_train:
            rate = mask_lr * cosine(moment.settling)
            budget = sparsifier._target.budget(moment.ramp) if "sparsity" in asked else None
            masks.step(rate, budget)
        their_optimizer.step()
        their_optimizer.zero_grad()

        expected = dict(plain.named_parameters())
        for name, parameter in ours.named_parameters():
            value = expected[name].detach()
            mask = theirs.mask_variables.get(name)
            if mask is not None:
                value = torch.where(mask > 0, value, torch.zeros(()))
                flips += int(((mask > 0) != sparsifier.masks[name]).sum())
            assert torch.equal(parameter.detach(), value), f"{name} differs at step {step}"
    assert flips == 0
    assert 0.05 < sparsifier.sparsity < 0.95


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_frozen_masks_of_ones_are_plain_training_bit_for_bit(optimizer: str) -> None:
    x, y, batches = problem()
    sparse, dense = network(), network()
    sparse_optimizer, dense_optimizer = (OPTIMIZERS[optimizer](net.parameters()) for net in (sparse, dense))
    gossamer.Sparsifier(
        sparse,
        sparse_optimizer,
        sparsity=0.9,
        total_steps=STEPS,
        warmup=f"{STEPS - 1}it",
        sparsify="1it",
        stabilise="0it",
    )
    for batch in batches[:-1]:
        for net, opt in ((sparse, sparse_optimizer), (dense, dense_optimizer)):
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            opt.step()
            opt.zero_grad()
    for ours, theirs in zip(sparse.state_dict().values(), dense.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_mask_variables_that_keep_everything_are_plain_training_bit_for_bit() -> None:
    """Also while masks train: with no decay and masks far from zero, w̃ follows the optimizer alone."""
    x, y, batches = problem()
    sparse, dense = network(), network()
    optimizers = [OPTIMIZERS["sgd-momentum-decay"](net.parameters()) for net in (sparse, dense)]
    gossamer.Sparsifier(
        sparse, optimizers[0], decay=0.0, total_steps=STEPS, start="constant", start_value=1e6,
        warmup="10it", sparsify="200it", stabilise="50it",
    )  # fmt: skip
    for batch in batches:
        for net, opt in zip((sparse, dense), optimizers, strict=True):
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            opt.step()
            opt.zero_grad()
    for ours, theirs in zip(sparse.state_dict().values(), dense.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scale", ["none", "global", "batch", "per_sample"])
@pytest.mark.parametrize("estimator", ["identity", "softplus", "leaky_relu", "relu", "clipped_relu"])
@pytest.mark.parametrize("exact", [False, True], ids=["decay", "budget"])
def test_agrees_with_the_numpy_reference(scale: str, estimator: str, exact: bool) -> None:
    """A whole run in float64 against the implementation that shares no code with ours."""
    rng = np.random.default_rng(7)
    sizes, steps = (6, 8, 7, 3), 60
    torch_net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    linears = [module for module in torch_net if isinstance(module, nn.Linear)]
    weights = [rng.standard_normal((o, i)) / i**0.5 for i, o in pairwise(sizes)]
    for module, weight in zip(linears, weights, strict=True):
        module.weight.data = torch.from_numpy(weight.copy())
        nn.init.zeros_(module.bias)
    inputs, labels = rng.standard_normal((40, 6)), rng.integers(0, 3, 40)
    batches = tuple(rng.integers(0, 40, 10) for _ in range(steps))

    optimizer = torch.optim.SGD(torch_net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    count = sum(weight.size for weight in weights)
    request = {"sparsity": 0.7} if exact else {"decay": 0.02 if scale != "none" else 5e-4, "pruned_grad_scale": 1.0}
    sparsifier = gossamer.Sparsifier(
        torch_net, optimizer, total_steps=steps, warmup="0it", sparsify=f"{steps - 20}it", stabilise="20it",
        scale=scale, estimator=estimator, mask_lr=0.05, mask_decay=0.1, mask_decay_cap=1.5, min_density=0.0,
        mask_momentum=0.0 if exact else 0.5, **request,
    )  # fmt: skip
    trajectory = mlp.train(
        mlp.Problem(
            inputs,
            labels,
            batches,
            tuple(weights),
            tuple(np.zeros(o) for o in sizes[1:]),
            tuple(np.abs(w) for w in weights),
        ),
        mlp.Settings(
            rate=0.05,
            mask_rate=lambda step: 0.05 * cosine(sparsifier.plan.at(step).settling),
            momentum=0.9,
            weight_decay=1e-3,
            removed=share_left(count, 0.7) ** 0.4 if exact else 1.0,
            cap=1.5,
            anchor=lambda step: 0.1 if exact else 0.1 * cosine(sparsifier.plan.at(step).settling),
            mask_momentum=0.0 if exact else 0.5,
            estimator=estimator,
            scale=scale,
            decay=0.0 if exact else request["decay"],
            budget=(lambda step: sparsifier._target.budget(sparsifier.plan.at(step).ramp)) if exact else None,
        ),
        steps,
    )
    x, y = torch.from_numpy(inputs), torch.from_numpy(labels)
    for step, batch in enumerate(batches):
        F.cross_entropy(torch_net(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = trajectory[step] if len(trajectory) == steps else trajectory[step + 1]
        for module, weight in zip(linears, expected.weights, strict=True):
            torch.testing.assert_close(module.weight.detach(), torch.from_numpy(weight), rtol=1e-7, atol=1e-10)


def test_a_deep_copy_is_plain_and_independent() -> None:
    x, y, batches = problem()
    net = network()
    optimizer = OPTIMIZERS["sgd-momentum-decay"](net.parameters())
    gossamer.Sparsifier(net, optimizer, sparsity=0.8, total_steps=STEPS, warmup="0it", sparsify="20it", stabilise="0it")
    for batch in batches[:30]:
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    twin = copy.deepcopy(net)
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in network().named_parameters()]
    before = net.get_parameter("6.weight").detach().clone()
    with torch.no_grad():
        twin.get_parameter("6.weight").fill_(1.0)
    assert torch.equal(net.get_parameter("6.weight"), before)
