"""Resuming, copying and finishing a sparsifier."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel

from gossamer.schedule import Phase
from gossamer.sparsifier import Sparsifier
from gossamer.zeros import keep_zeros
from zeros.networks import BY_NAME, NETWORKS, Network
from zeros.running import (
    SPARSITY,
    TOTAL,
    Run,
    assert_zeros,
    differences,
    everything,
    restore,
    start,
    through_file,
    zeros,
)

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
MLP = BY_NAME["mlp"]
# First and last step of each phase and its neighbours, and the ends of the run.
CUTS = (0, 1, 5, 6, 7, 13, 14, 15, 17, 18, 19, 23, 24)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_resuming_at_any_step_is_bit_identical(network: Network) -> None:
    run = start(network)
    saved = {}
    for step in range(TOTAL + 1):
        run.train(step)
        if step in CUTS:
            saved[step] = through_file(everything(run))
    for cut in CUTS:
        resumed = restore(start(network, seed=3), saved[cut])
        assert not differences(everything(resumed), saved[cut]), cut
        assert not differences(everything(resumed.train()), everything(run)), cut


VARIANTS = {
    "momentum": {"mask_momentum": 0.9},
    "features": {"preset": "paper", "sparsity": SPARSITY, "sparsify": "8it", "stabilise": "4it", "warmup": "6it"},
    "decay": {"decay": 0.3},
    "leave": {
        "decay": 5.0,
        "leave_at": 0.3,
        "warmup": "1it",
        "sparsify": "22it",
        "stabilise": "1it",
        "total_steps": 30,
    },
    "flops": {"flops": 0.3, "example_input": MLP.batch(0)[0]},
    "per_sample": {"sparsity": SPARSITY, "scale": "per_sample", "mask_lr": 0.05},
    "no_floor": {"min_density": 0.0},
    "big_floor": {"min_density": 0.1},
    "no_warmup": {"warmup": "0it"},
    "adamw": {},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_every_kind_of_run(variant: str) -> None:
    def begin(seed: int = 0) -> object:
        make = (lambda p: AdamW(p, lr=0.01)) if variant == "adamw" else (lambda p: SGD(p, lr=0.05, momentum=0.9))
        return start(MLP, make, seed=seed, **VARIANTS[variant])

    run = begin()
    total = run.sparsifier.plan.total
    saved = {0: through_file(everything(run))}
    for step in range(1, total + 1):
        run.train(step)
        saved[step] = through_file(everything(run))
    assert 0 < run.sparsifier.sparsity < 1
    health = run.sparsifier.health()
    for state in saved.values():
        resumed = restore(begin(seed=3), state).train(total)
        assert not differences(everything(resumed), everything(run))
        assert resumed.sparsifier.health() == health


def test_masks_keep_their_rate_after_a_phase_that_was_left_early() -> None:
    """It is that of the steps that the plan had, not of those that were left of it."""
    lengths = {"warmup": "5it", "sparsify": "900it", "stabilise": "60it", "total_steps": 1000}
    run = start(MLP, decay=2.0, leave_at=0.3, **lengths)
    while run.sparsifier.phase is not Phase.STABILISE:
        run.train(run.sparsifier.step + 1)
    state, step = through_file(everything(run)), run.sparsifier.step
    assert step < 400
    resumed = restore(start(MLP, decay=2.0, leave_at=0.3, seed=3, **lengths), state)
    assert not differences(everything(resumed.train(step + 20)), everything(run.train(step + 20)))


def test_the_order_of_loading_does_not_matter() -> None:
    run = start(MLP).train(12)
    state = through_file(everything(run))
    resumed = start(MLP, seed=3)
    resumed.sparsifier.load_state_dict(state["sparsifier"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    resumed.model.load_state_dict(state["model"])
    assert not differences(everything(resumed.train()), everything(run.train()))


WRAPPERS = {
    "bare": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel": nn.DataParallel,
    "compiled-parallel": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_states_and_masks_fit_however_the_model_is_wrapped(wrapper: str) -> None:
    run = start(MLP).train(12)
    state = through_file(everything(run))
    model = MLP.fresh(3)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    wrapped = WRAPPERS[wrapper](model)
    sparsifier = Sparsifier(wrapped, optimizer, sparsity=SPARSITY, total_steps=TOTAL)
    resumed = restore(Run(MLP, model, optimizer, sparsifier, model), state)
    assert not differences(everything(resumed.train()), everything(run.train()))
    for other in (wrapped, model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        sparsifier.impose(other)
        assert_zeros(model, sparsifier)


@pytest.mark.parametrize("scale", ["global", "per_sample"])
def test_loading_into_the_same_run_goes_back(scale: str) -> None:
    run = start(MLP, scale=scale).train(9)
    state = through_file(everything(run))
    end = through_file(everything(run.train()))
    assert run.sparsifier.phase is Phase.FINETUNE
    assert not differences(everything(restore(run, state).train()), end)


def test_a_state_is_not_changed_by_going_on() -> None:
    run = start(MLP).train(9)
    state = run.sparsifier.state_dict()
    before = copy.deepcopy(state)
    run.train()
    assert not differences(state, before)


def test_a_finished_state_takes_the_hooks_off() -> None:
    run = start(MLP).train()
    run.sparsifier.finish()
    resumed = restore(start(MLP, seed=3), through_file(everything(run)))
    assert resumed.sparsifier.phase is Phase.FINISHED
    resumed.optimizer.zero_grad()
    resumed.loss(0).backward()
    resumed.optimizer.step()
    assert resumed.sparsifier.step == TOTAL
    assert resumed.sparsifier.sparsity == run.sparsifier.sparsity


def test_a_finished_sparsifier_loads_nothing() -> None:
    state = start(MLP).train(9).sparsifier.state_dict()
    run = start(MLP).train()
    run.sparsifier.finish()
    with pytest.raises(RuntimeError, match="create a new one"):
        run.sparsifier.load_state_dict(state)


def test_a_state_without_its_masks_is_refused() -> None:
    run = start(MLP).train(9)
    partial = {
        name: value
        for name, value in run.sparsifier.state_dict().items()
        if name in ("format", "method", "step", "plan", "topology_done")
    }
    with pytest.raises(ValueError, match=r"sparsify phase but has no masks"):
        start(MLP).sparsifier.load_state_dict({**partial, "phase": "sparsify"})


@pytest.mark.parametrize(
    ("saved", "asked", "message"),
    [
        ({}, {"mask_momentum": 0.9}, r"only one of the two has velocity; .*mask_momentum= and min_density= determine"),
        ({"mask_momentum": 0.9}, {}, "only one of the two has velocity"),
        ({"min_density": 0.0}, {}, "only one of the two has protected"),
        ({"min_density": 0.01}, {"min_density": 0.0}, "only one of the two has protected"),
    ],
)
def test_a_state_of_other_settings_is_refused(saved: dict[str, Any], asked: dict[str, Any], message: str) -> None:
    state = start(MLP, **saved).train(9).sparsifier.state_dict()
    other = start(MLP, **asked)
    with pytest.raises(ValueError, match=message):
        other.sparsifier.load_state_dict(state)
    assert other.sparsifier.step == 0


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_another_target_counts_until_masks_are_frozen(sparsity: float) -> None:
    run = start(MLP).train(9)
    resumed = restore(start(MLP, sparsity=sparsity), through_file(everything(run))).train()
    weights = sum(mask.numel() for mask in resumed.sparsifier.masks.values())
    assert resumed.sparsifier.nonzeros == round(weights * (1 - sparsity))
    with pytest.raises(ValueError, match=r"final, for 128 of 640 weights, but .* asked for"):
        start(MLP, sparsity=sparsity).sparsifier.load_state_dict(run.train().sparsifier.state_dict())


def test_finishing_twice_is_finishing_once() -> None:
    run = start(MLP).train()
    run.sparsifier.finish()
    before = copy.deepcopy(run.model.state_dict())
    run.sparsifier.finish()
    assert not differences(run.model.state_dict(), before)


@pytest.mark.parametrize(("steps", "phase"), [(3, "warm-up"), (12, "sparsify")])
def test_finishing_early_with_a_fixed_decay_keeps_the_masks_and_says_so(steps: int, phase: str) -> None:
    run = start(MLP, decay=0.3).train(steps)
    before = zeros(run.model)
    with pytest.warns(UserWarning, match=f"after {steps} of {TOTAL} steps, in the {phase} phase: .* stay as they are"):
        run.sparsifier.finish()
    assert not differences(zeros(run.model), before)


def test_the_sparsify_phase_is_left_when_the_target_is_almost_reached() -> None:
    lengths = {"warmup": "5it", "sparsify": "900it", "stabilise": "10it", "total_steps": 1000}
    run = start(MLP, decay=2.0, leave_at=0.3, **lengths)
    sparsities = []
    while run.sparsifier.phase in (Phase.WARMUP, Phase.SPARSIFY):
        sparsities.append(run.sparsifier.sparsity)
        run.train(run.sparsifier.step + 1)
    left = run.sparsifier.step - 1  # the first step that was none of the sparsify phase
    first = next(step for step, sparsity in enumerate(sparsities) if sparsity >= 0.3)
    assert first <= left < first + 20
    assert run.sparsifier.plan.sparsify == left - 5
    assert run.sparsifier.plan.total == 1000
    with pytest.raises(ValueError, match="leave_at to be a sparsity between 0 and 1"):
        start(MLP, decay=2.0, leave_at=30)
    with pytest.raises(ValueError, match="leave_at= requires decay="):
        start(MLP, sparsity=0.9, leave_at=0.3)


@pytest.mark.parametrize("steps", [12, 20])
def test_finish_restores_the_zeros_of_an_interrupted_step(steps: int) -> None:
    run = start(MLP).train(steps)
    before = copy.deepcopy(run.model.state_dict())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = run.optimizer.register_step_pre_hook(interrupt)  # runs after the hooks of the sparsifier
    run.loss(steps).backward()
    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step()
    handle.remove()
    if steps == 12:
        assert differences(zeros(run.model), {name: value == 0 for name, value in before.items()})
        with pytest.warns(UserWarning, match="cut to the target"):
            run.sparsifier.finish()
    else:
        run.sparsifier.finish()
    assert_zeros(run.model, run.sparsifier)


def test_an_interrupted_step_is_made_good_by_the_next() -> None:
    run = start(MLP).train(12)
    handle = run.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    run.loss(12).backward()
    with pytest.raises(ZeroDivisionError):
        run.optimizer.step()
    handle.remove()
    run.train()
    assert_zeros(run.model, run.sparsifier)


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("steps", [0, 9, TOTAL])
def test_a_sparsifier_is_not_copied_without_its_hooks(copying: object, steps: int) -> None:
    run = start(MLP).train(steps)
    with pytest.raises(TypeError, match=r"before finish\(\).*state_dict\(\)"):
        copying(run.sparsifier)


def test_a_deep_copied_optimizer_has_no_hooks() -> None:
    run = start(MLP).train(12)
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    model(MLP.batch(0)[0]).sum().backward()
    optimizer.step()
    assert run.sparsifier.step == 12


def test_two_sparsifiers_on_one_weight_are_refused() -> None:
    run = start(MLP)
    with pytest.raises(ValueError, match=r"0\.weight, 2\.weight, 4\.weight: these weights already have a Sparsifier"):
        Sparsifier(run.model, run.optimizer, sparsity=0.5, total_steps=10)


def test_two_sparsifiers_on_different_weights_work_side_by_side() -> None:
    model = MLP.fresh()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = Sparsifier(model, optimizer, sparsity=0.9, total_steps=TOTAL, include="0.weight")
    second = Sparsifier(model, optimizer, sparsity=0.5, total_steps=TOTAL, exclude="0.weight")
    for step in range(TOTAL):
        inputs, targets = MLP.batch(step)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    for sparsifier in (first, second):
        assert_zeros(model, sparsifier)
    assert int((model[0].weight == 0).sum()) == 216
    assert int(sum((model[index].weight == 0).sum() for index in (2, 4))) == 200


@pytest.mark.parametrize("warmup", [0, 6])
def test_what_cannot_be_learned_is_refused_at_once_and_leaves_nothing_behind(warmup: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    optimizer = SGD(model.parameters(), lr=0.05)
    request = {"sparsity": 0.5, "total_steps": TOTAL, "warmup": f"{warmup}it"}
    with pytest.raises(ValueError, match="on one device, got cpu, meta"):
        Sparsifier(model, optimizer, **request)
    other = nn.Sequential(nn.Bilinear(4, 4, 4))
    with pytest.raises(ValueError, match="held by Bilinear"):
        Sparsifier(other, SGD(other.parameters(), lr=0.05), scale="per_sample", **request)
    assert not optimizer._optimizer_step_pre_hooks
    Sparsifier(model, optimizer, exclude="1", **request)


def test_a_new_sparsifier_after_finish() -> None:
    run = start(MLP).train()
    run.sparsifier.finish()
    again = Sparsifier(run.model, run.optimizer, sparsity=0.9, total_steps=TOTAL)
    run.sparsifier = again
    with pytest.warns(UserWarning, match="sparse already"):
        run.train()
    assert_zeros(run.model, again)
    assert again.nonzeros == 64


def test_impose_wants_the_bare_model() -> None:
    run = start(MLP).train()
    with pytest.raises(KeyError, match=r"\.module"):
        run.sparsifier.impose(AveragedModel(run.model))


def test_masks_are_a_copy() -> None:
    run = start(MLP).train(9)
    masks = run.sparsifier.masks
    before = copy.deepcopy(masks)
    run.train()
    assert not differences(masks, before)
    assert differences(masks, run.sparsifier.masks)


def test_keep_zeros_lets_go() -> None:
    run = start(MLP).train()
    run.sparsifier.finish()
    optimizer = SGD(run.model.parameters(), lr=0.1)
    kept = keep_zeros(run.model, optimizer)
    kept.remove()
    before = zeros(run.model)
    run.loss(0).backward()
    with pytest.warns(UserWarning, match="training continues after finish"):
        optimizer.step()
    assert differences(zeros(run.model), before)


def test_keep_zeros_wants_the_optimizer_of_the_weights() -> None:
    run = start(MLP).train()
    run.sparsifier.finish()
    with pytest.raises(ValueError, match=r"the optimizer that trains 0\.weight"):
        keep_zeros(run.model, SGD(MLP.fresh().parameters(), lr=0.1))
    before = zeros(run.model)
    last = SGD(run.model[4].parameters(), lr=0.1)  # to train some of them is no mistake
    with keep_zeros(run.model, last):
        run.loss(0).backward()
        last.step()
    assert not differences(zeros(run.model), before)


@pytest.mark.parametrize("warmup", [0, 6])
def test_weights_loaded_before_masks_learn_count(warmup: int) -> None:
    run, other = (start(MLP, warmup=f"{warmup}it", seed=seed).train(warmup) for seed in (0, 3))
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    assert not differences(everything(run.train()), everything(other.train()))
