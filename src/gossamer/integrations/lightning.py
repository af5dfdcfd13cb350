"""Sparsity for Lightning: `Trainer(callbacks=[SparsifierCallback(sparsity=0.9)])`.

Everything that `gossamer.Sparsifier` takes can be given. The number of steps comes from the trainer. At the end of the
fit the model is exactly as sparse as was asked, also where another callback has put averaged weights into it.
ModelCheckpoint and EarlyStopping compare only models with their final masks.
"""

import math
import warnings
from typing import Any

import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from gossamer.integrations.ending import finish_with_current_weights
from gossamer.schedule import Phase
from gossamer.sparsifier import Sparsifier

_DRY_RUN = 8  # steps of the plan of a dry run, which has too few for all phases


class SparsifierCallback(Callback):  # type: ignore[misc]
    """Makes the model of a fit sparse. `sparsifier` is the `gossamer.Sparsifier`, from the start of the fit.

    `total_steps` is needed only where the trainer does not know its end (`max_epochs=-1`), or where optimizers step by
    hand (manual optimization). With `log` the metrics of the Sparsifier go to the trainer's loggers.
    """

    def __init__(self, *, total_steps: int | None = None, log: bool = True, **settings: Any) -> None:
        self.sparsifier: Sparsifier | None = None
        self._total_steps, self._log, self._settings = total_steps, log, settings
        self._saved: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total, epochs = self._total_steps or self._steps_of(trainer), trainer.max_epochs or 0
        if trainer.fast_dev_run:
            total = max(total, _DRY_RUN)
        settings = {"steps_per_epoch": max(1, round(total / epochs))} if epochs > 0 else {}
        if self.sparsifier is not None:  # of a fit that was interrupted
            self.sparsifier.detach()
        self.sparsifier = Sparsifier(
            pl_module, list(trainer.optimizers), total_steps=total, **{**settings, **self._settings}
        )
        if self._saved is not None:
            self.sparsifier.load_state_dict(self._saved)
            self._saved = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path and trainer.global_step and self.sparsifier is not None and not self.sparsifier.step:
            raise ValueError(
                f"expected the state of the Sparsifier in {trainer.ckpt_path}, to resume at step "
                f"{trainer.global_step}: resume from a checkpoint that was written with this callback. To start a new "
                "run from these weights, load them into the model, and fit without ckpt_path"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self.sparsifier is not None and self.sparsifier.phase is not Phase.FINETUNE:
            for callback in trainer.callbacks:
                if isinstance(callback, (EarlyStopping, ModelCheckpoint)):
                    _forget_best(callback)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        due = self._log and trainer.loggers and trainer.global_step % trainer.log_every_n_steps == 0
        if due and self.sparsifier is not None:
            pl_module.log_dict({f"sparsifier/{name}": value for name, value in self.sparsifier.metrics().items()})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After `on_train_end`, in which callbacks put their averages into the model."""
        if self.sparsifier is not None:
            with warnings.catch_warnings():
                if trainer.fast_dev_run:
                    warnings.simplefilter("ignore")  # such a run ends before its masks are final
                finish_with_current_weights(self.sparsifier, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.sparsifier is None else {"sparsifier": self.sparsifier.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("sparsifier")

    def _steps_of(self, trainer: Trainer) -> int:
        steps = trainer.estimated_stepping_batches
        if not 0 < steps < float("inf"):
            raise ValueError(
                "expected a trainer that knows its number of steps, to lay out the phases of the masks, got "
                f"max_epochs={trainer.max_epochs} and max_steps={trainer.max_steps}: give one of them, or "
                "SparsifierCallback(total_steps=…)"
            )
        return int(steps)


def _forget_best(callback: EarlyStopping | ModelCheckpoint) -> None:
    """A model before its final masks is another model: it cannot be the best."""
    if isinstance(callback, EarlyStopping):
        callback.wait_count = 0
        callback.best_score = torch.tensor(math.inf if callback.mode == "min" else -math.inf)
    elif callback.monitor is not None:
        callback.best_k_models, callback.best_model_path, callback.best_model_score = {}, "", None
        callback.kth_best_model_path = ""
