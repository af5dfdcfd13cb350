"""What training loops do around the step: accumulation, mixed precision, clipping, missing and bad gradients."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gossamer.schedule import Phase
from gossamer.sparsifier import Sparsifier
from zeros.networks import BY_NAME, NETWORKS, Network
from zeros.running import SPARSITY, TOTAL, Run, assert_zeros, differences, everything, start, through_file

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
MLP = BY_NAME["mlp"]
BAD = 9  # a step of the sparsify phase


def learned(run: Run) -> dict[str, Any]:
    """What the sparsifier has learned, without its log."""
    state = run.sparsifier.state_dict()
    return {name: through_file(state[name]) for name in ("step", "phase", "mask", "mask_variable", "dense")}


# --- accumulation, clipping, clearing ---


@pytest.mark.parametrize(
    "network", [network for network in NETWORKS if network.name not in ("cnn", "channels_last")], ids=lambda n: n.name
)
def test_accumulated_micro_batches_equal_the_large_batch(network: Network) -> None:
    large, small = start(network, dtype=torch.float64), start(network, dtype=torch.float64)
    size = network.outputs[0]
    for step in range(TOTAL):
        large.train(step + 1)
        small.optimizer.zero_grad()
        inputs, targets = network.batch(step)
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        for sample in range(size):
            part = slice(sample, sample + 1)
            loss = (small.model(inputs[part]) - targets[part].double()).square().mean() / size
            loss.backward()
        small.optimizer.step()
        assert not differences(large.sparsifier.masks, small.sparsifier.masks), step
    torch.testing.assert_close(small.model.state_dict(), large.model.state_dict(), rtol=1e-9, atol=1e-11)


def test_clipped_gradients_are_what_masks_learn_from() -> None:
    clipped, by_hand = start(MLP), start(MLP)
    for step in range(TOTAL):
        for run in (clipped, by_hand):
            run.optimizer.zero_grad()
            run.loss(step).backward()
        nn.utils.clip_grad_norm_(clipped.model.parameters(), 0.1)
        parameters = list(by_hand.model.parameters())
        norm = torch.linalg.vector_norm(torch.stack([parameter.grad.norm() for parameter in parameters]))
        for parameter in parameters:
            parameter.grad.mul_(torch.clamp(0.1 / (norm + 1e-6), max=1.0))
        clipped.optimizer.step()
        by_hand.optimizer.step()
    assert not differences(everything(clipped), everything(by_hand))
    assert differences(clipped.model.state_dict(), start(MLP).train().model.state_dict())


def test_gradients_set_to_zero_instead_of_none() -> None:
    run = start(MLP)
    for step in range(TOTAL):
        run.optimizer.zero_grad(set_to_none=False)
        run.loss(step).backward()
        run.optimizer.step()
    assert not differences(everything(run), everything(start(MLP).train()))


def test_gradients_are_what_the_optimizer_applied() -> None:
    """Those of removed weights are a quarter in the step, all others are as they were."""
    run = start(MLP, pruned_grad_scale=0.25).train(BAD)
    run.optimizer.zero_grad()
    run.loss(BAD).backward()
    masks = run.sparsifier.state_dict()["mask"]
    named = dict(run.model.named_parameters())
    before = [parameter.grad * (1 + 3 * masks.get(name, torch.ones(()))) / 4 for name, parameter in named.items()]
    run.optimizer.step()
    assert any(int((mask == 0).sum()) for mask in masks.values())
    assert not differences(before, [parameter.grad for parameter in named.values()])


# --- parameters that do not take part ---


class Branches(nn.Module):
    """Two branches of which a step may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(12, 10), nn.Linear(12, 10), nn.Linear(10, 5)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return self.head(torch.relu(self.get_submodule(branch)(x)))


def test_a_weight_without_gradient_in_a_step() -> None:
    torch.manual_seed(0)
    model = Branches()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparsifier = Sparsifier(model, optimizer, sparsity=SPARSITY, total_steps=TOTAL)
    for step in range(TOTAL):
        inputs, targets = MLP.batch(step)
        used, idle = ("left", "right") if step % 2 else ("right", "left")
        before = sparsifier.state_dict().get("dense", {}).get(f"{idle}.weight")
        optimizer.zero_grad(set_to_none=True)
        (model(inputs, used) - targets).square().mean().backward()
        assert model.get_submodule(idle).weight.grad is None
        optimizer.step()
        after = sparsifier.state_dict().get("dense", {}).get(f"{idle}.weight")
        if before is not None and after is not None:
            assert torch.equal(after, before)
        if sparsifier.phase is not Phase.WARMUP:
            assert_zeros(model, sparsifier)
    assert sparsifier.nonzeros == 290 - 232


@pytest.mark.parametrize("steps", [6, 12, 20])
def test_a_model_moved_to_another_device_says_what_to_do(steps: int) -> None:
    run = start(MLP, lambda p: SGD(p, lr=0.05)).train(steps)
    run.loss(steps).backward()
    driver = run.sparsifier._begin()
    meta = driver.mask.to("meta")
    if driver.method is None:
        driver.final_mask = meta
    else:
        driver.method.mask = meta  # the same as seen from the model, which on a CPU has nowhere to go
    with pytest.raises(
        RuntimeError, match=r"the weights are on cpu now, but their masks on meta: .* rebuild all three"
    ):
        run.optimizer.step()


def test_frozen_layers_are_left_alone() -> None:
    model = MLP.fresh()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05, momentum=0.9)
    sparsifier = Sparsifier(model, optimizer, sparsity=SPARSITY, total_steps=TOTAL)
    Run(MLP, model, optimizer, sparsifier, model).train()
    assert "0.weight" not in sparsifier.masks
    assert torch.equal(model[0].weight, before)
    assert sparsifier.nonzeros == 400 - 320


@pytest.mark.parametrize("when", [3, BAD, 16, 20])
def test_a_layer_frozen_in_mid_run_keeps_its_zeros(when: int) -> None:
    run = start(MLP).train(when)
    run.model[0].requires_grad_(False)
    run.train()
    assert_zeros(run.model, run.sparsifier)
    assert run.sparsifier.nonzeros == 128


# --- gradients that are not finite ---


def repaired(run: Run) -> Any:
    """Somebody repairs gradients later than the masks look at them, so that the weights stay finite."""

    def repair(*_: object) -> None:
        run.model[2].weight.grad.nan_to_num_(0.0, 0.0, 0.0)

    return run.optimizer.register_step_pre_hook(repair)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"decay": 0.3}, {"mask_momentum": 0.9}, {"preset": "paper", "sparsity": 0.8}])
def test_a_bad_gradient_leaves_masks_alone_and_is_told(value: float, options: dict[str, Any]) -> None:
    lengths = {"warmup": "6it", "sparsify": "8it", "stabilise": "4it"}
    run = start(MLP, lambda p: SGD(p, lr=0.05), **{**options, **lengths}).train(BAD)
    before = learned(run)
    run.optimizer.zero_grad()
    run.loss(BAD).backward()
    run.model[2].weight.grad[0, 0] = value
    repair = repaired(run)
    run.optimizer.step()
    repair.remove()
    after = learned(run)
    assert not differences(before["mask"], after["mask"])
    assert not differences(before["mask_variable"], after["mask_variable"])
    assert_zeros(run.model, run.sparsifier)
    with pytest.warns(UserWarning, match="masks did not learn in 1 steps"):
        run.train(BAD + 1 + 1)
    assert run.sparsifier.health().skipped_steps == 1
    run.train()
    assert_zeros(run.model, run.sparsifier)
    if "decay" not in options:
        assert run.sparsifier.nonzeros == 128


def test_bad_gradients_to_the_end_of_the_mask_phases_still_meet_the_target() -> None:
    run = start(MLP, lambda p: SGD(p, lr=0.05)).train(BAD)

    def fill(parameter: Tensor) -> None:
        parameter.grad.fill_(torch.nan)

    spoil = run.model[2].weight.register_post_accumulate_grad_hook(fill)
    repair = repaired(run)
    masks = through_file(run.sparsifier.masks)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.train(17)
        assert not differences(masks, run.sparsifier.masks)
        run.train(19)
    counts = [int(re.findall(r"in (\d+) steps", str(warning.message))[0]) for warning in told]
    assert counts == [1, 2, 4, 8, 9]  # not in every step, but all of them in the end
    assert run.sparsifier.phase is Phase.FINETUNE
    assert run.sparsifier.nonzeros == 128
    assert_zeros(run.model, run.sparsifier)
    spoil.remove()
    repair.remove()


def test_a_resumed_run_does_not_tell_again() -> None:
    run = start(MLP, lambda p: SGD(p, lr=0.05)).train(BAD)
    run.loss(BAD).backward()
    run.model[2].weight.grad[0, 0] = torch.nan
    repair = repaired(run)
    run.optimizer.step()
    repair.remove()
    state = through_file(everything(run))
    resumed = start(MLP, lambda p: SGD(p, lr=0.05))
    resumed.model.load_state_dict(state["model"])
    resumed.sparsifier.load_state_dict(state["sparsifier"])
    resumed.train()  # a warning would be an error here
    assert resumed.sparsifier.health().skipped_steps == 1


# --- mixed precision ---

SCALED: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "sgd_fused": lambda p: SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "adamw_fused": lambda p: AdamW(p, lr=0.01, fused=True),
}
every_scaled = pytest.mark.parametrize("name", SCALED)


def scaled_step(run: Run, scaler: torch.amp.GradScaler, step: int, *, spoil: bool = False) -> None:
    run.optimizer.zero_grad()
    scaler.scale(run.loss(step)).backward()
    if spoil:
        run.model[2].weight.grad[0, 0] = torch.inf
    scaler.step(run.optimizer)
    scaler.update()


@every_scaled
@pytest.mark.parametrize("options", [{}, {"l2": 0.1}, {"preset": "paper", "sparsity": 0.8}], ids=["", "l2", "paper"])
def test_scaled_gradients_equal_plain_ones(name: str, options: dict[str, Any]) -> None:
    plain, scaled = start(MLP, SCALED[name], **options), start(MLP, SCALED[name], **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)  # a power of two: scaling is exact
    plain.train()
    for step in range(TOTAL):
        scaled_step(scaled, scaler, step)
    assert not differences(everything(plain), everything(scaled))


@every_scaled
@pytest.mark.parametrize("bad", [BAD, 15])
def test_a_step_with_infinities_teaches_nothing(name: str, bad: int) -> None:
    run = start(MLP, SCALED[name]).train(bad)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    before, weights = learned(run), through_file(run.model.state_dict())
    scaled_step(run, scaler, bad, spoil=True)
    after = learned(run)
    assert scaler.get_scale() == 2.0**11
    for part in ("mask", "mask_variable", "dense"):
        assert not differences(before[part], after[part]), part
    assert not differences(weights, run.model.state_dict())
    fused = "fused" in name
    # A skipped step does not count; a fused optimizer is stepped all the same, and only the device knows.
    assert after["step"] == before["step"] + fused
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if fused else "error")
        for step in range(run.sparsifier.step, TOTAL):
            scaled_step(run, scaler, step)
    assert run.sparsifier.nonzeros == 128
    assert_zeros(run.model, run.sparsifier)


def test_skipped_steps_leave_the_trajectory_as_it_was() -> None:
    plain, run = start(MLP).train(), start(MLP)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(TOTAL):
        if step % 3 == 0:
            scaled_step(run, scaler, step, spoil=True)
        scaled_step(run, scaler, step)
    assert not differences(everything(plain), everything(run))


def test_two_optimizers_under_one_scaler() -> None:
    plain = start(MLP, lambda p: SGD(p, lr=0.05, momentum=0.9)).train()
    model = MLP.fresh()
    parameters = list(model.parameters())
    optimizers = [SGD(parameters[:2], lr=0.05, momentum=0.9), SGD(parameters[2:], lr=0.05, momentum=0.9)]
    sparsifier = Sparsifier(model, optimizers, sparsity=SPARSITY, total_steps=TOTAL)
    run = Run(MLP, model, optimizers[0], sparsifier, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(TOTAL):
        model.zero_grad()
        scaler.scale(run.loss(step)).backward()
        for optimizer in optimizers:  # masks of all weights learn in the first step: un-scale all of them before it
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert not differences(model.state_dict(), plain.model.state_dict())


def test_autocast_and_a_default_dtype_of_float64() -> None:
    run = start(MLP)
    for step in range(TOTAL):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.loss(step)
        loss.backward()
        run.optimizer.step()
    assert_zeros(run.model, run.sparsifier)
    assert run.sparsifier.nonzeros == 128
    torch.set_default_dtype(torch.float64)
    try:
        double = start(MLP, dtype=torch.float64).train()
        assert double.sparsifier.health().nonzeros[-1] == 128
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("change", ["bfloat16", "channels_last", "float64"])
def test_a_model_converted_in_mid_run_goes_on(change: str) -> None:
    run = start(BY_NAME["cnn"]).train(BAD)
    if change == "channels_last":
        run.model.to(memory_format=torch.channels_last)
    else:
        run.model.to(getattr(torch, change))
    run.optimizer.load_state_dict(run.optimizer.state_dict())  # casts the momentum along
    run.train()
    assert_zeros(run.model, run.sparsifier)
