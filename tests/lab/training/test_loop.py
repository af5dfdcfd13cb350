import errno
import json
import math
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gossamer.lab.training.checkpoint import Checkpoints
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

import gossamer
from gossamer.lab.data import Batches, ImageSet, TextSet
from gossamer.lab.models import create
from gossamer.lab.training import Interrupted, LossNotFinite, Run, networks, result, train
from gossamer.lab.training.progress import Status, TensorBoard
from gossamer.lab.training.signals import StopSignal

DENSE = Run(
    model="digits_cnn", model_options={"width": 4}, data="digits", epochs=4, batch_size=8, log_steps=3, device="cpu"
)
SPARSE = DENSE.with_settings(["method=scl", "sparsity=0.8"])
WORDS = Run(
    model="lstm_lm",
    model_options={"hidden": 8},
    data="wikitext2",
    epochs=2,
    batch_size=4,
    bptt=7,
    lr=1.0,
    device="cpu",
)


class At:
    """Does something when the run reaches a step."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step, self.action, self.seen = step, action, list[Status]()

    def begin(self, status: Status) -> None: ...

    def tell(self, status: Status) -> None:
        self.seen.append(status)
        if status.step == self.step:
            self.action()

    def move(self, step: int, seconds: float, doing: str | None = None) -> None: ...

    def close(self) -> None: ...


def die() -> None:
    raise MemoryError("as good as a kill")


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_a_dense_run_is_plain_training(images: ImageSet, tmp_path: Path) -> None:
    train(DENSE, tmp_path)

    torch.manual_seed(DENSE.seed)
    model = networks.create(DENSE, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    batches, step = Batches.training(images, 8, seed=0), 0
    for _ in range(4):
        for x, y in batches:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * step / 20))
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    assert_same(weights(tmp_path), dict(model.state_dict()))


def test_weight_decay_falls_when_connections_begin_to_go(images: ImageSet, tmp_path: Path) -> None:
    run = SPARSE.with_settings(["weight_decay=0.02", "weight_decay_power=0.5"])
    train(run, tmp_path)

    torch.manual_seed(run.seed)
    model = networks.create(run, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches, step = Batches.training(images, 8, seed=0), 0
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.8, total_steps=20, steps_per_epoch=5)
    for _ in range(4):
        for x, y in batches:
            decay = 0.02 if step < sparsifier.plan.warmup else 0.02 * 0.2**0.5
            optimizer.param_groups[0].update(lr=0.05 * (1 + math.cos(math.pi * step / 20)), weight_decay=decay)
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    sparsifier.finish()
    for name, tensor in weights(tmp_path).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_the_result_says_what_was_done(images: ImageSet, tmp_path: Path) -> None:
    returned = train(SPARSE.with_settings(["validation=10"]), tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    assert written == returned
    matrices = [tensor for tensor in weights(tmp_path).values() if tensor.ndim > 1]
    total, kept = sum(each.numel() for each in matrices), sum(int((each != 0).sum()) for each in matrices)
    assert (written["nonzeros"], written["weights"]) == (kept, total)
    assert kept == total - math.floor(total * 0.8 + 0.5)
    assert written["sparsity"] == pytest.approx(1 - kept / total)
    found = weights(tmp_path)  # output pixels of the three convolutions; the linear layer is used once
    uses = {"features.0.weight": 64, "features.3.weight": 16, "features.6.weight": 4, "classifier.weight": 1}
    assert written["flops_dense"] == 2 * sum(use * found[name].numel() for name, use in uses.items())
    assert written["flops"] == 2 * sum(use * int((found[name] != 0).sum()) for name, use in uses.items())
    assert written["complete"] is True
    assert written["config"]["sparsity"] == 0.8
    assert written["settled"] == {"mask_lr": 0.015, "pruned_grad_scale": pytest.approx(0.2**0.4, rel=0.01)}
    assert written["versions"]["torch"] == torch.__version__
    assert 0 <= written["validation_accuracy"] <= 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "health.json",
        "layers.json",
        "log.jsonl",
        "model.safetensors",
        "model.sparse.safetensors",
        "result.json",
        "run.json",
    ]


def test_the_program_of_the_docs_trains_logs_and_gives_its_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].replace("epochs=3", "epochs=1")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program, names)
    shown = capsys.readouterr()
    assert shown.out.split() == [str(names["result"][key]) for key in ("accuracy", "sparsity")]
    assert "digits: 1/1" in shown.err
    assert json.loads(Path("runs/digits/log.jsonl").read_text().splitlines()[-1])["step"] == 19
    assert names["network"](torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_accuracy_is_that_of_the_written_model(images: ImageSet, tmp_path: Path) -> None:
    run = DENSE.with_settings(["epochs=1"])
    told = train(run, tmp_path)["accuracy"]
    model = networks.create(run, 3)
    model.load_state_dict(weights(tmp_path))
    model.eval()
    x = (images.test.images.float() / 255 - 0.4) / 0.2
    assert told == pytest.approx(float((model(x).argmax(1) == images.test.labels).float().mean()))


@pytest.mark.parametrize(
    ("run", "step"),
    [(DENSE, 9)]
    + [(SPARSE, step) for step in (3, 4, 6, 9, 12, 15)]  # in every phase and at the end of an epoch
    + [(SPARSE.with_settings(["optimizer=adamw", "lr=0.01"]), 8)]
    + [(SPARSE.with_settings([f"method={name}"]), 9) for name in ("rigl", "lottery", "l0", "str", "narang")],
)
def test_a_run_that_died_goes_on_to_the_same_bits(images: ImageSet, tmp_path: Path, run: Run, step: int) -> None:
    run = run.with_settings(["checkpoint_steps=2", "validation=8"])  # 4 epochs of 4 steps
    whole = train(run, tmp_path / "whole")
    with pytest.raises(MemoryError):
        train(run, tmp_path / "torn", observers=[At(step, die)])
    assert list((tmp_path / "torn").glob("checkpoint-*.pt"))
    follower = At(-1, die)
    torn = train(run, tmp_path / "torn", observers=[follower])
    assert follower.seen[0].step > step - 3  # it went on and did not begin again
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "torn"))
    assert (torn["accuracy"], torn["nonzeros"]) == (whole["accuracy"], whole["nonzeros"])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("threads", 3, "threads 1 instead of 3"), ("processor", "Z80", "processor .* instead of Z80")],
)
def test_a_run_that_resumes_on_another_machine_says_so(
    images: ImageSet, tmp_path: Path, name: str, value: object, words: str
) -> None:
    run = SPARSE.with_settings(["checkpoint_steps=2"])
    with pytest.raises(MemoryError):
        train(run, tmp_path / "run", observers=[At(9, die)])
    checkpoints = Checkpoints(tmp_path / "run")
    state = checkpoints.load()
    assert state is not None
    state["machine"][name] = value
    assert checkpoints.save(state, state["step"])
    with pytest.warns(UserWarning, match=f"resumes with {words}: .* last bits"):
        train(run, tmp_path / "run")


def test_a_language_model_that_died_goes_on_to_the_same_bits(text: TextSet, tmp_path: Path) -> None:
    run = WORDS.with_settings(["checkpoint_steps=4", "log_steps=1", "clip=0.25", "method=scl", "sparsity=0.5"])
    whole = train(run, tmp_path / "whole")
    with pytest.raises(MemoryError):
        train(run, tmp_path / "torn", observers=[At(10, die)])
    torn = train(run, tmp_path / "torn")
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "torn"))
    assert torn["perplexity"] == whole["perplexity"]


def test_perplexity_is_that_of_a_plain_loop(text: TextSet, tmp_path: Path) -> None:
    """Dropout draws random numbers, so it is switched off for the comparison."""
    run = WORDS.with_settings(["model_options.dropout=0.0", "clip=0.25", "schedule=constant"])
    found = train(run, tmp_path)

    torch.manual_seed(0)
    model = create("lstm_lm", num_classes=11, hidden=8, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-4)
    columns = text.train.view(4, 100).t()
    for _ in range(2):
        state = None
        for start in range(0, 99, 7):
            x, y = columns[start : min(start + 7, 99)], columns[start + 1 : start + 8]
            logits, state = model(x, state)
            state = tuple(part.detach() for part in state)
            functional.cross_entropy(logits.reshape(-1, 11), y.reshape(-1)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        columns = text.test.view(10, 14).t()
        logits, _ = model.eval()(columns[:-1])
        expected = math.exp(functional.cross_entropy(logits.reshape(-1, 11), columns[1:].reshape(-1)))
    assert found["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert found["nonzeros"] == 11 * 8 + 2 * 2 * 4 * 8 * 8


def test_the_same_command_after_the_end_only_reads_the_result(images: ImageSet, tmp_path: Path) -> None:
    first = train(DENSE, tmp_path)
    assert train(DENSE, tmp_path, observers=[At(3, die)]) == first


def test_a_run_with_whole_numbers_is_found_again(images: ImageSet, tmp_path: Path) -> None:
    run = replace(DENSE, weight_decay=0, clip=1)
    assert train(run, tmp_path) == train(run, tmp_path)


def test_a_folder_of_another_run_is_refused(images: ImageSet, tmp_path: Path) -> None:
    train(DENSE, tmp_path)
    with pytest.raises(ValueError, match=r"differs from run \w+ in epochs, seed: choose another folder"):
        train(DENSE.with_settings(["epochs=5", "seed=3"]), tmp_path)


def test_the_result_of_another_run_is_not_shown_as_that_of_this_one(images: ImageSet, tmp_path: Path) -> None:
    first = train(DENSE, tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"differs from run \w+ in epochs: .* gossamer train .*result.json --out"):
        train(DENSE.with_settings(["epochs=5"]), tmp_path)
    assert train(DENSE, tmp_path) == first


@pytest.mark.parametrize("name", ["model.safetensors", "model.sparse.safetensors", "layers.json"])
def test_a_finished_run_without_one_of_its_files_says_so(images: ImageSet, tmp_path: Path, name: str) -> None:
    first = train(DENSE, tmp_path)
    (tmp_path / name).unlink()
    with pytest.warns(UserWarning, match=rf"{name} is no longer in .*: put it back, or delete .*result.json to train"):
        assert train(DENSE, tmp_path) == first
    (tmp_path / "result.json").unlink()
    train(DENSE, tmp_path)
    assert (tmp_path / name).is_file()


def test_a_folder_that_is_removed_meanwhile_is_made_again(images: ImageSet, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.warns(UserWarning, match=r"log\.jsonl could not be written .*; training goes on"):
        first = train(DENSE, out, observers=[At(6, lambda: shutil.rmtree(out))])
    assert_same(weights(out), whole_weights(DENSE, tmp_path / "whole"))
    whole = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {path.name for path in out.iterdir()} == whole - {"log.jsonl"}
    assert train(DENSE, out) == first


def test_a_folder_without_a_name_is_refused(images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"expected a folder for the run, got an empty name: write \. for"):
        train(DENSE, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_leaves_a_checkpoint(images: ImageSet, tmp_path: Path, number: int) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"stopped after step 6 of 20; a checkpoint is in .*: run the same command"):
        train(SPARSE, tmp_path, observers=[At(6, lambda: os.kill(os.getpid(), number))])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert [path.name for path in tmp_path.glob("*.pt")] == ["checkpoint-000000006.pt"]
    train(SPARSE, tmp_path)
    assert_same(weights(tmp_path), whole_weights(SPARSE, tmp_path / "whole"))


def test_a_second_signal_counts_only_where_no_launcher_repeats_the_first(request: pytest.FixtureRequest) -> None:
    # A shell lets what it runs in the background ignore interrupts.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, inherited))
    with StopSignal(launched=False) as alone:
        os.kill(os.getpid(), signal.SIGINT)
        assert alone.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    before = signal.getsignal(signal.SIGINT)
    with StopSignal(launched=True) as one_of_several:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            assert one_of_several.asked
    assert signal.getsignal(signal.SIGINT) is before


def whole_weights(run: Run, folder: Path) -> dict[str, Tensor]:
    train(run, folder)
    return weights(folder)


def test_a_loss_that_is_not_finite_stops_the_run(images: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(LossNotFinite, match=r"not finite .* at step \d+: try a smaller lr, lr_warmup=1ep, clip=1"):
        train(DENSE.with_settings(["lr=1e30", "epochs=30"]), tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_a_network_that_its_last_step_has_ruined_is_no_result(images: ImageSet, tmp_path: Path) -> None:
    """Its weights are finite, of about 1e28, but no answer is."""
    ruined = r"features\.0\.weight is not finite .*too large\) after the last step: try a smaller lr, lr_warmup=1ep"
    with pytest.raises(LossNotFinite, match=ruined):
        train(DENSE.with_settings(["lr=1e30", "batch_size=40", "epochs=1"]), tmp_path)
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model=resnet20", r"resnet20 does not take batches of digits, of shape \(2, 1, 8, 8\).* takes samples of"),
        (
            "model=map_fit",
            r"of shape \(64,\), for which there is no data set; train it with gossamer reproduce map-fitting",
        ),
        ("model=resnet2", "did you mean 'resnet20'"),
        ("model_options.height=3", "digits_cnn does not take model_options.height: its options are width"),
        ("model_options.widht=3", "digits_cnn does not take model_options.widht: did you mean 'width'"),
        ("model_options.width=wide", r"digits_cnn cannot be built with model_options\.width=wide \(.*: change or drop"),
        ("model_options.width=-3", r"digits_cnn cannot be built with model_options\.width=-3 \(.*negative dimension"),
        ("model_options.width=2.5", r"digits_cnn cannot be built with model_options\.width=2\.5 \("),
        ("device=cuda", "device=cuda was requested, but torch .* finds 0 CUDA devices here: set device=cpu"),
        ("device=mps", "expected a device such as auto, cpu, cuda or cuda:1, got 'mps'"),
        ("device=gpu", "expected a device such as auto, cpu, cuda or cuda:1, got 'gpu'"),
        ("validation=40", "expected 1 to 39 images to hold out"),
        ("batch_size=100", "expected at least one batch of 100"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_training(
    images: ImageSet, tmp_path: Path, change: str, message: str
) -> None:
    if change == "device=cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    plain = Run.from_dict({**DENSE.to_dict(), "model_options": {}}) if change.startswith("model=") else DENSE
    run = plain.with_settings([change])
    with pytest.raises(ValueError, match=message):
        train(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(images: ImageSet, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("something of the user's")
    with pytest.raises(ValueError, match=r"expected a folder for the run, got .*out, which is a file"):
        train(DENSE, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "something of the user's"


@pytest.mark.parametrize("method", ["dense", "scl"])
def test_the_memory_of_an_indrnn_stays_bounded(images: ImageSet, tmp_path: Path, method: str) -> None:
    run = DENSE.with_settings(["lr=3", "clip=3"])
    values = {**run.to_dict(), "model": "indrnn", "method": method, "sparsity": 0.5 if method == "scl" else None}
    run = Run.from_dict({**values, "model_options": {"input_size": 8, "hidden_size": 6, "layers": 2}})
    train(run, tmp_path)
    largest = max(float(weights(tmp_path)[f"layers.{each}.cell.recurrent"].abs().max()) for each in (0, 1))
    assert largest == pytest.approx(2 ** (1 / 8))  # images of 64 pixels in steps of eight; the rate drives u to it


def test_an_unknown_method_suggests_the_nearest(images: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown method 'scll': did you mean 'scl'"):
        train(DENSE.with_settings(["method=scll", "sparsity=0.5"]), tmp_path)


def test_missing_data_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'cifar10' was not found: searched"):
        train(Run(data_root=str(tmp_path)), tmp_path / "out")


def test_the_log_has_every_step_once_whatever_happened(images: ImageSet, tmp_path: Path) -> None:
    run = SPARSE.with_settings(["checkpoint_steps=4", "validation=8"])  # 4 epochs of 4 steps
    with pytest.raises(MemoryError):
        train(run, tmp_path, observers=[At(9, die)])
    with open(tmp_path / "log.jsonl", "ab") as file:
        file.write(b'{"step": 7\xff}\n{"step": 10, "los')  # what a bad disk and a kill can leave
    train(run, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4, 6, 8, 9, 12, 15, 16]
    assert [line["step"] for line in lines if "validation" in line] == [4, 8, 12, 16]
    assert [line["phase"] for line in lines] == ["warm-up"] * 2 + ["sparsify"] * 3 + ["stabilise"] + ["fine-tune"] * 2
    assert all("decay" in line for line in lines if line["phase"] in ("sparsify", "stabilise"))
    assert lines[-1]["sparsity"] == pytest.approx(0.8, abs=0.001)


def test_the_training_accuracy_is_that_of_the_batches_as_they_came(images: ImageSet, tmp_path: Path) -> None:
    seen = At(-1, die)
    train(DENSE, tmp_path, observers=[seen])  # 4 epochs of 5 steps

    torch.manual_seed(DENSE.seed)
    model = networks.create(DENSE, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    batches, right, told = Batches.training(images, 8, seed=0), list[int](), list[float]()
    for step in range(20):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * step / 20))
        x, y = next(iter(batches))
        logits = model(x)
        right.append(int((logits.argmax(1) == y).sum()))
        functional.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 3 == 0 or (step + 1) % 5 == 0:
            told.append(sum(right) / (8 * len(right)))
            right.clear()
    assert len(set(told)) > 2
    assert [status.train for status in seen.seen] == pytest.approx(told)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["train"] for line in lines] == pytest.approx(told)


def test_of_a_language_model_the_training_perplexity_is_told(text: TextSet, tmp_path: Path) -> None:
    seen = At(-1, die)
    train(WORDS, tmp_path, observers=[seen])
    for status in seen.seen:
        assert status.loss is not None
        assert status.train == pytest.approx(math.exp(status.loss))


def test_the_learning_rate_that_is_told_is_the_one_that_was_taken(images: ImageSet, tmp_path: Path) -> None:
    """Also by a method that has its own: down to nothing, a cut half-way, and again from the peak."""
    seen = At(0, die)
    run = DENSE.with_settings(["method=lottery", "sparsity=0.8", "log_steps=1"])  # 20 steps, masks from 5 to 15
    train(run, tmp_path, observers=[seen])
    rates = {status.step - 1: status.lr for status in seen.seen}
    start = run.lr * 0.5 * (1 + math.cos(math.pi * 5 / 20))
    for step in range(5, 10):
        assert rates[step] == pytest.approx(start * 0.5 * (1 + math.cos(math.pi * (step - 5) / 5)))
    for step in range(10, 20):
        assert rates[step] == pytest.approx(run.lr * 0.5 * (1 + math.cos(math.pi * (step - 10) / 10)))


def test_tensorboard_gets_its_scalars(images: ImageSet, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(SPARSE, tmp_path, observers=[TensorBoard(tmp_path)])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"loss", "learning rate", "sparsity", "connectivity decay", "training accuracy"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("loss")] == [3, 5, 6, 9, 10, 12, 15, 18, 20]


def test_tensorboard_shows_every_step_once_after_a_death(images: ImageSet, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = DENSE.with_settings(["checkpoint_steps=6", "log_steps=2"])
    with pytest.raises(MemoryError):
        train(run, tmp_path, observers=[TensorBoard(tmp_path), At(10, die)])
    train(run, tmp_path, observers=[TensorBoard(tmp_path)])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("learning rate")] == [2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20]


def test_what_the_writer_of_tensorboard_cannot_write_is_told_once_and_without_a_traceback(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = pytest.importorskip("tensorboard.summary.writer.record_writer")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    heard: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", heard.append)
    hook = threading.excepthook
    log = TensorBoard(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(writers.RecordWriter, "write", full)
        with pytest.warns(UserWarning, match="tensorboard could not be written .*No space left.*; training goes on"):
            train(DENSE.with_settings(["epochs=40"]), tmp_path, observers=[log])
    assert heard == []
    assert threading.excepthook is hook
    log.begin(Status(step=0, total_steps=1, epoch=0.0, epochs=1, phase="dense", lr=0.1, seconds=0.0))
    another = threading.Thread(target=full)
    another.start()
    another.join()
    assert [type(each.exc_value) for each in heard] == [OSError]
    log.close()


def test_a_log_that_cannot_be_written_does_not_stop_the_run(images: ImageSet, tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    broken, healthy = At(6, full), At(-1, full)
    with pytest.warns(
        UserWarning, match=r"^the output of At could not be written .*No space left.*; training goes on"
    ) as warned:
        train(DENSE, tmp_path, observers=[broken, healthy])
    assert len(warned) == 1
    assert healthy.seen[-1].step == 20


def test_a_result_that_cannot_be_written_leaves_the_checkpoint(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = DENSE.with_settings(["checkpoint_steps=8"])
    with monkeypatch.context() as patch:
        patch.setattr(result, "save", full)
        with pytest.raises(OSError, match=r"the result cannot be written to .*No space left.*: free some space"):
            train(run, tmp_path)
    assert not (tmp_path / "result.json").exists()
    watcher = At(-1, die)
    train(run, tmp_path, observers=[watcher])
    assert watcher.seen[0].step > 16
    assert_same(weights(tmp_path), whole_weights(run, tmp_path / "whole"))


@pytest.mark.parametrize(
    "change",
    ["precision=bf16", "channels_last=true", "label_smoothing=0.1", "nesterov=true", "settings.scale=per_sample"],
)
def test_the_other_ways_to_compute_train_too(images: ImageSet, tmp_path: Path, change: str) -> None:
    found = train(SPARSE.with_settings([change, "epochs=10", "weight_decay=0.0"]), tmp_path)
    assert found["sparsity"] == pytest.approx(0.8, abs=0.001)
    assert found["accuracy"] > 0.6


def test_a_rate_that_fell_on_a_plateau_stays_low_after_a_death(text: TextSet, tmp_path: Path) -> None:
    run = WORDS.with_settings(["schedule=plateau", "lr_factor=0.5", "lr=30", "epochs=6", "checkpoint_steps=4"])
    whole = At(-1, die)
    train(run, tmp_path / "whole", observers=[whole])
    rates = [status.lr for status in whole.seen]
    assert rates[-1] < rates[0]
    with pytest.raises(MemoryError):
        train(run, tmp_path / "torn", observers=[At(75, die)])
    torn = At(-1, die)
    train(run, tmp_path / "torn", observers=[torn])
    assert [status.lr for status in torn.seen] == rates[-len(torn.seen) :]
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "torn"))


def test_drops_of_the_learning_rate_after_the_end_are_told(images: ImageSet, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="lr_drops=9ep comes after the end of the run, of 20 steps"):
        train(DENSE.with_settings(["schedule=steps", "lr_drops=2ep,9ep"]), tmp_path)


def test_a_dense_run_of_one_step_and_one_with_the_rates_of_a_sparse_one(images: ImageSet, tmp_path: Path) -> None:
    train(DENSE.with_settings(["epochs=1", "batch_size=40"]), tmp_path / "short")
    watcher = At(-1, die)
    train(DENSE.with_settings(["schedule=phases", "log_steps=1"]), tmp_path / "phases", observers=[watcher])
    sparse = At(-1, die)
    train(SPARSE.with_settings(["schedule=phases", "log_steps=1"]), tmp_path / "sparse", observers=[sparse])
    assert [status.lr for status in watcher.seen] == [status.lr for status in sparse.seen]
