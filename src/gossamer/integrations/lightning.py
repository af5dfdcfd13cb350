"""Sparsity for Lightning: `Trainer(callbacks=[SparsifierCallback(sparsity=0.9)])`.

Everything that `gossamer.Sparsifier` takes can be given. The number of steps comes from the trainer. At the end of the
fit the model is exactly as sparse as was asked, also where another callback has put averaged weights into it.
"""

import warnings
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer

from gossamer.integrations.ending import finish_with_current_weights
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
        self.sparsifier = Sparsifier(
            pl_module, list(trainer.optimizers), total_steps=total, **{**settings, **self._settings}
        )
        if self._saved is not None:
            self.sparsifier.load_state_dict(self._saved)
            self._saved = None

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
