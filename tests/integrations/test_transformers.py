"""The callback in real runs of the Hugging Face Trainer."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import gossamer
from gossamer.integrations.transformers import FILE, SparseTrainer, SparsifierCallback
from gossamer.schedule import Phase

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, PER_EPOCH = 48, 8


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.tokens = torch.randint(3, 40, (64, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": (tokens[0] % 2).long()}


def network() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=2,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def train(
    folder: Path, callback: SparsifierCallback, *, resume: Any = None, model: Any = None, **options: Any
) -> tuple[Any, Any]:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8, "max_steps": STEPS, "learning_rate": 1e-3, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "logging_steps": 4, "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    model = network() if model is None else model
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **{**settings, **options}),
        train_dataset=Data(),
        eval_dataset=Data(),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer


def counts(callback: SparsifierCallback, model: nn.Module) -> tuple[int, int]:
    """The zeros of the selected weights, and what was asked for."""
    assert callback.sparsifier is not None
    weights = [model.get_parameter(weight.name) for weight in callback.sparsifier.weights]
    total = sum(each.numel() for each in weights)
    return sum(int((each == 0).sum()) for each in weights), int(0.9 * total + 0.5)


def test_a_training_ends_at_the_target(tmp_path: Path) -> None:
    callback = SparsifierCallback(sparsity=0.9)
    model, trainer = train(tmp_path, callback)
    found, asked = counts(callback, model)
    assert found == asked
    assert callback.sparsifier is not None
    assert (callback.sparsifier.plan.total, callback.sparsifier.phase) == (STEPS, Phase.FINISHED)
    model.save_pretrained(tmp_path / "saved")
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert counts(callback, again) == (asked, asked)
    logged = [entry["sparsifier/sparsity"] for entry in trainer.state.log_history if "sparsifier/sparsity" in entry]
    assert len(logged) >= STEPS // 4
    assert logged[0] == 0.0
    assert logged[-1] == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "max_steps": 24},
        {"bf16": True},
        {"max_steps": -1, "num_train_epochs": 4},
        {"optim": "adafactor"},
        {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 6},
        {"max_grad_norm": 0.1},
    ],
    ids=str,
)
def test_options_of_the_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    if "schedule_free" in options.get("optim", ""):
        pytest.importorskip("schedulefree", reason="pip install schedulefree")
    callback = SparsifierCallback(sparsity=0.9)
    model, trainer = train(tmp_path, callback, **options)
    found, asked = counts(callback, model)
    assert found == asked
    assert callback.sparsifier is not None
    assert callback.sparsifier.step == trainer.state.max_steps == trainer.state.global_step


@pytest.mark.parametrize("step", [8, 24, 40])
def test_resuming_is_the_same_bit_for_bit(tmp_path: Path, step: int) -> None:
    saving = {"save_strategy": "steps", "save_steps": 8, "save_total_limit": None}
    whole, _ = train(tmp_path / "a", SparsifierCallback(sparsity=0.9), **saving)
    folder = tmp_path / "a" / f"checkpoint-{step}"
    callback = SparsifierCallback(sparsity=0.9)
    model, _ = train(tmp_path / "a", callback, resume=str(folder), **saving)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_resuming_from_another_folder_or_without_the_state(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 16}
    whole, _ = train(tmp_path / "a", SparsifierCallback(sparsity=0.9), **saving)
    folder = tmp_path / "a" / "checkpoint-16"
    model, _ = train(tmp_path / "b", SparsifierCallback(sparsity=0.9, resume_from=folder), resume=str(folder), **saving)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), whole.parameters(), strict=True))
    for content in (b"damaged", pickle.dumps(Path("code of someone else"))):
        (folder / FILE).write_bytes(content)
        with pytest.raises(ValueError, match=r"in .*sparsifier\.pt, got a damaged or foreign file .*earlier"):
            train(tmp_path / "a", SparsifierCallback(sparsity=0.9), resume=str(folder), **saving)
    (folder / FILE).unlink()
    with pytest.raises(FileNotFoundError, match="expected the state of the Sparsifier in"):
        train(tmp_path / "a", SparsifierCallback(sparsity=0.9), resume=str(folder), **saving)


def test_the_best_checkpoint_is_one_with_its_final_masks(tmp_path: Path) -> None:
    """Early evaluations, of the dense network, would be the best ones: the metric says so by force."""
    callback = SparsifierCallback(sparsity=0.9)
    seen = []

    class Watch(transformers.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
            metrics["eval_score"] = -float(state.global_step)  # the earlier, the better
            assert callback.sparsifier is not None
            seen.append((state.global_step, callback.sparsifier.phase))

    model = network()
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            max_steps=STEPS,
            learning_rate=1e-3,
            report_to=[],
            use_cpu=True,
            eval_strategy="steps",
            eval_steps=4,
            save_strategy="steps",
            save_steps=4,
            disable_tqdm=True,
            load_best_model_at_end=True,
            metric_for_best_model="score",
            greater_is_better=True,
        ),
        train_dataset=Data(),
        eval_dataset=Data(),
        callbacks=[callback, Watch()],
    )
    trainer.train()
    first_final = next(step for step, phase in seen if phase is Phase.FINETUNE)
    assert trainer.state.best_model_checkpoint is not None
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{first_final}")
    found, asked = counts(callback, model)
    assert found == asked


def test_early_stopping_waits_for_the_final_masks(tmp_path: Path) -> None:
    """The metric is worse after every evaluation, so that training would stop in the warm-up."""

    class Worse(transformers.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
            metrics["eval_score"] = -float(state.global_step)

    model, callback = network(), SparsifierCallback(sparsity=0.9, stabilise="0.15run")
    trainer_of(
        transformers.Trainer, model, tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=True,
        callbacks=[callback, Worse(), transformers.EarlyStoppingCallback(early_stopping_patience=2)],
    ).train()  # fmt: skip
    found, asked = counts(callback, model)
    assert found == asked
    assert callback.sparsifier is not None
    plan = callback.sparsifier.plan
    assert plan.total - plan.finetune < callback.sparsifier.step < plan.total


class OutOfMemory(transformers.TrainerCallback):
    """Fails once, in the second step, as a batch that is too large for the memory."""

    def __init__(self) -> None:
        self.failed = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and not self.failed:
            self.failed = True
            raise RuntimeError("CUDA out of memory.")


def trainer_of(kind: Any, model: Any, folder: Path, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8, "max_steps": STEPS, "report_to": [], "use_cpu": True, "seed": 0,
        "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3,
    }  # fmt: skip
    given = {name: options.pop(name) for name in list(options) if hasattr(transformers.TrainingArguments, name)}
    args = transformers.TrainingArguments(output_dir=str(folder), **{**settings, **given})
    return kind(model=model, args=args, train_dataset=Data(), eval_dataset=Data(), **options)


def test_a_smaller_batch_after_one_that_was_too_large(tmp_path: Path) -> None:
    callback, model = SparsifierCallback(sparsity=0.9), network()
    callbacks = [callback, OutOfMemory()]
    trainer_of(transformers.Trainer, model, tmp_path, callbacks=callbacks, auto_find_batch_size=True).train()
    found, asked = counts(callback, model)
    assert found == asked
    assert callback.sparsifier is not None
    assert callback.sparsifier.step == STEPS


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_sparse_student_learns_from_its_teacher(tmp_path: Path, accumulation: int) -> None:
    """With share=1 the labels do not count: they are wrong here, and the student still learns the teacher's answers."""
    teacher = network()
    trainer_of(transformers.Trainer, teacher, tmp_path, max_steps=150, learning_rate=3e-3).train()
    data = Data()
    labels = torch.stack([data[index]["labels"] for index in range(len(data))])
    answers = teacher(data.tokens).logits.argmax(1)
    assert float((answers == labels).float().mean()) > 0.9

    class Wrong(Data):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {**super().__getitem__(index), "labels": torch.tensor(0)}

    student, callback = copy.deepcopy(teacher), SparsifierCallback(sparsity=0.5)
    trainer = trainer_of(
        SparseTrainer, student, tmp_path, sparsifier=callback, teacher=teacher, share=1.0, max_steps=STEPS,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    trainer.train_dataset = Wrong()
    trainer.train()
    assert callback.sparsifier is not None
    assert callback.sparsifier.sparsity == pytest.approx(0.5, abs=1e-3)
    assert float((student.eval()(data.tokens).logits.argmax(1) == answers).float().mean()) > 0.9
    assert trainer.evaluate()["eval_loss"] > 0.0  # an evaluation has the loss on the labels


def test_token_outputs_without_a_label_do_not_count(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    student, teacher = (transformers.BertForTokenClassification(config) for _ in range(2))
    trainer = trainer_of(
        SparseTrainer, student, tmp_path, sparsifier=SparsifierCallback(sparsity=0.5), teacher=teacher, share=0.25
    )
    tokens = torch.randint(3, 40, (4, 12))
    labels = torch.full((4, 12), -100)
    labels[:, 3:7] = 1
    inputs = {"input_ids": tokens, "labels": labels}
    found = trainer.compute_loss(student.train(), dict(inputs))
    outputs = student(**inputs)
    kept, targets = outputs.logits[:, 3:7], teacher(**inputs).logits[:, 3:7]
    torch.testing.assert_close(found, gossamer.distil(outputs.loss, kept, targets, share=0.25, temperature=4.0))


def test_metrics_reach_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "log"))
    callback = SparsifierCallback(sparsity=0.9)
    trainer_of(
        SparseTrainer, network(), tmp_path, sparsifier=callback, report_to=["tensorboard"], logging_steps=4
    ).train()
    events = reader.EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    values = [event.value for event in events.Scalars("train/sparsifier/sparsity")]
    assert len(values) >= STEPS // 4
    assert values[-1] == pytest.approx(0.9, abs=1e-3)
