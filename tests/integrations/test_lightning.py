"""The callback in real fits of Lightning."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gossamer.integrations.lightning import SparsifierCallback
from gossamer.schedule import Phase

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the trainer; ours are looked for by name
EPOCHS, BATCHES = 8, 6
WEIGHTS = 10 * 24 + 24 * 4
EXACT = int(0.9 * WEIGHTS + 0.5)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[0][:, :4])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", F.mse_loss(self.net(batch[0]), batch[0][:, :4]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(16 * BATCHES, 10, generator=generator)), batch_size=16)


def zeros(model: nn.Module) -> int:
    return sum(int((each == 0).sum()) for name, each in model.named_parameters() if "weight" in name)


def fit(folder: Path, callbacks: list[Any], *, model: Net | None = None, ckpt: Any = None, **options: Any) -> Net:
    seed_everything(0, verbose=False)
    model = Net() if model is None else model
    settings: dict[str, Any] = {
        "max_epochs": EPOCHS, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder,
    }  # fmt: skip
    Trainer(callbacks=callbacks, **{**settings, **options}).fit(model, data(), data(), ckpt_path=ckpt)
    return model


def test_a_fit_ends_at_the_target(tmp_path: Path) -> None:
    callback = SparsifierCallback(sparsity=0.9)
    model = fit(tmp_path, [callback])
    assert zeros(model) == EXACT
    assert callback.sparsifier is not None
    assert callback.sparsifier.plan.total == EPOCHS * BATCHES
    assert callback.sparsifier.phase is Phase.FINISHED


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"max_epochs": -1, "max_steps": 30},
    ],
    ids=str,
)
def test_options_of_the_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    callback = SparsifierCallback(sparsity=0.9)
    assert zeros(fit(tmp_path, [callback], **options)) == EXACT
    expected = {"accumulate_grad_batches": EPOCHS * BATCHES // 2, "max_epochs": 30}
    assert callback.sparsifier is not None
    assert callback.sparsifier.step == expected.get(next(iter(options)), EPOCHS * BATCHES)


@pytest.mark.parametrize("first", [True, False], ids=["ours first", "ours last"])
@pytest.mark.parametrize(
    "average",
    [
        lambda: EMAWeightAveraging(decay=0.9),
        WeightAveraging,
        lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2),
    ],
    ids=["EMA", "mean", "SWA"],
)
def test_averages_are_as_sparse_in_any_order(tmp_path: Path, average: Any, first: bool) -> None:
    callback = SparsifierCallback(sparsity=0.9)
    others = [average()]
    model = fit(tmp_path, [callback, *others] if first else [*others, callback])
    assert zeros(model) == EXACT
    assert callback.sparsifier is not None
    for name, mask in callback.sparsifier.masks.items():
        assert not bool(model.get_parameter(name)[~mask].any())


def test_a_fit_that_is_resumed_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole = fit(tmp_path / "a", [SparsifierCallback(sparsity=0.9)])
    keeper = ModelCheckpoint(tmp_path / "b", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    fit(tmp_path / "b", [SparsifierCallback(sparsity=0.9), keeper], enable_checkpointing=True)
    for epoch in (1, 3, 6):
        model = Net()
        with torch.no_grad():
            model.net[0].weight.zero_()  # all comes from the checkpoint
        checkpoint = tmp_path / "b" / f"epoch={epoch}.ckpt"
        fit(tmp_path / "c", [SparsifierCallback(sparsity=0.9)], model=model, ckpt=checkpoint)
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(ours, theirs), epoch


def test_a_checkpoint_without_the_state_of_the_sparsifier_is_refused(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, filename="{epoch}")
    fit(tmp_path, [keeper], enable_checkpointing=True, max_epochs=4)
    with pytest.raises(
        ValueError, match=r"expected the state of the Sparsifier in .*epoch=3.ckpt, to resume at step 24"
    ):
        fit(tmp_path, [SparsifierCallback(sparsity=0.9)], ckpt=tmp_path / "epoch=3.ckpt")


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_checkpoint_is_one_with_its_final_masks(tmp_path: Path, mode: str) -> None:
    """Early epochs, of the dense network, would be the best ones: the metric says so by force."""
    sign = {"min": 1.0, "max": -1.0}[mode]

    class Scored(Net):
        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log("score", sign * (1.0 + self.global_step))

    callback = SparsifierCallback(sparsity=0.9)
    best = ModelCheckpoint(tmp_path, monitor="score", mode=mode, filename="{epoch}")
    fit(tmp_path, [callback, best], model=Scored(), enable_checkpointing=True)
    assert best.best_model_path.endswith("epoch=6.ckpt")  # the first epoch that ends after 36 of the 48 steps
    state = torch.load(best.best_model_path, weights_only=False)["state_dict"]
    assert sum(int((each == 0).sum()) for name, each in state.items() if "weight" in name) == EXACT


@pytest.mark.parametrize("mode", ["min", "max"])
def test_early_stopping_waits_for_the_final_masks(tmp_path: Path, mode: str) -> None:
    callback = SparsifierCallback(sparsity=0.9)
    stop = EarlyStopping("val", patience=1, min_delta=10.0, mode=mode)
    model = fit(tmp_path, [callback, stop], max_epochs=16)
    assert zeros(model) == EXACT
    assert callback.sparsifier is not None
    plan = callback.sparsifier.plan
    assert plan.total - plan.finetune < callback.sparsifier.step < plan.total


def test_a_fit_that_is_stopped_early_still_ends_at_the_target(tmp_path: Path) -> None:
    callback = SparsifierCallback(sparsity=0.9)
    stop = EarlyStopping("val", stopping_threshold=100.0)
    with pytest.warns(UserWarning, match=r"finish\(\) after 6 of 48 steps"):
        model = fit(tmp_path, [callback, stop])
    assert zeros(model) == EXACT


class Interrupt(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 20:
            raise RuntimeError("stop here")


def test_a_fit_after_an_interrupted_one_starts_again(tmp_path: Path) -> None:
    callback, model = SparsifierCallback(sparsity=0.9), Net()
    with pytest.raises(RuntimeError, match="stop here"):
        fit(tmp_path, [callback, Interrupt()], model=model)
    with pytest.warns(UserWarning, match=r"the model is \d+\.\d% sparse already"):
        fit(tmp_path, [callback], model=model)
    assert zeros(model) == EXACT


class ByHand(Net):
    """Manual optimization with two optimizers, one of which has no weights to prune."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        matrices = [each for each in self.parameters() if each.ndim == 2]
        biases = [each for each in self.parameters() if each.ndim == 1]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(biases, lr=0.01)]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(super().training_step(batch, index))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization_with_muon_and_adamw(tmp_path: Path) -> None:
    callback = SparsifierCallback(sparsity=0.9, total_steps=EPOCHS * BATCHES)
    assert zeros(fit(tmp_path, [callback], model=ByHand())) == EXACT
    assert callback.sparsifier is not None
    assert callback.sparsifier.step == EPOCHS * BATCHES


class ScheduleFree(Net):
    """Switches the modes of its optimizer as the documentation of schedulefree tells users to."""

    def configure_optimizers(self) -> Any:
        package = pytest.importorskip("schedulefree", reason="pip install schedulefree")
        return package.AdamWScheduleFree(self.parameters(), lr=0.02)

    def _switch(self, mode: str) -> None:
        for optimizer in self.trainer.optimizers:
            getattr(optimizer, mode)()

    def on_train_epoch_start(self) -> None:
        self._switch("train")

    def on_train_epoch_end(self) -> None:
        self._switch("eval")

    def on_validation_start(self) -> None:
        self._switch("eval")

    def on_validation_end(self) -> None:
        self._switch("train")


def test_a_schedule_free_optimizer(tmp_path: Path) -> None:
    callback = SparsifierCallback(sparsity=0.9)
    assert zeros(fit(tmp_path, [callback], model=ScheduleFree())) == EXACT


def test_a_dry_run_passes(tmp_path: Path) -> None:
    fit(tmp_path, [SparsifierCallback(sparsity=0.9)], fast_dev_run=True)


def test_a_trainer_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a trainer that knows its number of steps"):
        fit(tmp_path, [SparsifierCallback(sparsity=0.9)], max_epochs=-1, max_time="00:00:00:01")


def test_metrics_are_logged(tmp_path: Path) -> None:
    fit(tmp_path, [SparsifierCallback(sparsity=0.9)], logger=CSVLogger(tmp_path), log_every_n_steps=4)
    (table,) = tmp_path.rglob("metrics.csv")
    lines = [line.split(",") for line in table.read_text().splitlines()]
    column = lines[0].index("sparsifier/sparsity")
    found = [float(line[column]) for line in lines[1:] if line[column]]
    assert found[0] == 0.0
    assert found[-1] == pytest.approx(EXACT / WEIGHTS)
    assert len(found) >= 10


def test_the_callback_can_be_used_for_another_fit(tmp_path: Path) -> None:
    callback = SparsifierCallback(sparsity=0.9)
    first, second = fit(tmp_path, [callback]), fit(tmp_path, [callback])
    assert zeros(first) == zeros(second) == EXACT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(callback.sparsifier)
