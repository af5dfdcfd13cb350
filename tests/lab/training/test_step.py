"""A captured step does what an eager one does: on a CPU with a stand-in for the graph that runs the step itself."""

import gc
import json
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from observers import Dies
from recorded import Recorded
from safetensors.torch import load_file
from tiny_data import tiny_text
from torch import nn

from gossamer import sparsifier as sparsifier_module
from gossamer.lab.data import ImageSet, TextSet
from gossamer.lab.training import LossNotFinite, Run, loop, modes, networks, result, step, task, train
from gossamer.lab.training.distributed import DistributedContext
from gossamer.lab.training.optimise import load_optimizer_state, make_optimizer, set_learning_rate
from gossamer.lab.training.step import Meter, check_last_step

IMAGES = Run(
    model="digits_cnn", model_options={"width": 4}, data="digits", epochs=5, batch_size=8, log_steps=3, device="cpu"
)
WORDS = Run(
    model="lstm_lm", model_options={"hidden": 8}, data="wikitext2", epochs=3, batch_size=4, bptt=7, lr=1.0, device="cpu"
)
TAUGHT = ["method=scl", "sparsity=0.5", "distil=0.5"]
CPU = DistributedContext(torch.device("cpu"))


class Pretended:
    """Like `Captured` on a GPU: after three real calls the step is replayed, and its Python is not supposed to act."""

    made = 0
    replaying = False

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self._function, self._calls = function, 0
        Pretended.made += 1

    @property
    def replays(self) -> bool:
        return self._calls >= 3

    def __call__(self) -> None:
        Pretended.replaying = self.replays
        self._calls += 1
        self._function()
        Pretended.replaying = False


@pytest.fixture(autouse=True)
def graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "why_not_captured", lambda run, context: None)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    Pretended.made = 0
    monkeypatch.setattr(step, "Captured", Pretended)
    monkeypatch.setattr(sparsifier_module, "capturing", lambda: Pretended.replaying)
    return Pretended


def assert_same_model(left: Path, right: Path) -> None:
    one, two = (load_file(folder / "model.safetensors") for folder in (left, right))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("changes", "graphs"),
    [
        (["method=dense"], 1),
        (["method=scl", "sparsity=0.8"], 3),  # warm-up, mask learning, fine-tuning
        (["method=scl", "sparsity=0.8", "settings.warmup=0it", "settings.min_density=0.0"], 2),
        (["method=scl", "decay=0.01", "clip=1.0", "precision=bf16"], 3),
        (["method=scl", "sparsity=0.8", "distil=0.5", "precision=bf16"], 3),  # the trunk comes with the masks
    ],
)
def test_captured_equals_eager(
    images: ImageSet, tmp_path: Path, pretended: type[Pretended], changes: list[str], graphs: int
) -> None:
    run = IMAGES.with_settings(changes)
    eager = train(run, tmp_path / "eager")
    assert pretended.made == 0
    captured = train(run.with_settings(["capture=true"]), tmp_path / "captured")
    assert pretended.made == graphs
    one, two = (
        [json.loads(line)["train"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("eager", "captured")
    )
    assert one == two
    assert_same_model(tmp_path / "eager", tmp_path / "captured")
    assert (eager["mode"].endswith("graph"), captured["mode"].endswith("graph")) == (False, True)
    assert captured["accuracy"] == eager["accuracy"]


@pytest.mark.parametrize("method", [["method=dense"], ["method=scl", "sparsity=0.5"], TAUGHT])
def test_a_captured_language_model_equals_an_eager_one(
    text: TextSet, tmp_path: Path, pretended: type[Pretended], method: list[str]
) -> None:
    """Its windows end in a short one, and its hidden state goes on from step to step and is zeroed at each epoch."""
    run = WORDS.with_settings([*method, "clip=0.25"])
    train(run, tmp_path / "eager")
    train(run.with_settings(["capture=true"]), tmp_path / "captured")
    assert pretended.made >= 1
    assert_same_model(tmp_path / "eager", tmp_path / "captured")


def test_a_captured_run_that_died_goes_on_to_the_same_bits(
    text: TextSet, tmp_path: Path, pretended: type[Pretended]
) -> None:
    run = WORDS.with_settings([*TAUGHT, "capture=true", "checkpoint_steps=4", "log_steps=1"])
    train(run, tmp_path / "whole")
    with pytest.raises(MemoryError):
        train(run, tmp_path / "torn", observers=[Dies(22)])
    train(run, tmp_path / "torn")
    assert_same_model(tmp_path / "whole", tmp_path / "torn")


@pytest.mark.parametrize("dies", [False, True])
def test_a_run_that_has_ended_leaves_no_graph_behind(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Its memory is wanted by the next run, and torch 2.13 takes the work space of other graphs away with a graph."""
    left: list[weakref.ref[Pretended]] = []

    class Watched(Pretended):
        def __init__(self, function: Callable[[], None], device: torch.device) -> None:
            super().__init__(function, device)
            left.append(weakref.ref(self))

    monkeypatch.setattr(step, "Captured", Watched)
    gc.disable()
    try:
        with pytest.raises(MemoryError) if dies else nullcontext():
            train(IMAGES.with_settings(["capture=true"]), tmp_path, observers=[Dies(9)] if dies else [])
        assert len(left) == 1
        assert left[0]() is None
    finally:
        gc.enable()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    """Steps are replayed operation by operation, and the optimizer is the one that GPUs get."""

    def on_the_device(run: Run, model: nn.Module) -> torch.optim.Optimizer:
        lr = torch.tensor(run.lr)
        if run.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=run.weight_decay, fused=True)
        return torch.optim.SGD(
            model.parameters(), lr=lr, momentum=run.momentum, weight_decay=run.weight_decay, fused=True
        )

    Recorded.replays_done = 0
    monkeypatch.setattr(step, "Captured", Recorded)
    monkeypatch.setattr(loop, "make_optimizer", on_the_device)
    return Recorded


@pytest.mark.parametrize("changes", [[], ["clip=0.5", "label_smoothing=0.1"], ["optimizer=adamw", "lr=0.01"]], ids=str)
def test_a_replay_takes_nothing_from_python(
    images: ImageSet, tmp_path: Path, recorded: type[Recorded], changes: list[str]
) -> None:
    """The learning rate falls in every step, and batches differ: both have to be found on the device."""
    run = IMAGES.with_settings(changes)
    eager = train(run, tmp_path / "eager")
    assert recorded.replays_done == 0
    captured = train(run.with_settings(["capture=true"]), tmp_path / "captured")
    assert recorded.replays_done == 25 - 4  # three trials, and the recording
    assert_same_model(tmp_path / "eager", tmp_path / "captured")
    assert captured["accuracy"] == eager["accuracy"]


def test_a_replay_of_a_language_model_takes_nothing_from_python(
    text: TextSet, tmp_path: Path, recorded: type[Recorded]
) -> None:
    """Dropout is drawn anew, the hidden state goes on, and is zeroed where an epoch begins."""
    run = WORDS.with_settings(["clip=0.25", "momentum=0.0", "schedule=plateau", "lr_factor=0.5"])
    eager = train(run, tmp_path / "eager")
    captured = train(run.with_settings(["capture=true"]), tmp_path / "captured")
    assert recorded.replays_done == 3 * 14 - 4  # of 15 windows an epoch the last is short, and never replayed
    assert_same_model(tmp_path / "eager", tmp_path / "captured")
    assert captured["perplexity"] == eager["perplexity"]


@pytest.mark.parametrize("kind", ["images", "words"])
def test_a_replay_asks_a_teacher_for_each_batch(
    images: ImageSet, tmp_path: Path, recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its answers are computed in the graph, and its hidden state goes on from replay to replay."""
    run, classes = (IMAGES, 3) if kind == "images" else (WORDS, 11)
    if kind == "words":
        monkeypatch.setattr(task.data, "load", lambda name, root=None: tiny_text())
    torch.manual_seed(5)
    result.write_model(tmp_path / "teacher", networks.create(run, classes).state_dict())
    run = run.with_settings([f"teacher={tmp_path / 'teacher'}", "distil=0.7", "clip=0.5"])
    train(run, tmp_path / "eager")
    train(run.with_settings(["capture=true"]), tmp_path / "captured")
    assert recorded.replays_done == (25 if kind == "images" else 3 * 14) - 4
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("eager", "captured"))
    for name in one:  # without gradients a recorded LSTM rounds otherwise
        torch.testing.assert_close(one[name], two[name], rtol=0.0, atol=0.0 if kind == "images" else 1e-6)


def test_the_meter_tells_the_mean_and_the_first_bad_step() -> None:
    meter = Meter(CPU, step=10)
    for number, loss in enumerate((1.0, 2.0, 6.0), start=11):
        meter.add(torch.tensor(loss))
        meter.count(number)
    assert meter.means() == (3.0, None)
    assert meter.means() == (None, None)
    for number, right in enumerate((0.25, 0.75), start=14):
        meter.add(torch.tensor(1.0), torch.tensor(right))
        meter.count(number)
    assert meter.means() == (1.0, 0.5)
    with pytest.raises(LossNotFinite, match="at step 16: try a smaller lr"):
        meter.add(torch.tensor(math.nan))


def test_on_an_accelerator_the_loss_is_looked_at_now_and_then() -> None:
    class Pretending(str):
        type = "cuda"

    meter = Meter(DistributedContext(Pretending("cpu")), step=0)  # type: ignore[arg-type]
    for number in range(1, 50):
        meter.add(torch.tensor(math.inf if number in (7, 9) else 1.0))
        meter.count(number)
    meter.add(torch.tensor(1.0))
    with pytest.raises(LossNotFinite, match="at step 7:"):
        meter.count(50)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_rate_on_the_device_is_the_rate_in_python(name: str) -> None:
    """The fused optimizers that GPUs get, here with the kernels of the CPU."""

    def trained(fused: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        kind = torch.optim.SGD if name == "sgd" else torch.optim.AdamW
        own = {"momentum": 0.9} if name == "sgd" else {}
        lr = torch.tensor(0.5) if fused else 0.5
        optimizer = kind(model.parameters(), lr=lr, weight_decay=0.01, fused=fused, **own)  # type: ignore[arg-type]
        for rate in (0.1, 0.03, 0.0):
            set_learning_rate(optimizer, rate)
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    torch.testing.assert_close(trained(fused=True), trained(fused=False))


def test_a_state_of_another_device_does_not_change_how_an_optimizer_computes() -> None:
    model = nn.Linear(5, 3)
    plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(2, 5)).sum().backward()
    plain.step()
    rate = torch.tensor(0.1)
    fused = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.7, fused=True)
    load_optimizer_state(fused, plain.state_dict())
    group = fused.param_groups[0]
    assert (group["fused"], group["momentum"]) == (True, 0.9)
    assert isinstance(group["lr"], torch.Tensor)
    for own, theirs in zip(fused.state.values(), plain.state.values(), strict=True):
        assert torch.equal(own["momentum_buffer"], theirs["momentum_buffer"])


def test_on_a_cpu_the_optimizer_is_torch_s_plain_one() -> None:
    group = make_optimizer(Run(lr=0.3), nn.Linear(2, 2)).param_groups[0]
    assert group["lr"] == 0.3
    assert not group["fused"]


@pytest.mark.parametrize(("value", "test"), [(math.inf, 0.5), (math.nan, 0.5), (1e28, 0.5), (1.0, math.nan)])
def test_weights_and_answers_of_the_last_step_have_to_be_finite(value: float, test: float) -> None:
    counted = torch.tensor(3)  # a whole number, as the batches that a batch norm has seen
    check_last_step({"weight": torch.ones(2), "seen": counted}, 0.5)
    with pytest.raises(LossNotFinite, match=r"(is|are) not finite \(.*\) after the last step: try a smaller lr"):
        check_last_step({"weight": torch.tensor([1.0, value]), "seen": counted}, test)
