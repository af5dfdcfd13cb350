"""Students in a batch: each learns from the network that it branched off, as it does alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batched.test_batched import CPU, PHASES, check_against_runs_alone, data, network, run_of, scl, train
from methods.test_captured import Watch, as_on_a_gpu
from torch import nn

from gossamer.lab.batched.supported import batched_run
from gossamer.lab.batched.training import BatchedTraining
from gossamer.lab.checkpoint import Checkpoints
from gossamer.lab.training.run import Run

STEPS, EPOCHS = 8, 5


def student(seed: int = 1, method: str = "scl", distil: float = 0.6, temperature: float = 3.0, **settings: str) -> Run:
    return replace(run_of(method, seed, **settings), distil=distil, temperature=temperature)


def all_kinds() -> list[Run]:
    """Students of two seeds, methods, temperatures and warm-ups; runs that learn from labels alone; a dense one."""
    return [
        student(),
        scl(1),
        student(seed=2, method="dpf", distil=0.3, temperature=1.0),
        student(distil=1.0, warmup="2ep", sparsify="1ep"),
        student(method="lottery", warmup="2ep", sparsify="1ep"),
        run_of("dense", 1),
        replace(student(), schedule="restart", lr_restart=0.03),
    ]


def test_students_equal_themselves_alone() -> None:
    outcomes = check_against_runs_alone(all_kinds())
    assert outcomes[0].train_loss != pytest.approx(outcomes[1].train_loss, rel=1e-4)


def test_what_a_student_learns_does_not_depend_on_its_batch() -> None:
    (alone, _), *_ = train([student()])
    together, *_ = train(all_kinds())
    assert alone.nonzeros_by_tensor == together[0].nonzeros_by_tensor
    assert alone.train_loss == pytest.approx(together[0].train_loss)


def fresh(runs: list[Run]) -> BatchedTraining:
    torch.manual_seed(0)
    return BatchedTraining([batched_run(run, STEPS) for run in runs], data(), network, device=CPU, dtype=torch.float64)


def test_training_with_teachers_resumes_after_every_epoch(tmp_path: Path) -> None:
    whole = fresh(all_kinds())
    for epoch in range(EPOCHS):
        whole.train_epoch(epoch)
    for epoch in range(EPOCHS):
        cut = fresh(all_kinds())
        assert cut.restore(Checkpoints(tmp_path, "batch")) == epoch
        cut.train_epoch(epoch)
        cut.save(Checkpoints(tmp_path, "batch"))
    assert cut.outcomes() == whole.outcomes()


def test_a_warm_up_of_no_steps_has_no_teacher() -> None:
    with pytest.raises(ValueError, match="expected a warm-up in which the teacher learns"):
        train([student(warmup="0ep")])


@pytest.mark.parametrize("last", [STEPS, 4 * STEPS])
def test_a_step_with_teachers_can_be_captured(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at no value and moves no tensor, beyond what a step without a teacher does."""
    as_on_a_gpu(monkeypatch)
    seen = []
    for runs in ([run_of("dense", 1), scl(1)], [run_of("dense", 1), student(), student(temperature=2.0)]):
        training = fresh(runs)
        for step in sorted({STEPS, last}):
            training.arrange_rows(step)
        training.loader.begin_epoch(1)
        compute, watch = training._step(), Watch()
        compute()
        places = {name: tensor.data_ptr() for name, tensor in training._tensors().items()}
        with watch:
            compute()
        assert {name: tensor.data_ptr() for name, tensor in training._tensors().items()} == places
        seen.append(watch.seen)
    assert seen[1] == seen[0]


def test_a_teacher_is_in_evaluation_mode_and_keeps_its_statistics() -> None:
    """Its batch norms use their running means, as it would in use; the student's train on."""
    training = fresh([student()])
    training.train_epoch(0)
    training.arrange_rows(STEPS)
    kept = {name: tensor.clone() for name, tensor in training._teachers.tensors().items()}
    training.train_epoch(1)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in training._teachers.tensors().items())
    assert any(isinstance(module, nn.BatchNorm2d) for module in network().modules())
    assert PHASES["warmup"] == "1ep"
