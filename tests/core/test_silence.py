"""Mistakes that used to end in a wrong model without a word: each is right now, or says what to do."""

import copy
import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import gossamer
from gossamer.schedule import Phase

TOTAL = 40  # steps: 10 of warm-up, 14 to sparsify, 6 to stabilise, 10 of fine-tuning


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4))


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(16, 10, generator=torch.Generator().manual_seed(step))
    return F.mse_loss(model(inputs), inputs[:, :4])


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: Optimizer, first: int = 0, last: int = TOTAL) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def sparsify(model: nn.Module, optimizer: Any, **asked: Any) -> gossamer.Sparsifier:
    return gossamer.Sparsifier(model, optimizer, **{"sparsity": 0.8, "total_steps": TOTAL, **asked})


def zeros(model: nn.Module) -> int:
    return sum(int((parameter == 0).sum()) for name, parameter in model.named_parameters() if "weight" in name)


EXACT = int(0.8 * (240 + 96) + 0.5)


# --- steps that go on elsewhere ---


def test_another_optimizer_that_trains_the_weights_is_noticed() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    sparsifier = sparsify(model, optimizer)
    train(model, optimizer, 0, 20)
    other = torch.optim.Adam(model.parameters(), lr=1e-3)
    with pytest.warns(
        UserWarning, match=r"a Adam trains 0\.weight, 2\.weight, but the Sparsifier .* another optimizer"
    ):
        train(model, other, 20, 23)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, other, 23, 25)  # once is enough
    with pytest.raises(RuntimeError, match=r"0\.weight, 2\.weight changed since the last step"):
        sparsifier.finish()


def test_an_optimizer_of_other_weights_is_none_of_our_business() -> None:
    model, other = network(), network()
    sparsify(model, sgd(model.parameters()))
    train(other, sgd(other.parameters()), 0, 5)


class Outer(Optimizer):
    """Wraps an optimizer of the same parameters, as SAM and Lookahead do."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("given", ["inner", "outer"])
def test_optimizers_inside_of_each_other_are_one(given: str) -> None:
    model = network()
    inner = sgd(model.parameters())
    outer = Outer(inner)
    sparsifier = sparsify(model, inner if given == "inner" else outer)
    train(model, outer)
    sparsifier.finish()
    assert zeros(model) == EXACT


def test_training_on_after_finish_is_noticed_unless_zeros_are_kept() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    sparsifier = sparsify(model, optimizer)
    train(model, optimizer)
    sparsifier.finish()
    with gossamer.keep_zeros(model, optimizer):
        train(model, optimizer, 0, 3)
    assert zeros(model) == EXACT
    later = sgd(model.parameters())
    later.param_groups[0]["lr"] = 0.0  # as in the first step of a warm-up
    train(model, later, 0, 2)
    later.param_groups[0]["lr"] = 0.1
    with pytest.warns(UserWarning, match=r"training continues after finish\(\), and 0\.weight, 2\.weight lost zeros"):
        train(model, later, 2, 4)
    gossamer.impose(model, sparsifier.masks)
    assert zeros(model) == EXACT


def test_finish_leaves_no_momentum_that_would_move_pruned_weights() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    sparsifier = sparsify(model, optimizer)
    train(model, optimizer)
    sparsifier.finish()
    for name, mask in sparsifier.masks.items():
        momentum = optimizer.state[model.get_parameter(name)]["momentum_buffer"]
        assert not bool(momentum[~mask].any())
        assert bool(momentum[mask].any())


# --- plans that do not fit the run ---


def test_more_steps_than_planned_are_noticed_once() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    sparsifier = sparsify(model, optimizer)
    train(model, optimizer)
    with pytest.warns(UserWarning, match=r"more optimizer steps than total_steps=40: masks stay as they are"):
        train(model, optimizer, 40, 41)
    train(model, optimizer, 41, 45)
    sparsifier.finish()
    assert zeros(model) == EXACT


def test_a_sparsifier_that_is_dropped_in_the_middle_is_noticed() -> None:
    def run(steps: int) -> None:
        model = network()
        optimizer = sgd(model.parameters())
        sparsify(model, optimizer)  # held by the hooks of the optimizer
        train(model, optimizer, 0, steps)
        del model, optimizer
        gc.collect()

    with pytest.warns(
        UserWarning, match=r"discarded without finish\(\) after 20 of 40 optimizer steps, in the sparsify"
    ):
        run(20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(TOTAL)  # masks are final
        run(0)


def test_a_resumed_run_without_the_state_of_its_sparsifier_is_noticed() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    sparsifier = sparsify(model, optimizer)
    train(model, optimizer, 0, 30)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()))

    def resume(*, complete: bool) -> None:
        again = network()
        again.load_state_dict(saved[0])
        its = sgd(again.parameters())
        its.load_state_dict(saved[1])
        new = sparsify(again, its)
        if complete:
            new.load_state_dict(saved[2])
        train(again, its, 30, 32)

    resume(complete=True)
    with pytest.warns(UserWarning, match=r"the model is 80\.1% sparse already, and this Sparsifier starts at step 0"):
        resume(complete=False)


def test_a_head_that_starts_at_zero_is_no_sparse_model() -> None:
    model = network()
    nn.init.zeros_(model[2].weight)
    optimizer = sgd(model.parameters())
    sparsify(model, optimizer)
    train(model, optimizer, 0, 2)


# --- weights that were changed before finish() ---


def test_an_earlier_checkpoint_is_not_pruned_by_the_final_masks() -> None:
    """As `load_best_model_at_end` does it: the weights of the best evaluation, which were denser."""
    model = network()
    optimizer = sgd(model.parameters())
    sparsifier = sparsify(model, optimizer)
    train(model, optimizer, 0, 15)
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer, 15, TOTAL)
    last = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"0\.weight, 2\.weight changed since the last step: an earlier checkpoint"):
        sparsifier.finish()
    assert all(torch.equal(*each) for each in zip(model.parameters(), before, strict=True))
    assert sparsifier.phase is Phase.FINETUNE
    model.load_state_dict(last)
    sparsifier.finish()
    assert zeros(model) == EXACT


def test_averaged_weights_need_the_masks_before_finish() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    sparsifier = sparsify(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(TOTAL):
        train(model, optimizer, step, step + 1)
        average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())
    with pytest.raises(RuntimeError, match="averaged weights were put in"):
        sparsifier.finish()
    sparsifier.impose(model)
    sparsifier.finish()
    assert zeros(model) == EXACT


def test_changes_between_steps_are_noticed_while_masks_train() -> None:
    """The next step overwrites changes by a wrapper of the optimizer, or by a loop that clamps weights."""
    model = network()
    optimizer = sgd(model.parameters())
    sparsifier = sparsify(model, optimizer)
    for step in range(TOTAL):
        if step == 15:
            with pytest.warns(UserWarning, match=r"2\.weight changed since the last step, and while masks train"):
                train(model, optimizer, step, step + 1)
        else:
            train(model, optimizer, step, step + 1)
        with torch.no_grad():
            model[0].weight.mul_(2.0).div_(2.0)  # for a moment, as an average during an evaluation
            model[2].weight.clamp_(-0.1 if step in (3, 14, 35) else -10.0)
    sparsifier.finish()
    assert zeros(model) == EXACT


def test_an_interrupted_step_is_repaired_as_before() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    sparsifier = sparsify(model, optimizer)
    train(model, optimizer, 0, 15)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 15, 16)
    handle.remove()
    with pytest.warns(UserWarning, match="in the sparsify phase"):
        sparsifier.finish()
    assert zeros(model) == EXACT


# --- optimizers with steps of their own kind ---


def test_optimizers_that_step_inside_the_backward_pass_are_refused() -> None:
    """The last layer would have stepped, and cleared its gradients, before masks learn."""
    model = network()
    optimizers = {parameter: sgd([parameter]) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    sparsify(model, list(optimizers.values()))
    with pytest.raises(RuntimeError, match=r"gradients of 2\.weight are gone, as their optimizer stepped before"):
        loss_of(model, 0).backward()


def test_optimizers_may_step_in_another_order_while_gradients_stay() -> None:
    model = network()
    one, two = sgd(model[0].parameters()), sgd(model[2].parameters())
    sparsifier = sparsify(model, [one, two])
    for step in range(TOTAL):
        model.zero_grad()
        loss_of(model, step).backward()
        two.step()
        one.step()
    sparsifier.finish()
    assert zeros(model) == EXACT


class SAM(Optimizer):
    """Sharpness-aware minimization as it is usually written: the closure is evaluated at weights that were moved."""

    def __init__(self, parameters: Any, make: Callable[[Any], Optimizer], rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = make(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        for each in parameters:
            self.state[each]["before"] = each.detach().clone()
            each.add_(each.grad, alpha=float(self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for each in parameters:
            each.data = self.state[each]["before"]
        self.base.step()
        return loss


def train_with_sam(model: nn.Module, optimizer: SAM, first: int, last: int) -> None:
    for step in range(first, last):

        def closure(step: int = step) -> Tensor:
            loss = loss_of(model, step)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()


def test_sam_moves_weights_by_the_gradient_at_its_own_point() -> None:
    """In fine-tuning, one step against the same step written out for the sparse weights."""
    model = network()
    optimizer = SAM(model.parameters(), lambda p: torch.optim.SGD(p, lr=0.1))
    sparsifier = sparsify(model, optimizer)
    train_with_sam(model, optimizer, 0, 32)
    assert sparsifier.phase is Phase.FINETUNE
    expected = copy.deepcopy(model)
    masks = {name: mask.clone() for name, mask in sparsifier.masks.items()}
    train_with_sam(model, optimizer, 32, 33)
    loss_of(expected, 32).backward()
    start = [parameter.detach().clone() for parameter in expected.parameters()]
    gradients = [parameter.grad for parameter in expected.parameters()]
    norm = torch.stack([each.norm() for each in gradients]).norm()
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.add_(parameter.grad, alpha=float(0.05 / norm))
            parameter.mul_(masks.get(name, torch.ones(())))
    expected.zero_grad()
    loss_of(expected, 32).backward()
    for (name, parameter), before in zip(expected.named_parameters(), start, strict=True):
        wanted = (before - 0.1 * parameter.grad) * masks.get(name, torch.ones(()))
        torch.testing.assert_close(model.get_parameter(name), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("given", ["sam", "base"])
def test_sam_trains_a_sparse_network(given: str) -> None:
    model = network()
    optimizer = SAM(model.parameters(), sgd)
    sparsifier = sparsify(model, optimizer if given == "sam" else optimizer.base)
    before = float(loss_of(model, 999).detach())
    for step in range(TOTAL):
        weights = model[2].weight.detach().clone()
        train_with_sam(model, optimizer, step, step + 1)
        assert not torch.equal(weights, model[2].weight), step
    sparsifier.finish()
    assert zeros(model) == EXACT
    assert float(loss_of(model, 999).detach()) < 0.8 * before


class ScheduleFree(Optimizer):
    """The rule of schedule-free SGD: gradients are taken at y, a mixture of the average x and the fast iterate z."""

    def __init__(self, parameters: Any, lr: float = 0.3, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "train_mode": True, "steps": 0})

    @torch.no_grad()
    def _exchange(self, *, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                for each in group["params"]:
                    if "z" in self.state[each]:
                        beta = group["beta"]
                        each.lerp_(self.state[each]["z"], (1 - beta) if train else (1 - 1 / beta))
                group["train_mode"] = train

    def train(self) -> None:
        self._exchange(train=True)

    def eval(self) -> None:
        self._exchange(train=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            share, beta = 1.0 / group["steps"], group["beta"]
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.detach().clone())
                each.lerp_(z, share)
                each.add_(each.grad, alpha=group["lr"] * (beta * (1 - share) - 1))
                z.sub_(each.grad, alpha=group["lr"])


def test_the_evaluation_weights_of_schedule_free_optimizers_are_sparse() -> None:
    model, plain = network(), network()
    optimizer, control = ScheduleFree(model.parameters()), ScheduleFree(plain.parameters())
    sparsifier = sparsify(model, optimizer)
    for step in range(TOTAL):
        train(model, optimizer, step, step + 1)
        train(plain, control, step, step + 1)
        training = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.eval()
        pruned = [~mask for mask in sparsifier.masks.values()]
        assert not any(bool(model[i].weight[mask].any()) for i, mask in zip((0, 2), pruned, strict=True)), step
        optimizer.train()
        for parameter, before in zip(model.parameters(), training, strict=True):
            torch.testing.assert_close(parameter, before, rtol=1e-5, atol=1e-6)
    sparsifier.finish()
    optimizer.eval()
    assert zeros(model) == EXACT
    assert "eval" not in vars(optimizer)  # the optimizer is as it was
    optimizer.train()
    assert zeros(model) == EXACT


def test_schedule_free_training_with_evaluations_is_that_without_them() -> None:
    found = []
    for evaluations in (True, False):
        model = network().double()
        optimizer = ScheduleFree(model.parameters())
        sparsifier = sparsify(model, optimizer)
        for step in range(TOTAL):
            inputs = torch.randn(16, 10, generator=torch.Generator().manual_seed(step)).double()
            optimizer.zero_grad()
            F.mse_loss(model(inputs), inputs[:, :4]).backward()
            optimizer.step()
            if evaluations:
                optimizer.eval()
                optimizer.train()
        sparsifier.finish()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


class OwnRate(Optimizer):
    """Finds its learning rate by itself, as Adafactor does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad, alpha=0.1)


def test_an_optimizer_may_find_its_own_learning_rate() -> None:
    model, plain = network(), network()
    optimizer = OwnRate(model.parameters())
    sparsifier = sparsify(model, optimizer)
    train(plain, OwnRate(plain.parameters()))  # also if it trains other weights
    train(model, optimizer)
    sparsifier.finish()
    assert zeros(model) == EXACT
    model = network()
    optimizer = OwnRate(model.parameters())
    sparsify(model, optimizer, method="str")
    with pytest.raises(
        ValueError, match=r"method='str' needs the learning rate of the weights, which OwnRate does not"
    ):
        train(model, optimizer)


def test_an_optimizer_of_second_order_is_refused_in_its_first_step() -> None:
    """It would differentiate the gradients again, in its step, at weights that are not those of the forward pass."""
    model = network()
    optimizer = sgd(model.parameters())
    sparsify(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of create_graph=True, once in a process
        loss_of(model, 0).backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"gradients for SGD have a graph .* AdaHessian, are not supported"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer)


# --- wrappers ---


class Unhooked(Optimizer):
    """Has the places for hooks, but `step` is not wrapped, as `Optimizer.__init__` would do: Lookahead of timm."""

    def __init__(self, inner: Optimizer) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_the_hooks_of_an_optimizer_run_in_every_step() -> None:
    model = network()
    optimizer = Unhooked(sgd(model.parameters()))
    sparsifier = sparsify(model, optimizer)
    for step in range(TOTAL):
        model.zero_grad()  # zero_grad() of the optimizer would wrap its step
        loss_of(model, step).backward()
        optimizer.step()
    assert sparsifier.step == TOTAL
    sparsifier.finish()
    assert zeros(model) == EXACT


class NoHooks(Optimizer):
    """Never calls its parent's __init__, as some wrappers do."""

    def __init__(self, inner: Optimizer) -> None:
        self.optimizer, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_an_optimizer_without_hooks_is_refused_with_a_reason() -> None:
    model = network()
    inner = sgd(model.parameters())
    with pytest.raises(
        TypeError, match=r"expected an optimizer that runs the hooks .* NoHooks, whose class does not call"
    ):
        sparsify(model, NoHooks(inner))
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer or a list of them, got a str"):
        sparsify(model, "sgd")  # as ScheduleFreeWrapper, which is no Optimizer
    sparsify(model, inner)


# --- frozen weights ---


def test_a_target_that_holds_for_a_small_rest_is_noticed() -> None:
    """As with LoRA: the base is frozen, and 80 % zeros in the adapters are not what was meant."""
    model = network()
    model[0].requires_grad_(False)
    optimizer = sgd(model[2].parameters())
    with pytest.warns(
        UserWarning,
        match=r"holds for the 96 weights in training, such as 2\.weight, while 240 others are frozen",
    ):
        sparsify(model, optimizer).detach()
    sparsify(model, optimizer, include="2.*").detach()
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)  # the smaller part: an ordinary frozen head
    sparsify(model, sgd(model[0].parameters()))


def test_detach_lets_another_sparsifier_begin() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    first = sparsify(model, optimizer)
    train(model, optimizer, 0, 20)
    first.detach()
    first.detach()
    weights = [parameter.clone() for parameter in model.parameters()]
    assert all(torch.equal(*each) for each in zip(weights, model.parameters(), strict=True))
    assert first.phase is Phase.FINISHED
    second = sparsify(model, optimizer, warmup="0it")
    train(model, optimizer)
    second.finish()
    assert (first.step, zeros(model)) == (20, EXACT)


# --- keep_zeros ---


def test_keep_zeros_lets_new_layers_learn() -> None:
    """An adapter or head that starts at zero was not pruned."""
    model = network()
    optimizer = sgd(model.parameters())
    sparsifier = sparsify(model, optimizer)
    train(model, optimizer)
    sparsifier.finish()
    model.append(nn.Linear(4, 4))
    nn.init.zeros_(model[3].weight)
    tuned = sgd(model.parameters())
    with pytest.warns(UserWarning, match=r"3\.weight: zero everywhere, which looks like a layer that was initialized"):
        kept = gossamer.keep_zeros(model, tuned)
    with kept:
        train(model, tuned, 0, 5)
    assert bool(model[3].weight.all())
    assert int((model[0].weight == 0).sum()) + int((model[2].weight == 0).sum()) == EXACT
    nn.init.zeros_(model[3].weight)
    with gossamer.keep_zeros(model, tuned, include=["0.*", "2.*", "3.*"]):
        train(model, tuned, 0, 5)
    assert not bool(model[3].weight.any())
    empty = nn.Linear(3, 3)
    nn.init.zeros_(empty.weight)
    with (
        pytest.warns(UserWarning, match="zero everywhere, which looks"),
        pytest.raises(ValueError, match="zero everywhere: load it first"),
    ):
        gossamer.keep_zeros(empty, sgd(empty.parameters()))


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """No test hears of objects that another one dropped."""
    gc.collect()
    yield
    gc.collect()
