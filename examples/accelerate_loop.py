"""accelerate: the Sparsifier is created before or after `prepare`, and is saved with the rest of the state.

pip install "gossamer[integrations,demo]"
accelerate launch --cpu --num-processes 2 examples/accelerate_loop.py
"""

import argparse
import math
import tempfile

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gossamer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long())
    train, test = torch.utils.data.random_split(data, [1440, 357], torch.Generator().manual_seed(0))

    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(train, 16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = math.ceil(len(loader) / 2) * epochs  # after prepare: the batches of this process; two of them make a step
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.95, total_steps=steps)
    accelerator.register_for_checkpointing(sparsifier)  # save_state and load_state include the masks
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
    sparsifier.finish()
    if accelerator.is_main_process:
        x, y = next(iter(DataLoader(test, 357)))
        plain = accelerator.unwrap_model(model).cpu().eval()
        print(f"accuracy {(plain(x).argmax(1) == y).float().mean():.4f}")
        print(gossamer.report(plain))
    accelerator.end_training()


if __name__ == "__main__":
    main()
