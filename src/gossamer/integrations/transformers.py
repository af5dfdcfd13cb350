"""Sparsity for the Hugging Face Trainer: `Trainer(…, callbacks=[SparsifierCallback(sparsity=0.9)])`.

Everything that `gossamer.Sparsifier` takes can be given. The number of steps comes from the trainer; the state is saved
in every checkpoint, so that `resume_from_checkpoint` goes on where it was. The best checkpoint
(`load_best_model_at_end`) is chosen among those that have their final masks.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gossamer.integrations.ending import finish_with_current_weights
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
        if self.sparsifier is not None and state.log_history:
            metrics = {f"sparsifier/{name}": value for name, value in self.sparsifier.metrics().items()}
            state.log_history[-1].update(metrics)
            kwargs.get("logs", {}).update(metrics)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.sparsifier is not None:
            finish_with_current_weights(self.sparsifier, kwargs["model"])

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
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return found
