"""Sparsity for the Hugging Face Trainer: `Trainer(…, callbacks=[SparsifierCallback(sparsity=0.9)])`.

`SparseTrainer(…, sparsifier=SparsifierCallback(sparsity=0.9), teacher=teacher)` also learns from a teacher, and reports
the metrics of the Sparsifier to TensorBoard, MLflow and W&B. (These read a log before callbacks can add to it.)

Everything that `gossamer.Sparsifier` takes can be given. The number of steps comes from the trainer; the state is saved
in every checkpoint, so that `resume_from_checkpoint` goes on where it was. The best checkpoint
(`load_best_model_at_end`) is chosen among those that have their final masks.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gossamer.distillation import distil
from gossamer.integrations.ending import finish_with_current_weights
from gossamer.io.torch_files import read_torch_file
from gossamer.schedule import Phase
from gossamer.sparsifier import Sparsifier

FILE = "sparsifier.pt"


class SparsifierCallback(TrainerCallback):
    """Makes the model of a Trainer sparse. `sparsifier` is the `gossamer.Sparsifier`, from the start of the training.

    `resume_from` is the folder that is resumed from, where it is not the checkpoint of that step in the output folder.
    """

    def __init__(self, *, resume_from: str | Path | None = None, **settings: Any) -> None:
        self.sparsifier: Sparsifier | None = None
        self._resume_from, self._settings = resume_from, settings

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: nn.Module = kwargs["model"]
        optimizer: Optimizer = kwargs["optimizer"]
        settings = {"steps_per_epoch": max(1, round(state.max_steps / (state.num_train_epochs or 1)))}
        if self.sparsifier is not None:  # the run starts again, as auto_find_batch_size does
            self.sparsifier.detach()
        self.sparsifier = Sparsifier(model, optimizer, total_steps=state.max_steps, **{**settings, **self._settings})
        if state.global_step:
            self.sparsifier.load_state_dict(self._read(self._folder(args, state, self._resume_from)))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.sparsifier is not None and self.sparsifier.phase is not Phase.FINETUNE:
            # A model before its final masks is another model: it cannot be the best.
            state.best_metric = state.best_model_checkpoint = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = self._folder(args, state)
        if self.sparsifier is not None and args.should_save and folder.is_dir():
            torch.save(self.sparsifier.state_dict(), folder / FILE)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.log_history:
            state.log_history[-1].update(self.metrics())
            kwargs.get("logs", {}).update(self.metrics())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.sparsifier is not None:
            finish_with_current_weights(self.sparsifier, kwargs["model"])

    def metrics(self) -> dict[str, float]:
        """The metrics of the Sparsifier under the names that logs have."""
        found = {} if self.sparsifier is None else self.sparsifier.metrics()
        return {f"sparsifier/{name}": value for name, value in found.items()}

    def _folder(self, args: TrainingArguments, state: TrainerState, given: str | Path | None = None) -> Path:
        return Path(given or Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def _read(self, folder: Path) -> dict[str, Any]:
        file = folder / FILE
        if not file.exists():
            raise FileNotFoundError(
                f"expected the state of the Sparsifier in {file}, to resume this run: resume from a checkpoint that "
                "was written with this callback, and name its folder with SparsifierCallback(resume_from=…) if it is "
                "another one"
            )
        try:
            found: dict[str, Any] = read_torch_file(file)
        except ValueError as error:
            raise ValueError(
                f"expected the state of the Sparsifier in {file}, got a damaged or foreign file ({error}): resume from "
                "an earlier checkpoint"
            ) from error
        return found


class SparseTrainer(Trainer):
    """A Trainer that makes its model sparse, and that can learn from a teacher besides the labels.

    With a `teacher`, a trained model with the same inputs and classes, the loss is that of `gossamer.distil`. Of token
    outputs, the positions whose label is not -100 count.
    """

    def __init__(
        self,
        *args: Any,
        sparsifier: SparsifierCallback,
        teacher: nn.Module | None = None,
        share: float = 0.5,
        temperature: float = 4.0,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **{**settings, "callbacks": [sparsifier, *(settings.get("callbacks") or ())]})
        self._sparsifier, self._teacher, self._share, self._temperature = sparsifier, teacher, share, temperature
        if teacher is not None:
            teacher.to(self.args.device).eval()
            self.model_accepts_loss_kwargs = False  # losses are means over a batch, like that of the teacher

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._teacher is None or not model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        labels = inputs.get("labels")
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        with torch.no_grad():
            targets = self._teacher(**inputs).logits
        logits = outputs["logits"]
        if isinstance(labels, Tensor) and labels.shape == logits.shape[:-1]:
            counted = labels != -100
            logits, targets = logits[counted], targets[counted]
        loss = distil(loss, logits, targets, share=self._share, temperature=self._temperature)
        return (loss, outputs) if kwargs.get("return_outputs", bool(args and args[0])) else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, **self._sparsifier.metrics()}, *args, **kwargs)
