"""Optimizers as they are installed: zeros are exact after every step, and a sparse network trains as its dense control.

The table has one row for each optimizer class of timm that runs on a CPU, and the optimizers that people pass most
often besides: Muon next to AdamW, Lion, Adafactor, the schedule-free ones, and sharpness-aware minimization.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import gossamer

timm_optim = pytest.importorskip("timm.optim", reason="pip install timm")
TOTAL, SPARSITY = 80, 0.8
ZEROS = int(SPARSITY * (16 * 24 + 24 * 24 + 24 * 4) + 0.5)
torch.manual_seed(5)
TARGET = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).requires_grad_(False)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return F.mse_loss(model(inputs), TARGET(inputs))


Make = Callable[[nn.Module], list[Optimizer]]


def of_timm(name: str) -> Make:
    rate = 1.0 if name == "adadelta" else 0.01
    return lambda model: [timm_optim.create_optimizer_v2(model, opt=name, lr=rate, weight_decay=0.01)]


def timm_names() -> list[str]:
    """The first name of each class, without those that need a GPU, and the wrapper Lookahead."""
    by_class: dict[Any, str] = {}
    for name in timm_optim.list_optimizers():
        kind = timm_optim.get_optimizer_info(name).opt_class
        if not isinstance(kind, str) and name != "adahessian":
            by_class.setdefault(kind, name)
    return [*by_class.values(), "lookahead_adamw"]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """Muon takes all matrices, so AdamW has none of the weights that are made sparse."""
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def schedule_free(name: str, **options: Any) -> Make:
    def make(model: nn.Module) -> list[Optimizer]:
        package = pytest.importorskip("schedulefree", reason="pip install schedulefree")
        optimizer: Any = getattr(package, name)(model.parameters(), **options)
        switch([optimizer], "train")
        return [optimizer]

    return make


MAKE: dict[str, Make] = {
    **{f"timm {name}": of_timm(name) for name in timm_names()},
    "Muon and AdamW": muon_and_adamw,
    "Adafactor of torch": lambda m: [torch.optim.Adafactor(m.parameters(), lr=0.02)],
    "Adafactor of transformers": lambda m: [transformers.Adafactor(m.parameters(), lr=0.01, relative_step=False)],
    "Adafactor with its own rate": lambda m: [transformers.Adafactor(m.parameters(), lr=None)],
    "schedule-free SGD": schedule_free("SGDScheduleFree", lr=1.0),
    "schedule-free AdamW": schedule_free("AdamWScheduleFree", lr=0.02),
    "schedule-free RAdam": schedule_free("RAdamScheduleFree", lr=0.02),
    "schedule-free AdamW with a closure": schedule_free("AdamWScheduleFreeClosure", lr=0.02),
}


def switch(optimizers: list[Optimizer], mode: str) -> None:
    for optimizer in optimizers:
        if hasattr(optimizer, mode):
            getattr(optimizer, mode)()


def pruned_are_zero(model: nn.Module, sparsifier: gossamer.Sparsifier) -> bool:
    return not any(bool(model.get_parameter(name)[~mask].any()) for name, mask in sparsifier.masks.items())


def trained(make: Make, *, sparse: bool) -> float:
    """The loss at the end; of a sparse network, zeros are checked after every step and in every evaluation."""
    model = network()
    optimizers = make(model)
    sparsifier = gossamer.Sparsifier(model, optimizers, sparsity=SPARSITY, total_steps=TOTAL) if sparse else None
    for step in range(TOTAL):

        def closure(step: int = step) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        if "Closure" in type(optimizers[0]).__name__:
            optimizers[0].step(closure)  # type: ignore[arg-type]
        else:
            closure()
            for optimizer in optimizers:
                optimizer.step()
        if sparsifier is not None:
            assert pruned_are_zero(model, sparsifier), step
            if step % 9 == 8:
                switch(optimizers, "eval")
                assert pruned_are_zero(model, sparsifier), step
                switch(optimizers, "train")
    if sparsifier is not None:
        sparsifier.finish()
    switch(optimizers, "eval")
    if sparsifier is not None:
        assert sum(int((each == 0).sum()) for each in model.parameters() if each.ndim == 2) == ZEROS
    return float(loss_of(model, 10**6).detach())


@pytest.fixture(autouse=True)
def without_compiler() -> Iterator[None]:
    """Kron would compile its step, which takes a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'", "ignore:`torch.jit.script")
@pytest.mark.parametrize("name", MAKE)
def test_zeros_are_exact_and_training_is_as_good_as_dense(name: str) -> None:
    start = float(loss_of(network(), 10**6).detach())
    dense = trained(MAKE[name], sparse=False)
    assert dense < 0.7 * start
    assert trained(MAKE[name], sparse=True) < dense + 0.15 * (start - dense)


def test_an_optimizer_of_second_order_is_refused() -> None:
    model = network()
    (optimizer,) = of_timm("adahessian")(model)
    gossamer.Sparsifier(model, optimizer, sparsity=SPARSITY, total_steps=TOTAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of create_graph=True, once in a process
        loss_of(model, 0).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="gradients for Adahessian have a graph"):
        optimizer.step()
    optimizer.zero_grad()


def test_a_wrapper_that_is_no_optimizer_is_refused_and_the_one_inside_is_not_enough() -> None:
    """ScheduleFreeWrapper shows the optimizer inside other weights than the model trains with."""
    package = pytest.importorskip("schedulefree", reason="pip install schedulefree")
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = package.ScheduleFreeWrapper(inner, momentum=0.9)
    with pytest.raises(TypeError, match=r"got a ScheduleFreeWrapper.*schedulefree\.SGDScheduleFree instead"):
        gossamer.Sparsifier(model, wrapper, sparsity=SPARSITY, total_steps=TOTAL)
    sparsifier = gossamer.Sparsifier(model, inner, sparsity=SPARSITY, total_steps=TOTAL)
    wrapper.train()
    for step in range(TOTAL):
        wrapper.zero_grad()
        loss_of(model, step).backward()
        wrapper.step()
    with pytest.raises(RuntimeError, match=r"changed since the last step: .* averaged weights were put in"):
        sparsifier.finish()


def test_an_optimizer_inside_lookahead_is_not_enough() -> None:
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = timm_optim.Lookahead(inner)
    gossamer.Sparsifier(model, inner, sparsity=SPARSITY, total_steps=TOTAL)

    def train() -> None:
        for step in range(TOTAL // 2):
            outer.zero_grad()
            loss_of(model, step).backward()
            outer.step()

    with pytest.warns(UserWarning, match=r"changed since the last step, .* as Lookahead does, pass that wrapper"):
        train()
