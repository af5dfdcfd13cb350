"""One table: what people do with a model while and after it is made sparse × networks. No zero may be lost."""

import copy
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from gossamer.zeros import keep_zeros
from zeros.networks import NETWORKS, Network
from zeros.running import (
    SPARSITY,
    TOTAL,
    Run,
    assert_zeros,
    differences,
    everything,
    restore,
    sgd,
    start,
    through_file,
    zeros,
)

every_network = pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
# torch says so of the LSTM with projections, dense or sparse.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
MID_RUN = 12  # a step in the middle of the sparsify phase


@pytest.fixture(scope="module")
def finished() -> Callable[[Network], Run]:
    """One whole run of each network, made once. Its model is not to be changed."""
    runs: dict[str, Run] = {}

    def get(network: Network) -> Run:
        if network.name not in runs:
            run = start(network).train()
            run.sparsifier.finish()
            runs[network.name] = run
        return runs[network.name]

    return get


def output(model: nn.Module, network: Network) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(network.batch(0)[0])


@every_network
def test_sparsity_is_exact(network: Network, finished: Callable[[Network], Run]) -> None:
    run = finished(network)
    assert_zeros(run.model, run.sparsifier)
    weights = [weight.parameter for weight in run.sparsifier.weights]
    total = sum(weight.numel() for weight in weights)
    kept = sum(int(weight.count_nonzero()) for weight in weights)
    assert kept == total - math.floor(total * SPARSITY + 0.5)


@every_network
def test_a_plain_model_loads_the_state_dict(network: Network, finished: Callable[[Network], Run]) -> None:
    run = finished(network)
    plain = network.fresh(seed=7)
    plain.load_state_dict(through_file(run.model.state_dict()), strict=True)
    assert not differences(zeros(plain), zeros(run.model))
    assert torch.equal(output(plain, network), output(run.model, network))


@every_network
def test_a_deep_copy_in_mid_run_is_plain_and_independent(network: Network) -> None:
    run = start(network).train(MID_RUN)
    twin = copy.deepcopy(run.model)
    assert_zeros(twin, run.sparsifier)
    before = copy.deepcopy(twin.state_dict())
    run.train(MID_RUN + 2)
    assert not differences(twin.state_dict(), before)
    undisturbed = start(network).train(MID_RUN)
    optimizer = sgd(twin.parameters())
    (twin(network.batch(0)[0]) ** 2).mean().backward()
    optimizer.step()
    assert undisturbed.sparsifier.step == MID_RUN  # no hook of anybody sits on the copy or its optimizer
    undisturbed.train(MID_RUN + 2)
    assert not differences(everything(run), everything(undisturbed))


@every_network
def test_a_file_in_mid_run_is_sparse_and_goes_on(network: Network) -> None:
    run = start(network).train(MID_RUN)
    state = through_file(everything(run))
    plain = network.fresh(seed=7)
    plain.load_state_dict(state["model"], strict=True)
    assert_zeros(plain, run.sparsifier)
    resumed = restore(start(network, seed=7), state).train()
    assert not differences(everything(run.train()), everything(resumed))


@every_network
def test_a_compiled_model_trains_the_same(network: Network) -> None:
    eager, compiled = start(network), start(network)
    torch._dynamo.reset()
    # Graphs of the operators themselves, run one by one: the arithmetic is the same, so the trajectory has to be.
    compiled.forward = torch.compile(compiled.model, backend="aot_eager", fullgraph=True)
    if any(isinstance(module, nn.RNNBase) for module in compiled.model.modules()):
        # Recurrent layers break the graph, with or without masks.
        compiled.forward = torch.compile(compiled.model, backend="aot_eager")
    eager.train()
    compiled.train()
    assert_zeros(compiled.model, compiled.sparsifier)
    assert not differences(eager.sparsifier.masks, compiled.sparsifier.masks)
    torch.testing.assert_close(compiled.model.state_dict(), eager.model.state_dict(), rtol=1e-5, atol=1e-6)


@every_network
def test_an_exported_model_has_the_zeros(network: Network, finished: Callable[[Network], Run]) -> None:
    run = finished(network)
    run.model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own inner workings
        program = torch.export.export(run.model, (network.batch(0)[0],), strict=False)
    for name, mask in run.sparsifier.masks.items():
        assert torch.equal(program.state_dict[name] != 0, mask), name
    with torch.no_grad():
        torch.testing.assert_close(program.module()(network.batch(0)[0]), output(run.model, network))


@every_network
def test_averaged_weights_get_the_zeros_imposed(network: Network) -> None:
    run = start(network)
    moving = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(TOTAL):
        run.train(step + 1)
        moving.update_parameters(run.model)
    masks = run.sparsifier.masks
    averages = dict(moving.module.named_parameters())
    lost = sum(int(averages[name][~mask].count_nonzero()) for name, mask in masks.items())
    assert lost > 0  # an average over steps with different masks is not as sparse by itself
    before = {name: averages[name].detach().clone() for name in masks}
    run.sparsifier.impose(moving.module)
    for name, mask in masks.items():
        assert torch.equal(averages[name], before[name] * mask), name


@every_network
def test_stochastic_weight_averaging_in_fine_tuning_keeps_the_zeros(network: Network) -> None:
    run = start(network).train(18)
    average, schedule = AveragedModel(run.model), SWALR(run.optimizer, swa_lr=0.02, anneal_epochs=2)
    for step in range(18, TOTAL):
        run.train(step + 1)
        average.update_parameters(run.model)
        schedule.step()
    update_bn([network.batch(step)[0] for step in range(3)], average)
    for name, mask in run.sparsifier.masks.items():
        assert torch.equal(dict(average.module.named_parameters())[name] != 0, mask), name


def _adamw(parameters: object) -> Optimizer:
    return AdamW(parameters, lr=0.01, weight_decay=0.1)  # type: ignore[arg-type]


@every_network
@pytest.mark.parametrize("make_optimizer", [sgd, _adamw], ids=["sgd", "adamw"])
def test_further_training_under_keep_zeros(
    network: Network, make_optimizer: Callable[..., Optimizer], finished: Callable[[Network], Run]
) -> None:
    masks = finished(network).sparsifier.masks
    model = copy.deepcopy(finished(network).model).train()
    optimizer = make_optimizer(model.parameters())
    inputs, targets = network.batch(0)
    before = copy.deepcopy(dict(model.named_parameters()))
    with keep_zeros(model, optimizer):
        for _ in range(5):
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
            parameters = dict(model.named_parameters())
            assert all(not parameters[name][~mask].any() for name, mask in masks.items())
    assert all(not torch.equal(parameters[name], before[name]) for name in masks)  # it did train


@every_network
@pytest.mark.parametrize("steps", [3, 9, 14, 16])
def test_finishing_early_cuts_to_the_target_and_says_so(network: Network, steps: int) -> None:
    run = start(network).train(steps)
    with pytest.warns(UserWarning, match=f"after {steps} of {TOTAL} steps"):
        run.sparsifier.finish()
    assert_zeros(run.model, run.sparsifier)
    weights = [weight.parameter for weight in run.sparsifier.weights]
    total = sum(weight.numel() for weight in weights)
    assert sum(int(weight.count_nonzero()) for weight in weights) == total - math.floor(total * SPARSITY + 0.5)


def test_attention_fast_path_equals_the_slow_one(finished: Callable[[Network], Run]) -> None:
    network = next(network for network in NETWORKS if network.name == "transformer")
    model = finished(network).model
    fast = output(model, network)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        slow = output(model, network)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_flattening_recurrent_parameters_changes_nothing(name: str) -> None:
    network = next(network for network in NETWORKS if network.name == name)
    plain, flattened = start(network).train(MID_RUN), start(network)
    for step in range(MID_RUN):
        flattened.train(step + 1)
        flattened.model.layer.flatten_parameters()  # type: ignore[union-attr, operator]
    assert not differences(everything(plain), everything(flattened))
    layer = flattened.model.layer
    parameters = {id(parameter) for parameter in layer.parameters()}  # type: ignore[union-attr]
    assert {id(weight) for weight in layer._flat_weights} == parameters  # type: ignore[union-attr]


def test_tied_weights_are_counted_once_and_stay_tied(finished: Callable[[Network], Run]) -> None:
    network = next(network for network in NETWORKS if network.name == "tied")
    run = finished(network)
    assert [weight.name for weight in run.sparsifier.weights] == ["embedding.weight", "body.weight"]
    assert run.model.decoder.weight is run.model.embedding.weight  # type: ignore[union-attr]
