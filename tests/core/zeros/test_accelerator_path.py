"""The code for accelerators, run on a CPU, learns what the code for CPUs does, also from bad gradients."""

import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD

from zeros.networks import BY_NAME
from zeros.running import TOTAL, Run, assert_zeros, start

OPTIONS: dict[str, dict[str, Any]] = {
    "budget": {},
    "anchored": {"mask_decay": 0.2, "mask_decay_cap": 1.5},
    "anchored, decay": {"decay": 0.3, "mask_decay": 0.2, "mask_decay_cap": 1.5},
    "anchored, flops": {
        "flops": 0.3,
        "example_input": BY_NAME["cnn"].batch(0)[0],
        "mask_decay": 0.2,
        "mask_decay_cap": 1.5,
    },
    "momentum": {"mask_momentum": 0.9},
    "decay": {"decay": 0.3},
    "decay, momentum": {"decay": 0.3, "mask_momentum": 0.9},
    "l2": {"l2": 0.1},
    "features": {"scale": "batch"},
    "flops": {"flops": 0.3, "example_input": BY_NAME["cnn"].batch(0)[0]},
}


class PretendedAccelerator(str):
    """A name of the CPU that says it is a GPU to code that asks for the type of a device."""

    type = "cuda"


def begin(options: dict[str, Any], *, pretend: bool, optimizer: dict[str, Any]) -> Run:
    run = start(BY_NAME["cnn"], lambda p: SGD(p, lr=0.05, **optimizer), warmup="0it", **options)
    if pretend:
        assert run.sparsifier._driver is not None
        run.sparsifier._driver.state.device = PretendedAccelerator("cpu")  # type: ignore[assignment]
    return run


def step(run: Run, number: int, *, bad: bool) -> None:
    run.optimizer.zero_grad()
    run.loss(number).backward()
    run.optimizer.grad_scale = None  # type: ignore[attr-defined]
    run.optimizer.found_inf = torch.tensor(float(bad))  # type: ignore[attr-defined]
    if bad:
        run.model[3].weight.grad[0] = torch.nan
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradients that are not finite")
        run.optimizer.step()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("bad", [(), (0, 3, 4, 8)], ids=["finite", "some not finite"])
def test_both_paths_learn_the_same(name: str, bad: tuple[int, ...]) -> None:
    # Fused, so that the optimizer itself leaves the weights alone in bad steps. Without momentum, because after a bad
    # first step torch's fused SGD goes on from momentum that was never set.
    plain, pretended = (begin(OPTIONS[name], pretend=flag, optimizer={"fused": True}) for flag in (False, True))
    for number in range(TOTAL):
        before = pretended.sparsifier.state_dict()
        for run in (plain, pretended):
            step(run, number, bad=number in bad)
        one, two = plain.sparsifier.state_dict(), pretended.sparsifier.state_dict()
        for part in ("mask", "mask_variable", "velocity"):
            if part in one:
                torch.testing.assert_close(two[part], one[part], rtol=1e-5, atol=1e-7)
                if number in bad:
                    exact = {} if name == "flops" else {"rtol": 0, "atol": 0}
                    torch.testing.assert_close(two[part], before[part], **exact)
        assert_zeros(pretended.model, pretended.sparsifier)
    assert plain.sparsifier.nonzeros == pretended.sparsifier.nonzeros


@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_a_weight_without_gradient_is_left_alone_by_both(l2: float) -> None:
    runs = [
        begin({"l2": l2, "scale": "none", "mask_lr": 1.0, "mask_decay": 0.0}, pretend=flag, optimizer={})
        for flag in (False, True)
    ]
    for run in runs:
        run.model[0].requires_grad_(False)
        before = run.sparsifier.state_dict()["mask_variable"]
        run.optimizer.zero_grad()
        run.loss(0).backward()
        run.optimizer.step()
        after = run.sparsifier.state_dict()["mask_variable"]
        moved = after["0.weight"] - before["0.weight"]
        alive = before["0.weight"] > 0.01
        # Decay lowers all mask variables alike; nothing else has moved these.
        torch.testing.assert_close(moved[alive], moved[alive][0].expand_as(moved[alive]))
    one, two = (run.sparsifier.state_dict()["mask_variable"] for run in runs)
    torch.testing.assert_close(two, one)
