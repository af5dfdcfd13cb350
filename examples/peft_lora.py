"""PEFT: adapt a sparse model with LoRA, and merge the adapters without losing its zeros.

pip install "gossamer[integrations,demo]"
python examples/peft_lora.py --epochs 20
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer
from gossamer.integrations.peft import merge


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, epochs: int) -> None:
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> str:
    return f"{100 * (model(x).argmax(1) == y).float().mean():.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs
    images, labels = load_digits(return_X_y=True)
    x, digit = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
    odd, large = digit % 2, (digit > 4).long()  # the task of the base, and that of the adapters
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(base.parameters(), lr=2e-3)
    with gossamer.Sparsifier(base, optimizer, sparsity=0.9, total_steps=45 * epochs):
        train(base, optimizer, x[:1440], odd[:1440], epochs)
    print("sparse base, even or odd     ", accuracy(base, x[1440:], odd[1440:]))

    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["0", "2", "4"]))  # freezes the base
    adapters = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=2e-3)
    train(model, adapters, x[:1440], large[:1440], epochs)
    print("with adapters, small or large", accuracy(model, x[1440:], large[1440:]))
    merged = merge(model)  # merge_and_unload(), under the masks of the base
    print("lost, as share of the change ", {name: round(share, 2) for name, share in merged.lost.items()})
    print("merged                       ", accuracy(merged.model, x[1440:], large[1440:]))
    optimizer = torch.optim.AdamW(merged.model.requires_grad_(True).parameters(), lr=1e-3)
    with gossamer.keep_zeros(merged.model, optimizer):
        train(merged.model, optimizer, x[:1440], large[:1440], max(1, epochs // 5))
    print("trained on, under the masks  ", accuracy(merged.model, x[1440:], large[1440:]))
    print(gossamer.report(merged.model))


if __name__ == "__main__":
    main()
