"""Learning from a teacher while training: against plain loops with torch's own divergence, and back from a kill."""

import copy
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from observers import Dies
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import gossamer
from gossamer import Sparsifier
from gossamer.lab.data import Batches, ImageSet, TextBatches, TextSet
from gossamer.lab.data.batches import seed_for
from gossamer.lab.models import create
from gossamer.lab.training import Run, networks, train

IMAGES = Run(
    model="digits_cnn",
    model_options={"width": 4},
    data="digits",
    epochs=4,
    batch_size=8,
    log_steps=1,
    device="cpu",
    method="scl",
    sparsity=0.8,
    distil=0.6,
    temperature=3.0,
    clip=1.0,
)
WORDS = Run(
    model="lstm_lm",
    model_options={"hidden": 8},
    data="wikitext2",
    epochs=2,
    batch_size=4,
    bptt=7,
    lr=1.0,
    momentum=0.0,
    log_steps=1,
    device="cpu",
    method="scl",
    sparsity=0.5,
    distil=0.3,
)
BY_FILE = ["method=dense", "sparsity=none"]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-6)


def taught(loss: Tensor, said: Tensor, wanted: Tensor, run: Run) -> Tensor:
    """(1-a)·CE + a·T²·KL by torch's own divergence, whose "batchmean" divides by the first axis."""
    soft = [functional.log_softmax(each.float().flatten(0, -2) / run.temperature, dim=-1) for each in (said, wanted)]
    lesson = functional.kl_div(*soft, reduction="batchmean", log_target=True)
    return (1 - run.distil) * loss + run.distil * run.temperature**2 * lesson


def by_hand(
    run: Run,
    model: nn.Module,
    source: Batches | TextBatches,
    rate: Callable[[int], float] | None = None,
    teacher: nn.Module | None = None,
) -> dict[str, Tensor]:
    """A run of `gossamer train` as a user would write it. With no `teacher`, the trunk, copied when masks begin."""
    torch.manual_seed(seed_for(run.seed, 0))  # of dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=run.momentum, weight_decay=run.weight_decay)
    per_epoch, words = len(source), run.model == "lstm_lm"
    total = per_epoch * run.epochs
    rate = rate or (lambda step: run.lr * 0.5 * (1 + math.cos(math.pi * step / total)))
    sparsifier = None
    if run.sparsity is not None:
        sparsifier = Sparsifier(
            model, optimizer, sparsity=run.sparsity, total_steps=total, steps_per_epoch=per_epoch, **dict(run.settings)
        )
    step = 0
    for _ in range(run.epochs):
        mine: Any = None
        its: Any = None
        for x, y in source:
            if teacher is None and sparsifier is not None and step == sparsifier.plan.warmup:
                teacher = copy.deepcopy(model).eval()
            with torch.autocast("cpu", torch.bfloat16, enabled=run.precision == "bf16"):
                said, mine = model(x, mine) if words else (model(x), None)
                if teacher is not None:
                    with torch.no_grad():
                        wanted, its = teacher(x, its) if words else (teacher(x), None)
            loss = functional.cross_entropy(said.float().flatten(0, -2), y.flatten())
            if teacher is not None:
                loss = taught(loss, said, wanted, run)
            loss.backward()
            mine = None if mine is None else tuple(part.detach() for part in mine)
            if run.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), run.clip)
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    if sparsifier is not None:
        sparsifier.finish()
    return dict(model.state_dict())


def fresh(run: Run, classes: int) -> nn.Module:
    torch.manual_seed(run.seed)
    return networks.create(run, classes)


def write_teacher(path: Path, *, kind: str) -> nn.Module:
    """A digits network of another width, as a run leaves it or in a file; only its weights matter."""
    torch.manual_seed(7)
    run = Run(model="digits_cnn", model_options={"width": 6 if kind == "folder" else 4}, data="digits")
    model = networks.create(run, 3).eval()
    if kind == "folder":
        path.mkdir()
        save_file(model.state_dict(), path / "model.safetensors")
        (path / "run.json").write_text(json.dumps(run.to_dict()))
    elif kind == "saved":
        gossamer.save(model, path, network="digits_cnn")
    else:
        save_file(model.state_dict(), path)  # nothing says what it is: it must be a network as the pupil
    return model


@pytest.mark.parametrize("changes", [[], ["precision=bf16", "settings.scale=per_sample", "clip=none"]], ids=str)
def test_the_trunk_teaches_once_masks_begin(images: ImageSet, tmp_path: Path, changes: list[str]) -> None:
    run = IMAGES.with_settings(changes)
    result = train(run, tmp_path)
    assert_close(weights(tmp_path), by_hand(run, fresh(run, 3), Batches.training(images, 8, seed=0)))
    assert result["teacher"] == {"from": "trunk", "network": "digits_cnn", "steps": 5}
    assert result["config"]["distil"] == 0.6


@pytest.mark.parametrize("kind", ["folder", "saved", "bare"])
@pytest.mark.parametrize("changes", [[], BY_FILE], ids=["sparse", "dense"])
def test_a_file_teaches_from_the_first_step(images: ImageSet, tmp_path: Path, kind: str, changes: list[str]) -> None:
    path = tmp_path / "teacher"
    teacher = write_teacher(path, kind=kind)
    run = IMAGES.with_settings([*changes, f"teacher={path}"])
    result = train(run, tmp_path / "out")["teacher"]
    expected = by_hand(run, fresh(run, 3), Batches.training(images, 8, seed=0), teacher=teacher)
    assert_close(weights(tmp_path / "out"), expected)
    assert (result["from"], result["network"]) == (str(path), "digits_cnn")
    file = path / "model.safetensors" if kind == "folder" else path
    assert result["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("by", ["trunk", "file"])
def test_a_language_model_learns_from_one_with_its_own_hidden_state(text: TextSet, tmp_path: Path, by: str) -> None:
    run, teacher = WORDS, None
    if by == "file":
        torch.manual_seed(3)
        teacher = create("lstm_lm", num_classes=11, hidden=6).eval()
        folder = tmp_path / "teacher"
        folder.mkdir()
        gossamer.save(teacher, folder / "model.safetensors")
        (folder / "run.json").write_text(json.dumps({"model": "lstm_lm", "model_options": {"hidden": 6}}))
        run = WORDS.with_settings([f"teacher={folder}"])
    train(run, tmp_path / "out")
    expected = by_hand(run, fresh(run, 11), TextBatches(text.train, 4, length=7), teacher=teacher)
    assert_close(weights(tmp_path / "out"), expected)


def test_a_share_of_nothing_changes_nothing_and_all_of_it_forgets_the_labels(images: ImageSet, tmp_path: Path) -> None:
    path = tmp_path / "teacher"
    write_teacher(path, kind="saved")
    plain = IMAGES.with_settings(["distil=0", "temperature=4"])
    assert "teacher" not in train(plain, tmp_path / "plain")
    tiny = IMAGES.with_settings(["distil=1e-12", f"teacher={path}"])
    train(tiny, tmp_path / "tiny")
    assert_close(weights(tmp_path / "plain"), weights(tmp_path / "tiny"))
    every = IMAGES.with_settings(["distil=1", f"teacher={path}"])
    train(every, tmp_path / "every")
    images.train.labels.copy_(images.train.labels.flip(0))
    train(every, tmp_path / "other labels")
    assert_close(weights(tmp_path / "every"), weights(tmp_path / "other labels"))


def test_with_restart_the_trunk_is_a_finished_dense_network(images: ImageSet, tmp_path: Path) -> None:
    changes = ["schedule=restart", "lr_restart=0.04", "settings.warmup=2ep", "settings.sparsify=1ep"]
    run = IMAGES.with_settings([*changes, "settings.stabilise=0it"])
    train(run, tmp_path)

    def rate(step: int) -> float:
        start, peak, length = (0, 0.1, 10) if step < 10 else (10, 0.04, 10)
        return peak * 0.5 * (1 + math.cos(math.pi * (step - start) / length))

    expected = by_hand(run, fresh(run, 3), Batches.training(images, 8, seed=0), rate)
    assert_close(weights(tmp_path), expected)


@pytest.mark.parametrize("died_at", [3, 5, 6, 17])  # masks, and lessons, begin after step 5
def test_a_run_that_died_learns_on_from_the_same_trunk(images: ImageSet, tmp_path: Path, died_at: int) -> None:
    run = IMAGES.with_settings(["checkpoint_steps=1"])
    train(run, tmp_path / "whole")
    with pytest.raises(MemoryError):
        train(run, tmp_path / "torn", observers=[Dies(died_at)])
    assert train(run, tmp_path / "torn")["teacher"]["steps"] == 5
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "torn")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("died_at", [5, 22])  # of 30 steps, 15 an epoch
def test_a_language_model_that_died_learns_on_with_its_teacher_s_hidden_state(
    text: TextSet, tmp_path: Path, died_at: int
) -> None:
    run = WORDS.with_settings(["checkpoint_steps=2"])
    train(run, tmp_path / "whole")
    with pytest.raises(MemoryError):
        train(run, tmp_path / "torn", observers=[Dies(died_at)])
    train(run, tmp_path / "torn")
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "torn")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_teacher_that_has_changed_meanwhile_is_refused(images: ImageSet, tmp_path: Path) -> None:
    path, kept = tmp_path / "teacher", tmp_path / "kept"
    write_teacher(path, kind="saved")
    shutil.copy(path, kept)
    run = IMAGES.with_settings([f"teacher={path}", "checkpoint_steps=1"])
    train(run, tmp_path / "whole")
    with pytest.raises(MemoryError):
        train(run, tmp_path / "torn", observers=[Dies(5)])
    gossamer.save(fresh(IMAGES, 3), path, network="digits_cnn")
    with pytest.raises(ValueError, match=r"expected the teacher with which the run began .* put the old one back"):
        train(run, tmp_path / "torn")
    shutil.copy(kept, path)
    train(run, tmp_path / "torn")
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "torn")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_teacher_is_compiled_where_its_pupil_is(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda module, **_: compiled.append(module) or module)
    train(IMAGES.with_settings(["compile=true"]), tmp_path)
    pupil, teacher = compiled
    assert (pupil.training, teacher.training) == (True, False)
    assert not any(each.requires_grad for each in teacher.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["distil=1.5"], "distil: expected a number from 0 to 1, got 1.5"),
        (["temperature=0"], "temperature: expected a number above 0, got 0.0"),
        (["distil=0"], "temperature needs distil above 0, got temperature=3.0 and distil=0"),
        (["distil=0", "temperature=4", "teacher=x"], "teacher needs distil above 0, got teacher=x"),
        (BY_FILE, "teacher=trunk needs a warm-up before the masks, but method=dense has no masks: set method=scl"),
        (["method=rigl"], "method=rigl is sparse from its first step on: choose another method, or set teacher= to a"),
        (["method=snip", "schedule=restart"], "schedule=restart needs a warm-up before the masks, but method=snip"),
        ([*BY_FILE, "schedule=restart", "teacher=x"], "schedule=restart needs a warm-up before the masks, but method="),
        (["lr_restart=0.1"], "lr_restart needs schedule=restart, got schedule=cosine"),
        (["schedule=restart", "lr_restart=0"], "lr_restart: expected a number above 0, or none, got 0.0"),
    ],
    ids=str,
)
def test_what_cannot_be_learned_from_is_refused_at_once(changes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        IMAGES.with_settings(changes)


def test_a_trunk_of_no_steps_is_refused(images: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a warm-up in which the teacher learns, .* raise settings\.warmup"):
        train(IMAGES.with_settings(["settings.warmup=0it"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_teachers_that_do_not_fit_are_refused(images: ImageSet, tmp_path: Path) -> None:
    (tmp_path / "unfinished").mkdir()
    for name, network in {"words": "lstm_lm", "others": "lenet300"}.items():
        options = {"hidden": 4} if name == "words" else {}
        (tmp_path / name).mkdir()
        gossamer.save(create(network, num_classes=3, **options), tmp_path / name / "model.safetensors")
        (tmp_path / name / "run.json").write_text(json.dumps({"model": network, "model_options": options}))
    gossamer.save(networks.create(IMAGES, 4), tmp_path / "classes", network="digits_cnn")
    gossamer.save(nn.Linear(2, 2), tmp_path / "foreign")
    expected: dict[str, tuple[type[Exception], str]] = {
        "nowhere": (FileNotFoundError, "expected 'trunk', the folder of a finished run or a safetensors file, got a"),
        "unfinished": (FileNotFoundError, "expected a folder with a model.safetensors, as a finished run leaves it"),
        "words": (ValueError, "expected a teacher that gives 3 logits for batches of digits, got lstm_lm"),
        "others": (ValueError, "got lenet300 from .* which does not take them"),
        "classes": (ValueError, r"got digits_cnn from .* with answers of shape \(2, 4\): choose one that was trained"),
        "foreign": (ValueError, "expected the tensors of digits_cnn in .*, got others"),
    }
    for name, (kind, message) in expected.items():
        with pytest.raises(kind, match=message):
            train(IMAGES.with_settings([f"teacher={tmp_path / name}"]), tmp_path / "out")
        assert not (tmp_path / "out").exists()
