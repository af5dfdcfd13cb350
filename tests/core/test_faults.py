"""What goes wrong in training, as one table: for each fault, what must come out.

A row says what is done to a run of 24 steps (6 of warm-up, 8 to sparsify, 4 to stabilise, 6 of fine-tuning) and either
the words of the error or, without these, that the run ends with finite weights and exactly the zeros that were asked
for. Warnings are errors where a row does not name them.
"""

import copy
import math
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations
from torch.optim import SGD, Adam, Optimizer

import gossamer
from gossamer.methods import METHODS
from gossamer.methods.base import Options, PrunedAtZero
from gossamer.schedule import Phase

TOTAL = 24
# The next step when something happens, by what it belongs to.
STEPS = {"warm-up": 3, "first mask step": 6, "sparsify": 9, "stabilise": 15, "first frozen step": 18, "fine-tune": 21}
METHODS_OF_WEIGHTS = [name for name, method in METHODS.items() if not method.structured and name != "dense"]
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 4))


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.05)


class Training:
    """A small network in training."""

    def __init__(self, model: Callable[[], nn.Module] = mlp, optimizer: Make = sgd, **asked: Any) -> None:
        torch.manual_seed(0)
        self.model = model()
        self.optimizer = optimizer(self.model.parameters())
        if not {"sparsity", "flops", "decay"} & asked.keys():
            asked["sparsity"] = 0.8
        self.sparsifier = gossamer.Sparsifier(self.model, self.optimizer, **({"total_steps": TOTAL} | asked))
        self.after_backward: Callable[[int], None] = lambda step: None

    def inputs(self, step: int) -> Tensor:
        first = next(each for each in self.model.parameters() if each.dim() > 1 and each.is_floating_point())
        drawn = torch.randn(8, first.shape[-1], generator=torch.Generator("cpu").manual_seed(step), device="cpu")
        return drawn.to(first.dtype)

    def loss(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.model(inputs)
        return output.float().square().mean()

    def backward(self, step: int) -> Tensor:
        loss = self.loss(self.inputs(step))
        loss.backward()
        self.after_backward(step)
        return loss

    def steps(self, first: int = 0, last: int = TOTAL) -> "Training":
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.backward(step)
            self.optimizer.step()
        return self

    def rest(self) -> "Training":
        """The steps of the plan that are left."""
        return self.steps(self.sparsifier.step)

    @property
    def weight(self) -> nn.Parameter:
        """The first prunable one."""
        return self.sparsifier.weights[0].parameter

    def check(self) -> None:
        """Finish, and look for finite weights and exact zeros in the model itself."""
        self.sparsifier.finish()
        assert self.sparsifier.phase is Phase.FINISHED
        assert all(torch.isfinite(parameter).all() for parameter in self.model.parameters())
        named = dict(self.model.named_parameters())
        masks = self.sparsifier.masks
        kept = sum(int(mask.count_nonzero()) for mask in masks.values())
        total = sum(mask.numel() for mask in masks.values())
        assert all(not named[name][~mask].any() for name, mask in masks.items())
        assert self.sparsifier.nonzeros == kept
        target = self.sparsifier._target
        if target.decay is None and target.costs is None:
            assert kept == total - math.floor(total * self.sparsifier._request.sparsity + 0.5)
        elif target.costs is not None:
            spent = sum(
                cost * int(mask.count_nonzero()) for cost, mask in zip(target.costs, masks.values(), strict=True)
            )
            assert target.final - max(target.costs) < spent <= target.final


Do = Callable[[Training], None]


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    name: str
    do: Do = lambda run: None  # what is done; the rest of the steps follow
    error: str | None = None  # words of the error that must come out
    kind: type[BaseException] = RuntimeError
    warns: str | None = None  # words of a warning that must come out, too
    given: dict[str, Any] = field(default_factory=dict)  # arguments of Training


# --- what is done ---


def at(step: int, change: Do) -> Do:
    """Train up to a step, change something, and train to the end."""

    def do(run: Training) -> None:
        run.steps(0, step)
        change(run)
        run.rest()

    return do


def poison_weight(value: float) -> Do:
    def change(run: Training) -> None:
        with torch.no_grad():
            run.weight[tuple(run.weight.nonzero()[0])] = value  # one that is kept

    return change


def poison_bias(value: float) -> Do:
    def change(run: Training) -> None:
        with torch.no_grad():
            run.model.get_parameter("2.bias")[0] = value

    return change


def change_gradients(step: int, change: Callable[[nn.Module], None], *, to_the_end: bool = False) -> Do:
    def do(run: Training) -> None:
        run.after_backward = lambda now: change(run.model) if now == step or (to_the_end and now > step) else None
        run.steps()

    return do


def poison_gradient(value: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        gradient[1, 2] = value

    return change


def scale_gradients(factor: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    return change


def drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def poison_input(step: int, value: float) -> Do:
    def do(run: Training) -> None:
        inputs = run.inputs
        run.inputs = lambda now: torch.full((8, 10), value) if now == step else inputs(now)  # type: ignore[method-assign]
        run.steps()

    return do


def poison_masks(value: float, *, every: bool) -> Do:
    def change(run: Training) -> None:
        driver = run.sparsifier._driver
        assert driver is not None
        variables = driver.training.state()["mask_variable"]
        variables[:, slice(None) if every else slice(3, 4)] = value

    return change


def repeat_last_step(run: Training) -> None:
    run.optimizer.step()


def train_past_the_end(run: Training) -> None:
    run.steps().steps(0, 10)


def step_after_finish(run: Training) -> None:
    run.steps()
    run.sparsifier.finish()
    before = copy.deepcopy(run.model.state_dict())
    run.sparsifier.finish()
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())


def advance_after_finish(run: Training) -> None:
    run.steps().sparsifier.finish()
    run.sparsifier.advance()


def end_early(step: int) -> Do:
    return lambda run: run.steps(0, step) and None


def replace_parameter(run: Training) -> None:
    run.model[0].weight = nn.Parameter(run.model[0].weight.detach().clone())  # type: ignore[index]


def replace_use(run: Training) -> None:
    """Of a weight that two layers share: the other one keeps it."""
    run.model[2].weight = nn.Parameter(torch.ones(10, 10))  # type: ignore[index]


def replace_layer(run: Training) -> None:
    run.model[0] = nn.Linear(10, 12)  # type: ignore[index]


def assign_state(run: Training) -> None:
    state = {name: torch.ones_like(value) for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)


def load_model_state(run: Training) -> None:
    run.model.load_state_dict({name: torch.randn_like(value) for name, value in run.model.state_dict().items()})


def replace_data(run: Training) -> None:
    run.weight.data = torch.randn_like(run.weight)


def go_back(run: Training) -> None:
    """Load an earlier state of all three."""
    first = Training().steps(0, 2)
    run.model.load_state_dict(first.model.state_dict())
    run.optimizer.load_state_dict(first.optimizer.state_dict())
    run.sparsifier.load_state_dict(first.sparsifier.state_dict())
    run.steps(2, 20)


def another_optimizer(run: Training) -> None:
    run.optimizer = sgd(run.model.parameters())


def forget_a_weight(run: Training) -> None:
    group = run.optimizer.param_groups[0]
    group["params"] = [each for each in group["params"] if each is not run.weight]


def more_parameters(run: Training) -> None:
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.randn(3, 3))]})


def a_weight_with_its_own_rate(run: Training) -> None:
    forget_a_weight(run)
    run.optimizer.add_param_group({"params": [run.weight], "lr": 0.001})


def freeze(run: Training) -> None:
    run.weight.requires_grad_(False)


def to_bfloat16(run: Training) -> None:
    run.model.bfloat16()


def to_float64(run: Training) -> None:
    run.model.double()


def to_eval(run: Training) -> None:
    run.model.eval()


def zero_momentum(run: Training) -> None:
    run.optimizer.state.clear()


def infinite_rate(run: Training) -> None:
    run.optimizer.param_groups[0]["lr"] = math.inf


def negative_rate(run: Training) -> None:
    run.optimizer.param_groups[0]["lr"] = -0.05


def no_rate(run: Training) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.0


def deep_copy_model(run: Training) -> None:
    """The copy goes its own way."""
    twin = copy.deepcopy(run.model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(torch.nan)


def deep_copy_sparsifier(run: Training) -> None:
    copy.deepcopy(run.sparsifier)


def another_sparsifier(run: Training) -> None:
    gossamer.Sparsifier(run.model, run.optimizer, sparsity=0.5, total_steps=TOTAL)


def in_mode(mode: Callable[[], Any]) -> Do:
    def change(run: Training) -> None:
        run.optimizer.zero_grad()
        run.backward(100)
        with mode():
            run.optimizer.step()

    return change


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def all_steps_in(mode: Callable[[], Any]) -> Do:
    def do(run: Training) -> None:
        with mode():
            run.steps()

    return do


def failing_closure(run: Training) -> None:
    def fail() -> Tensor:
        run.backward(100)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.optimizer.step(fail)  # type: ignore[arg-type]


def failing_second_closure(run: Training) -> None:
    calls: list[int] = []

    def fail() -> Tensor:
        run.optimizer.zero_grad()
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return run.backward(100 + len(calls))

    with pytest.raises(ZeroDivisionError):
        run.optimizer.step(fail)  # type: ignore[arg-type]


def with_closures(run: Training) -> None:
    for step in range(TOTAL):

        def closure(step: int = step) -> Tensor:
            run.optimizer.zero_grad()
            return run.backward(step)

        run.optimizer.step(closure)  # type: ignore[arg-type]


def failing_backward(run: Training) -> None:
    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    handle = run.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run.backward(100)
    handle.remove()


def failing_hook(*, before: bool) -> Do:
    """A hook of the user's that fails, after ours or around it."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    def change(run: Training) -> None:
        register = run.optimizer.register_step_pre_hook if before else run.optimizer.register_step_post_hook
        handle = register(fail)
        run.backward(100)
        with pytest.raises(ZeroDivisionError):
            run.optimizer.step()
        handle.remove()

    return change


class Failing(SGD):
    """Fails after it has changed its first parameter."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if not self.fails:
            return super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].fill_(0.2)
        raise KeyboardInterrupt


def failing_step(run: Training) -> None:
    assert isinstance(run.optimizer, Failing)
    run.optimizer.fails = True
    run.backward(100)
    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step()
    run.optimizer.fails = False


def failing_step_then_finish(step: int) -> Do:
    def do(run: Training) -> None:
        run.steps(0, step)
        failing_step(run)

    return do


def failing_step_then_resume(step: int) -> Do:
    """What is saved after an interrupt is loaded into a new run."""

    def do(run: Training) -> None:
        run.steps(0, step)
        failing_step(run)
        fresh = Training()
        fresh.model.load_state_dict(run.model.state_dict())
        fresh.optimizer.load_state_dict(run.optimizer.state_dict())
        fresh.sparsifier.load_state_dict(run.sparsifier.state_dict())
        fresh.rest().check()
        run.rest()

    return do


def nothing_to_learn_from(run: Training) -> None:
    for _ in range(TOTAL):
        run.optimizer.step()


def two_backward_passes(run: Training) -> None:
    for step in range(TOTAL):
        run.optimizer.zero_grad(set_to_none=False)
        loss = run.loss(run.inputs(step))
        loss.backward(retain_graph=True)
        loss.backward()
        run.optimizer.step()


def clipped(run: Training) -> None:
    def clip(step: int) -> None:
        nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)

    run.after_backward = clip
    run.steps()


def never_zeroed(run: Training) -> None:
    for step in range(TOTAL):
        run.backward(step)
        run.optimizer.step()


def scaled(*bad: int) -> Do:
    """A GradScaler that skips some steps because of infinities."""

    def do(run: Training) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        step = 0
        while run.sparsifier.step < TOTAL:
            run.optimizer.zero_grad()
            scaler.scale(run.loss(run.inputs(step))).backward()
            if step in bad:
                run.weight.grad.fill_(torch.inf)  # type: ignore[union-attr]
            scaler.step(run.optimizer)
            scaler.update()
            step += 1
        assert step == TOTAL + len(bad)

    return do


def autocast(run: Training) -> None:
    for step in range(TOTAL):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.loss(run.inputs(step))
        loss.backward()
        run.optimizer.step()


def averaged(run: Training) -> None:
    """A moving average of the weights, which takes their zeros in the end."""
    average = optim.swa_utils.AveragedModel(run.model)
    for step in range(TOTAL):
        run.steps(step, step + 1)
        average.update_parameters(run.model)
    run.sparsifier.impose(average.module)
    for name, mask in run.sparsifier.masks.items():
        assert not average.module.get_parameter(name)[~mask].any()


def other_thread_steps(run: Training) -> None:
    """Steps from another thread, one after the other."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run.steps(0, TOTAL)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed


def two_on_disjoint_weights(run: Training) -> None:
    """`run` has the first layer, another sparsifier the second, and one optimizer both."""
    other = gossamer.Sparsifier(run.model, run.optimizer, sparsity=0.5, total_steps=TOTAL, include="2.*")
    run.steps()
    other.finish()
    assert other.nonzeros == 24
    assert int(run.model.get_parameter("2.weight").count_nonzero()) == 24


def ask_in_every_step(run: Training) -> None:
    for step in range(TOTAL):
        run.steps(step, step + 1)
        found = run.sparsifier.metrics()
        assert all(math.isfinite(value) for value in found.values())
        repr(run.sparsifier)
        run.sparsifier.state_dict()


def leave_block_by_error(run: Training) -> None:
    """An error within `with` leaves everything as it is, to go on."""
    run.steps(0, 9)
    run.after_backward = lambda step: 1 // (10 - step) and None
    with pytest.raises(ZeroDivisionError), run.sparsifier:
        run.steps(9)
    run.after_backward = lambda step: None
    assert run.sparsifier.phase is Phase.SPARSIFY
    run.steps(10)


def interrupted(first: int, every: int, at_step: int) -> Do:
    """Ctrl-C at lines of a step, in gossamer and in the optimizer: each `every`-th, and on from there."""

    def do(run: Training) -> None:
        line = first
        while True:
            other = Training(optimizer=lambda p: SGD(p, lr=0.05, momentum=0.9)).steps(0, at_step)
            other.backward(at_step)
            if not _interrupted_at(line, other.optimizer.step):
                break
            other.rest().check()
            line += every
        assert line > first + every
        run.steps()

    return do


def _interrupted_at(line: int, step: Callable[[], object]) -> bool:
    """Whether a KeyboardInterrupt was raised at this line of the step."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal seen
        name = frame.f_code.co_filename
        if "gossamer" not in name and not name.endswith("sgd.py"):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(True)  # an interrupt at the end of a `with` block skips its exit
    return False


def a_signal_in_every_step(run: Training) -> None:
    """A signal handler that looks at the model: it may see dense weights, and changes nothing."""
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(int(run.weight.count_nonzero()))

    before = signal.signal(signal.SIGUSR1, look)
    try:
        run.after_backward = lambda step: signal.raise_signal(signal.SIGUSR1)
        run.steps()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(seen) == TOTAL


# --- other models ---


class One(nn.Module):
    """A layer with a given weight, and perhaps more parameters."""

    def __init__(self, weight: Tensor, *, trained: bool = True, **more: nn.Parameter) -> None:
        super().__init__()
        self.layer = nn.Linear(
            weight.shape[1], weight.shape[0], dtype=weight.dtype if weight.is_floating_point() else None
        )
        self.layer.weight = nn.Parameter(weight, requires_grad=trained)
        for name, parameter in more.items():
            self.register_parameter(name, parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layer(inputs)
        return result


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.dtype)


class Words(nn.Module):
    """An embedding of which most rows never occur."""

    def __init__(self, *, sparse: bool = False, bad_row: float | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6, padding_idx=0, sparse=sparse)
        self.out = nn.Linear(6, 3)
        if bad_row is not None:
            with torch.no_grad():
                self.table.weight[49] = bad_row

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(self.table((inputs.abs() * 4).long().clamp_max(9)).mean(1))
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs[:, :8].reshape(2, -1, 8)
        result: Tensor = self.attention(tokens, tokens, tokens)[0]
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 6, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.rnn(inputs.reshape(8, -1, 5))[0]
        return result


class Folded(nn.Module):
    """Sees the numbers of a sample as an image, a line or a volume."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, inputs: Tensor) -> Tensor:
        volume = math.prod(self.shape)
        repeated = inputs.repeat(1, -(-volume // inputs.shape[1]))[:, :volume]
        result: Tensor = self.layer(repeated.reshape(-1, *self.shape))
        return result


def filled(value: float) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = mlp()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        return model

    return make


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
    model[2].weight = model[0].weight
    return model


def sharing_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
    model[2].weight.data = model[0].weight.data
    return model


def half_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def with_idle_layer() -> nn.Module:
    model = One(torch.randn(4, 10))
    model.register_module("idle", nn.Linear(5, 5))
    return model


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weights all equal": filled(0.1),
    "weights of denormal size": filled(1e-42),
    "weights of size 1e-25": filled(1e-25),
    "weights all zero": filled(0.0),
    "weights all minus zero": filled(-0.0),
    "a transposed weight": lambda: One(weight(10, 4).t()),
    "every second column of a larger tensor": lambda: One(weight(4, 20)[:, ::2]),
    "a view with an offset": lambda: One(weight(50)[10:].view(4, 10)),
    "a scalar parameter": lambda: One(weight(4, 10), scale=nn.Parameter(torch.tensor(1.0))),
    "an empty parameter": lambda: One(weight(4, 10), scale=nn.Parameter(torch.empty(0))),
    "a frozen integer parameter": lambda: One(
        weight(4, 10), table=nn.Parameter(torch.ones(3, 3, dtype=torch.int64), requires_grad=False)
    ),
    "float64": lambda: mlp().double(),
    "bfloat16": lambda: mlp().bfloat16(),
    "float16": lambda: nn.Linear(10, 4).half(),
    "float64 and float32": lambda: nn.Sequential(nn.Linear(10, 12).double(), Cast(torch.float32), nn.Linear(12, 4)),
    "float32 and bfloat16": lambda: nn.Sequential(nn.Linear(10, 12), Cast(torch.bfloat16), nn.Linear(12, 4).bfloat16()),
    "tied weights": tied,
    "a frozen layer": half_frozen,
    "a hundred layers": lambda: nn.Sequential(*(nn.Linear(10, 10) for _ in range(100))),
    "a layer that is never used": with_idle_layer,
    "an embedding with unused rows": Words,
    "attention": Attention,
    "an LSTM": Recurrent,
    "a grouped convolution": lambda: Folded(nn.Conv2d(4, 8, 3, groups=2), 4, 4, 4),
    "a transposed, grouped convolution": lambda: Folded(nn.ConvTranspose2d(4, 8, 3, groups=2), 4, 4, 4),
    "a depthwise convolution": lambda: Folded(nn.Conv1d(6, 6, 3, groups=6), 6, 5),
    "a convolution in channels_last": lambda: Folded(nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), 4, 4, 4),
    "a convolution in three dimensions": lambda: Folded(nn.Conv3d(2, 4, 2), 2, 2, 2, 2),
}

BAD_MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "one complex weight": (lambda: One(weight(4, 10, dtype=torch.complex64)), "complex .* real weights"),
    "lazy layers": (lambda: nn.Sequential(nn.LazyLinear(4)), "lazy layers have no shapes yet"),
    "two parameters in one memory": (sharing_memory, "share memory"),
    "frozen weights alone": (lambda: nn.Linear(10, 4).requires_grad_(False), "are frozen"),
    "integer weights": (lambda: One(torch.ones(4, 10, dtype=torch.int8), trained=False), "are frozen"),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(10, 4)), "not a parameter but computed"),
    "no layers": (lambda: nn.BatchNorm1d(10), "nothing to sparsify"),
    "sparse gradients": (lambda: Words(sparse=True), "sparse=True"),
    "a weight of one number": (lambda: nn.Linear(1, 1), "keeps 0 of 1 weights, but min_density requires 1"),
}

OPTIMIZERS: dict[str, Make] = {
    "no learning rate": lambda p: SGD(p, lr=0.0),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.99, nesterov=True),
    "maximizing": lambda p: SGD(p, lr=0.01, maximize=True),
    "a learning rate in a tensor": lambda p: Adam(p, lr=torch.tensor(0.01)),
    "foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "weight decay that removes the weight": lambda p: optim.AdamW(p, lr=0.01, weight_decay=100.0),
    "parameters with names": lambda p: SGD([(str(index), each) for index, each in enumerate(p)], lr=0.05),
    "an empty group": lambda p: SGD([{"params": list(p)}, {"params": []}], lr=0.05),
    "a group for each parameter": lambda p: SGD([{"params": [each], "lr": 0.01} for each in p]),
    "a factored second moment": lambda p: optim.Adafactor(p, lr=0.01),
    "signs alone": lambda p: optim.Rprop(p, lr=0.01),
}

ASKED: dict[str, dict[str, Any]] = {
    "no sparsity": {"sparsity": 0.0},
    "hardly any sparsity": {"sparsity": 1e-9},
    "a whole number as sparsity": {"sparsity": 0},
    "all but two weights": {"sparsity": 0.99},
    "all weights, layers may die": {"sparsity": 0.9999, "min_density": 0.0},
    "two steps": {"total_steps": 2},
    "a plan of one step": {"total_steps": 1, "warmup": "0it", "sparsify": "1it", "stabilise": "0it"},
    "no warm-up": {"warmup": "0it"},
    "no stabilise phase": {"stabilise": "0it"},
    "no fine-tuning": {"warmup": "0.3run", "sparsify": "0.4run", "stabilise": "0.3run"},
    "masks that learn without bounds": {"mask_lr": 1e38, "anneal": "constant"},
    "masks that start near infinity": {"start": "constant", "start_value": 3e38},
    "masks that start near zero": {"start": "constant", "start_value": 1e-40},
    "no decay": {"decay": 0.0},
    "a huge decay": {"decay": 1e30},
    "multiply-adds": {"flops": 0.1, "example_input": torch.zeros(1, 10)},
    "all multiply-adds": {"flops": 1.0, "example_input": torch.zeros(1, 10)},
    "an example of NaN": {"flops": 0.1, "example_input": torch.full((1, 10), math.nan)},
    "a negative seed": {"seed": -1},
}

BAD_REQUESTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sparsity": 1.0}, ValueError, "at least 0 and below 1"),
    ({"sparsity": -0.1}, ValueError, "at least 0 and below 1"),
    ({"sparsity": math.nan}, ValueError, "at least 0 and below 1"),
    ({"sparsity": True}, TypeError, "expected sparsity to be a number"),
    ({"sparsity": "0.5"}, TypeError, "expected sparsity to be a number"),
    ({"sparsity": 0.9999}, ValueError, "keeps 0 of 168 weights"),
    ({"sparsity": None}, ValueError, "one of sparsity=.*got none"),
    ({"sparsity": 0.5, "decay": 0.1}, ValueError, "one of sparsity=.*got sparsity, decay"),
    ({"decay": math.nan}, ValueError, "expected decay to be a number of at least 0"),
    ({"decay": math.inf}, ValueError, "expected decay to be a number of at least 0"),
    ({"flops": math.nan, "example_input": torch.zeros(1, 10)}, ValueError, "expected flops to be the fraction"),
    ({"flops": 1e-9, "example_input": torch.zeros(1, 10)}, ValueError, "keeps 0 of 168 multiply-adds"),
    ({"flops": 0.1}, ValueError, "flops= needs example_input="),
    ({"flops": 0.1, "example_input": torch.zeros(1, 7)}, Exception, "shapes cannot be multiplied"),
    ({"total_steps": 0}, ValueError, "total_steps of at least 1"),
    ({"total_steps": 1}, ValueError, "sparsify phase of at least one step"),
    ({"total_steps": 1.5}, ValueError, "whole number of total_steps"),
    ({"total_steps": math.nan}, ValueError, "whole number of total_steps"),
    ({"total_steps": math.inf}, ValueError, "whole number of total_steps"),
    ({"total_steps": "24"}, ValueError, "whole number of total_steps"),
    ({"steps_per_epoch": math.nan}, ValueError, "expected steps_per_epoch"),
    ({"sparsify": "0it"}, ValueError, "sparsify phase of at least one step"),
    ({"warmup": "1000it"}, ValueError, "the phases .* take"),
    ({"warmup": "nan it"}, ValueError, "duration with its unit"),
    ({"min_density": math.nan}, ValueError, "at least 0 and below 1"),
    ({"mask_lr": math.nan}, ValueError, "mask_lr: expected a number above 0"),
    ({"mask_momentum": 1.0}, ValueError, "mask_momentum: expected a number of at least 0"),
    ({"leave_at": math.nan, "decay": 0.1}, ValueError, "expected leave_at to be a sparsity"),
    ({"seed": 1.5}, ValueError, "expected seed to be a whole number"),
    ({"seed": 2**70}, ValueError, "expected seed to be a whole number"),
    ({"method": 3}, TypeError, "expected method to be a name"),
    ({"method": "nothing"}, ValueError, "unknown method 'nothing'"),
]


class Wasteful(PrunedAtZero[Options]):
    """A method that forgets its budget."""

    name, title = "wasteful", "wasteful"

    def __init__(self, context: Any) -> None:
        self.mask = torch.ones_like(context.weights, dtype=torch.bool)

    def finalize(self, weights: Tensor) -> Tensor:
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {"mask_of_all": self.mask}


class Nested(Adam):
    """An optimizer whose step calls its parent's, as many do."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def nested(parameters: Iterable[nn.Parameter]) -> Optimizer:
    Adam([nn.Parameter(torch.ones(1))])  # torch wraps the parent's step from here on, so that hooks run twice
    return Nested(parameters, lr=0.01)


class SecondStep(SGD):
    """Calls a step of its own within its step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        super().step()
        return loss


# --- the table ---

DIVERGED = "not finite .*0.weight"
BEGINS = "the run begins with parameters that are not finite .*: table.weight"
EARLY = "the masks are cut to the target now"
CHANGED = "changed since the last step, and while masks train, the next step overwrites such changes"
REPLACED = "the parameter 0.weight.* of the model is not the one that was made sparse"


def rows() -> Iterator[Fault]:
    for phase, step in STEPS.items():
        changed = CHANGED if phase in ("sparsify", "stabilise") else None
        for value in (math.nan, math.inf):
            yield Fault(f"{value} in a weight: {phase}", at(step, poison_weight(value)), DIVERGED, warns=changed)
            yield Fault(f"{value} in a gradient: {phase}", change_gradients(step, poison_gradient(value)), DIVERGED)
        yield Fault(f"nan in a bias: {phase}", at(step, poison_bias(math.nan)), DIVERGED)
        yield Fault(f"nan in the inputs: {phase}", poison_input(step, math.nan), DIVERGED)
        none = change_gradients(step, drop_gradients, to_the_end=True)
        yield Fault(f"no gradients any more: {phase}", none)
        yield Fault(f"gradients of zero: {phase}", change_gradients(step, scale_gradients(0.0), to_the_end=True))
        yield Fault(f"tiny gradients: {phase}", change_gradients(step, scale_gradients(1e-38), to_the_end=True))
        yield Fault(f"parameter replaced: {phase}", at(step, replace_parameter), REPLACED)
        yield Fault(f"layer replaced: {phase}", at(step, replace_layer), REPLACED)
        yield Fault(f"state loaded by assignment: {phase}", at(step, assign_state), REPLACED)
        yield Fault(f"model's state loaded: {phase}", at(step, load_model_state), warns=changed)
        yield Fault(f"data of a parameter replaced: {phase}", at(step, replace_data))
        yield Fault(f"all states loaded back: {phase}", lambda run, step=step: (run.steps(0, step), go_back(run)))  # type: ignore[misc]
        yield Fault(f"weight taken out of the optimizer: {phase}", at(step, forget_a_weight))
        yield Fault(f"parameters added to the optimizer: {phase}", at(step, more_parameters))
        yield Fault(f"weight moved to another group: {phase}", at(step, a_weight_with_its_own_rate))
        yield Fault(f"layer frozen: {phase}", at(step, freeze))
        yield Fault(
            f"optimizer's state lost: {phase}", at(step, zero_momentum), given={"optimizer": OPTIMIZERS["momentum"]}
        )
        yield Fault(f"model converted to bfloat16: {phase}", at(step, to_bfloat16))
        yield Fault(f"model converted to float64: {phase}", at(step, to_float64))
        yield Fault(f"model in evaluation mode: {phase}", at(step, to_eval))
        yield Fault(f"infinite learning rate: {phase}", at(step, infinite_rate), "not finite")
        yield Fault(f"negative learning rate: {phase}", at(step, negative_rate), given={"sparsity": 0.5})
        yield Fault(f"learning rate of zero: {phase}", at(step, no_rate))
        yield Fault(f"step under no_grad: {phase}", at(step, in_mode(torch.no_grad)))
        yield Fault(
            f"step under inference_mode: {phase}",
            at(step, in_mode(torch.inference_mode)),
            "outside torch.inference_mode",
        )
        yield Fault(f"step with a default device: {phase}", at(step, in_mode(lambda: default_device("meta"))))
        yield Fault(
            f"step with another default dtype: {phase}", at(step, in_mode(lambda: default_dtype(torch.float64)))
        )
        yield Fault(
            f"another sparsifier: {phase}", at(step, another_sparsifier), "already have a Sparsifier", ValueError
        )
        yield Fault(f"model copied: {phase}", at(step, deep_copy_model))
        yield Fault(f"sparsifier copied: {phase}", at(step, deep_copy_sparsifier), "cannot be copied", TypeError)
        yield Fault(f"error in a closure: {phase}", at(step, failing_closure))
        second = {"optimizer": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3)}
        yield Fault(
            f"error in a second closure: {phase}",
            lambda run, step=step: (_closures(run, step), failing_second_closure(run), _closures(run, TOTAL)),  # type: ignore[misc]
            given=second,
        )
        yield Fault(f"error in the backward pass: {phase}", at(step, failing_backward))
        yield Fault(f"error in a hook before the step: {phase}", at(step, failing_hook(before=True)))
        yield Fault(f"error in a hook after the step: {phase}", at(step, failing_hook(before=False)))
        failing = {"optimizer": lambda p: Failing(p, lr=0.05)}
        yield Fault(f"interrupt within the optimizer: {phase}", at(step, failing_step), given=failing)
        yield Fault(f"interrupt, then resumed: {phase}", failing_step_then_resume(step), given=failing)
        early = EARLY if step < 17 else None
        yield Fault(f"interrupt, then finished: {phase}", failing_step_then_finish(step), given=failing, warns=early)
        yield Fault(f"finished early: {phase}", end_early(step), warns=early)
    for step in (5, 6, 9, 17, 20):
        yield Fault(f"Ctrl-C at lines of step {step}", interrupted(1 + step, 97, step))
    for value in (math.nan, math.inf, -math.inf):
        yield Fault(f"{value} in one mask variable", at(10, poison_masks(value, every=False)))
        yield Fault(f"{value} in all mask variables", at(10, poison_masks(value, every=True)))
    for name, model in MODELS.items():
        frozen = "while 120 others are frozen" if model is half_frozen else None
        yield Fault(name, given={"model": model}, warns=frozen)
    for name, (model, words) in BAD_MODELS.items():
        yield Fault(name, given={"model": model}, error=words, kind=ValueError)
    for name, optimizer in OPTIMIZERS.items():
        yield Fault(f"optimizer with {name}", given={"optimizer": optimizer})
    for name, asked in ASKED.items():
        yield Fault(f"asked for {name}", given=asked)
    for asked, kind, words in BAD_REQUESTS:
        shown = ", ".join(f"{name}={value!r:.8}" for name, value in asked.items())
        yield Fault(f"asked for {shown}", given=asked, error=words, kind=kind)
    for name in METHODS_OF_WEIGHTS:
        nothing = change_gradients(0, scale_gradients(0.0), to_the_end=True)
        yield Fault(f"{name}: gradients of zero", nothing, given={"method": name})
        yield Fault(f"{name}: no gradients", nothing_to_learn_from, given={"method": name})
        yield Fault(
            f"{name}: nan in all gradients",
            change_gradients(9, scale_gradients(math.nan)),
            "not finite",
            given={"method": name},
        )
        yield Fault(f"{name}: weights all equal", given={"method": name, "model": filled(0.1)})
        if not METHODS[name].from_start:
            yield Fault(
                f"{name}: nan in the warm-up",
                at(5, poison_weight(math.nan)),
                "not finite .*: 0.weight",
                warns=CHANGED if METHODS[name].usual_phases.get("warmup") == "0it" else None,
                given={"method": name},
            )
    yield Fault("a bad row that is never used", given={"model": lambda: Words(bad_row=math.nan)}, error=BEGINS)
    yield Fault("an infinite row that is never used", given={"model": lambda: Words(bad_row=math.inf)}, error=BEGINS)
    yield Fault("weights of size 1e30", given={"model": filled(1e30)}, error="not finite")
    yield Fault("weights of 8 bits", given={"model": lambda: One(weight(4, 10, dtype=torch.float8_e4m3fn))}, error=".")
    yield Fault(
        "expanded weights", given={"model": lambda: One(weight(1, 10).expand(4, 10))}, error="single memory location"
    )
    yield Fault(
        "weight decay that explodes",
        given={"optimizer": lambda p: SGD(p, lr=0.05, weight_decay=1e6)},
        error="not finite",
    )
    yield Fault(
        "a method that forgets its budget",
        given={"method": Wasteful},
        error="keep 168 weights where 34",
        kind=ValueError,
    )
    yield Fault(
        "an optimizer of other parameters",
        given={"optimizer": lambda p: sgd([nn.Parameter(torch.ones(2))])},
        error="not in the optimizer",
        kind=ValueError,
    )
    yield Fault(
        "no optimizer", given={"optimizer": lambda p: None}, error="expected a torch.optim.Optimizer", kind=TypeError
    )
    yield Fault("an optimizer that steps twice", given={"optimizer": lambda p: SecondStep(p, lr=0.02)})
    yield Fault("error in a closure of a nested step", at(9, failing_closure), given={"optimizer": nested})
    yield Fault(
        "a new optimizer that nobody knows",
        at(9, another_optimizer),
        "changed since the last step",
        warns="belongs to another optimizer",
    )
    yield Fault(
        "another default device and a transposed weight",
        all_steps_in(lambda: default_device("meta")),
        given={"model": MODELS["a transposed weight"]},
    )
    yield Fault("no gradients at all", nothing_to_learn_from)
    yield Fault("the same gradient twice", at(9, repeat_last_step))
    yield Fault("a tied weight replaced in one layer", at(9, replace_use), REPLACED, given={"model": tied})
    yield Fault(
        "nan in a bias after the last step", at(TOTAL, poison_bias(math.nan)), "ended with .* finite .*: 2.bias"
    )
    yield Fault("steps past the plan", train_past_the_end, warns="more optimizer steps than total_steps=24")
    yield Fault("finished twice", step_after_finish)
    yield Fault("advanced after the end", advance_after_finish, "finish\\(\\) was called")
    yield Fault("closures", with_closures)
    yield Fault("two backward passes", two_backward_passes)
    yield Fault("clipped gradients", clipped)
    yield Fault("gradients that add up", never_zeroed)
    yield Fault("autocast", autocast)
    yield Fault("a scaler", scaled())
    yield Fault("a scaler that skips steps", scaled(2, 6, 7, 13, 17, 20))
    yield Fault("moving averages", averaged)
    yield Fault("another thread", other_thread_steps)
    yield Fault("another sparsifier for other weights", two_on_disjoint_weights, given={"include": "0.*"})
    yield Fault("questions in every step", ask_in_every_step)
    yield Fault("an error in a with block", leave_block_by_error)
    yield Fault("a signal in every step", a_signal_in_every_step)
    yield Fault("deterministic algorithms", all_steps_in(_deterministic))
    yield Fault("anomaly detection", all_steps_in(_anomalies))


def _closures(run: Training, last: int) -> None:
    for step in range(run.sparsifier.step, last):

        def closure(step: int = step) -> Tensor:
            run.optimizer.zero_grad()
            return run.backward(step)

        run.optimizer.step(closure)  # type: ignore[arg-type]


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _anomalies() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection")
        with torch.autograd.set_detect_anomaly(True):
            yield


FAULTS = list(rows())


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault(fault: Fault) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("error" if fault.warns is None else "always")
        warnings.filterwarnings("ignore", "a Sparsifier was discarded")  # after an error, for instance
        if fault.error is not None:
            with pytest.raises(fault.kind, match=fault.error):
                _carry_out(fault)
        else:
            _carry_out(fault)
    if fault.warns is not None:
        assert any(fault.warns in str(warning.message) for warning in told)


def _carry_out(fault: Fault) -> None:
    run = Training(**fault.given)
    fault.do(run)
    if run.sparsifier.step == 0:  # a row that changes nothing on the way
        run.steps(0, run.sparsifier.plan.total)
    run.check()


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("method", METHODS_OF_WEIGHTS)
def test_a_step_that_calls_its_parents_is_one_step(method: str, closure: bool) -> None:
    plain = Training(optimizer=lambda p: Adam(p, lr=0.01), method=method).steps()
    run = Training(optimizer=nested, method=method)
    for step in range(TOTAL):
        if closure:
            _closures(run, step + 1)
        else:
            run.steps(step, step + 1)
        assert run.sparsifier.step == step + 1
    for ours, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_every_fault_has_its_own_name() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert len(names) >= 110
