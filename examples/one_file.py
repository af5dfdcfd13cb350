"""A sparse network in one file: model, optimizer, sparsifier, an ordinary loop, a report.

    python examples/one_file.py

Trains the same small convolutional network twice on scikit-learn's digits, dense and with 95 % of its weights
pruned while it trains, then saves the sparse one and loads it back into a plain model.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images (8 × 8, scaled to 0…1) with their labels."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]
    return images[train], labels[train], images[test], labels[test]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    model.train()
    return 100 * right.item()


def train(sparsity: float, epochs: int, batch_size: int = 32) -> nn.Module:
    """An ordinary training loop; the two lines that make the network sparse are marked."""
    images, labels, _, _ = digits()
    steps = len(images) // batch_size
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * epochs)
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=sparsity, total_steps=steps * epochs)  # <-- 1
    for _ in range(epochs):
        for batch in torch.randperm(len(images))[: steps * batch_size].split(batch_size):
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    sparsifier.finish()  # <-- 2: the hooks are gone, the model is plain and exactly as sparse as asked
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)
    _, _, images, labels = digits()

    dense = train(0.0, epochs)
    sparse = train(0.95, epochs)
    print(f"dense      {accuracy(dense, images, labels):.2f} %")
    print(f"95 % zeros {accuracy(sparse, images, labels):.2f} %")
    print(gossamer.report(sparse, images[:1]))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sparse.safetensors"
        save_file(sparse.state_dict(), path)
        loaded = network()  # a plain model: gossamer is not needed to load or run it
        loaded.load_state_dict(load_file(path))
    print(gossamer.verify(sparse, loaded, images))


if __name__ == "__main__":
    main()
