"""Lightning: one callback makes the model of a fit sparse, next to the callbacks that you use already.

pip install "gossamer[integrations,demo]"
python examples/lightning_fit.py --epochs 20
"""

import argparse
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.integrations.lightning import SparsifierCallback


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long())
    train, test = torch.utils.data.random_split(data, [1440, 357], torch.Generator().manual_seed(0))
    model = Digits()
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(monitor="accuracy", mode="max")  # among the epochs with their final masks
        callbacks = [SparsifierCallback(sparsity=0.95), EMAWeightAveraging(decay=0.98), best]
        logger = CSVLogger(folder)  # also gets sparsifier/sparsity, sparsifier/flips and the other metrics
        trainer = Trainer(max_epochs=parser.parse_args().epochs, accelerator="cpu", logger=logger, callbacks=callbacks)
        trainer.fit(model, DataLoader(train, 32, shuffle=True), DataLoader(test, 357))
        trainer.validate(model, DataLoader(test, 357))
    print(gossamer.report(model))
    print(f"best checkpoint: accuracy {best.best_model_score:.4f}")


if __name__ == "__main__":
    main()
