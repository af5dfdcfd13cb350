"""Following a run and handing its result on: print, metrics, `with`, copies, and masks for other models."""

import copy
import math
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel
from zeros.networks import BY_NAME
from zeros.running import TOTAL, assert_zeros, differences, everything, restore, start, through_file, zeros

import gossamer
from gossamer.schedule import Phase
from gossamer.sparsifier import Sparsifier

PHASES, MLP = list(Phase), BY_NAME["mlp"]


def test_print_shows_target_phases_progress_and_tensors() -> None:
    run = start(MLP)
    assert str(run.sparsifier).splitlines() == [
        "Sparsifier(method='scl')",
        "  target    128 of 640 weights",
        "  phases    warm-up 6, sparsify 8, stabilise 4, fine-tune 6 steps",
        "  progress  step 0 of 24, warm-up, 0.00% zeros",
        "  tensors   0.weight 20×12, 2.weight 16×20, 4.weight 5×16",
    ]
    run.train()
    assert f"step 24 of 24, fine-tune, {512 / 640:.2%} zeros" in str(run.sparsifier)
    run.sparsifier.finish()
    assert "step 24 of 24, finished, 80.00% zeros" in repr(run.sparsifier)


@pytest.mark.parametrize("method", ["scl", "rigl", "gradual"])
def test_metrics_are_flat_numbers_that_are_right_in_every_phase(method: str) -> None:
    run = start(MLP, method=method)
    keys, seen = run.sparsifier.metrics().keys(), set()
    for step in range(TOTAL):
        metrics = run.sparsifier.metrics()
        assert metrics.keys() == keys
        assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
        assert metrics["step"] == step
        assert PHASES[int(metrics["phase"])] is run.sparsifier.phase
        assert metrics["density"] == run.sparsifier.nonzeros / 640
        assert metrics["sparsity"] == run.sparsifier.sparsity
        assert metrics["target_sparsity"] == pytest.approx(0.8)
        seen.add(run.sparsifier.phase)
        run.train(step + 1)
    run.sparsifier.finish()
    assert run.sparsifier.metrics() == {**metrics, "step": float(TOTAL), "phase": 4.0}
    assert len(seen) == (4 if method != "rigl" else 3)


def test_metrics_have_the_latest_figures_of_the_diagnostics() -> None:
    run = start(MLP)
    for until in (9, 15, 20):
        run.train(until)
        metrics, health = run.sparsifier.metrics(), run.sparsifier.health(layers=False)
        assert metrics["flips"] == sum(health.flips)
        assert metrics["decay"] == health.decay[-1] > 0
    resumed = restore(start(MLP), through_file(everything(run)))
    assert resumed.sparsifier.metrics() == metrics
    early = start(MLP).train(10)
    resumed = start(MLP)
    resumed.sparsifier.load_state_dict(early.sparsifier.state_dict())
    assert resumed.sparsifier.metrics() == early.sparsifier.metrics()


def test_metrics_name_the_kind_of_target() -> None:
    assert "target_sparsity" not in start(MLP, decay=0.1).sparsifier.metrics()
    flops = start(MLP, flops=0.25, example_input=MLP.batch(0)[0]).sparsifier.metrics()
    assert flops["target_flops"] == pytest.approx(0.25)


def test_with_finishes_on_exit() -> None:
    run = start(MLP)
    with run.sparsifier as sparsifier:
        assert sparsifier is run.sparsifier
        run.train()
    assert run.sparsifier.phase is Phase.FINISHED
    assert_zeros(run.model, run.sparsifier)


def test_an_error_inside_with_leaves_the_run_to_be_continued() -> None:
    run = start(MLP)

    def interrupted() -> None:
        with run.sparsifier:
            run.train(9)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert run.sparsifier.phase is Phase.SPARSIFY
    run.train()
    assert_zeros(run.model, run.sparsifier)


@pytest.mark.parametrize("scale", ["global", "per_sample"])
def test_a_finished_sparsifier_is_copied_and_pickled(scale: str) -> None:
    run = start(MLP, scale=scale, learning_rate=lambda plan, step: 0.1, loss_scale=lambda: 1.0).train()
    run.sparsifier.finish()
    for each in (copy.copy(run.sparsifier), copy.deepcopy(run.sparsifier), pickle.loads(pickle.dumps(run.sparsifier))):
        assert isinstance(each, Sparsifier)
        assert not differences(each.masks, run.sparsifier.masks)
        assert each.metrics() == run.sparsifier.metrics()
        assert each.health() == run.sparsifier.health()
        assert str(each) == str(run.sparsifier)
        each.finish()
    _, sparsifier = copy.deepcopy((run.model, run.sparsifier))
    assert sparsifier.weights[0].parameter is not run.sparsifier.weights[0].parameter


def test_frozen_masks_hold_no_dense_weights() -> None:
    run = start(MLP).train(10)
    assert run.sparsifier._driver is not None
    held = [weakref.ref(run.sparsifier._driver.state.dense), weakref.ref(run.sparsifier._driver.method)]
    run.train()
    assert run.sparsifier.phase is Phase.FINETUNE
    assert [each() for each in held] == [None, None]


def test_masks_of_a_model_are_those_of_its_sparsifier() -> None:
    run = start(MLP).train()
    assert not differences(gossamer.masks(run.model), run.sparsifier.masks)
    assert not differences(gossamer.masks(torch.compile(run.model, backend="eager")), run.sparsifier.masks)
    assert gossamer.masks(run.model, include="0.weight").keys() == {"0.weight"}
    for parameter in run.model.parameters():
        parameter.requires_grad_(False)
    assert not differences(gossamer.masks(run.model), run.sparsifier.masks)


def test_negative_zeros_count_as_zeros() -> None:
    model = nn.Linear(2, 2)
    model.weight.data.copy_(torch.tensor([[-0.0, 0.0], [1.0, -1.0]]))
    assert gossamer.masks(model)["weight"].tolist() == [[False, False], [True, True]]


def test_impose_puts_zeros_into_models_and_state_dicts() -> None:
    run = start(MLP).train()
    masks = gossamer.masks(run.model)
    averaged = AveragedModel(MLP.fresh(3))
    gossamer.impose(averaged.module, masks)
    assert not differences(gossamer.masks(averaged.module), masks)
    state = MLP.fresh(4).state_dict()
    gossamer.impose(state, masks)
    plain = MLP.fresh(5)
    plain.load_state_dict(state)
    assert not differences(gossamer.masks(plain), masks)


def test_impose_changes_nothing_where_masks_do_not_fit() -> None:
    masks = gossamer.masks(start(MLP).train().model)
    model = MLP.fresh()
    before = zeros(model)
    with pytest.raises(KeyError, match=r"expected a model with the weights 9\.weight"):
        gossamer.impose(model, {**masks, "9.weight": masks["0.weight"]})
    with pytest.raises(ValueError, match=r"boolean mask of shape \(5, 16\) for 4\.weight, got torch\.bool of shape"):
        gossamer.impose(model, {**masks, "4.weight": masks["0.weight"]})
    with pytest.raises(ValueError, match=r"for 4\.weight, got torch\.float32"):
        gossamer.impose(model, {**masks, "4.weight": masks["4.weight"].float()})
    assert not differences(zeros(model), before)


def test_a_model_with_two_optimizers_is_described_too() -> None:
    model = MLP.fresh()
    optimizers = [SGD(model[0].parameters(), lr=0.1), SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)]
    with (
        pytest.warns(UserWarning, match=r"after 0 of 10 steps"),
        Sparsifier(model, optimizers, sparsity=0.5, total_steps=10) as sparsifier,
    ):
        assert "320 of 640" in str(sparsifier)
    assert pickle.loads(pickle.dumps(sparsifier)).sparsity == 0.5
