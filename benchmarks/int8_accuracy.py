"""What int8 costs: the accuracy of sparse networks on MNIST, in float32 and in int8.

    python benchmarks/int8_accuracy.py --data DIR --out results/speed-int8/accuracy.json

Each network is trained for a few epochs with blocks of 1x4 zeros, deployed with 256 training images for calibration,
and tested on all test images. Every layer that can run in int8 does, whether or not it is faster.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import gossamer
from gossamer.deployment.runtime import NativeModel, Setting, compile_plan
from gossamer.deployment.runtime.plan import choices
from gossamer.deployment.runtime.quantise import calibrated
from gossamer.lab.data.idx import MNIST, load_idx
from gossamer.provenance import commit, cpu_name, versions

BATCH, CALIBRATION = 100, 256


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def convolutional() -> nn.Module:
    features = [nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)]
    features += [nn.Conv2d(32, 64, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(64, 10))


NETWORKS = {"MLP 784-300-100-10": mlp, "3 convolutions": convolutional}


def train(model: nn.Module, images: Tensor, labels: Tensor, sparsity: float, epochs: int, seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=sparsity, pattern="block:1x4", total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images), generator=generator).split(BATCH):
            if len(chosen) < BATCH:
                continue
            optimizer.zero_grad()
            functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    sparsifier.finish()


def in_int8(model: nn.Module, calibration: Tensor) -> tuple[NativeModel, int]:
    """The network with every possible layer in int8, and how many those are."""
    native = compile_plan(model, calibration[:1])
    graph = calibrated(native, [calibration])
    possible = choices(graph, 16)
    given = tuple((number, kernel) for number, each in possible.items() for kernel in each if kernel == "int8")
    return NativeModel(graph, native.native, Setting(16, 1, given)), len(given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with MNIST")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.75, 0.9, 0.95])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    data = load_idx(MNIST, arguments.data)
    images, test = (part.images.float() / 255 - 0.13 for part in (data.train, data.test))
    rows = []
    for name, make in NETWORKS.items():
        for sparsity in arguments.sparsity:
            for seed in range(arguments.seeds):
                torch.manual_seed(seed)
                model, start = make(), time.perf_counter()
                train(model, images, data.train.labels, sparsity, arguments.epochs, seed)
                fast, layers = in_int8(model.eval(), images[:CALIBRATION])
                with torch.no_grad():
                    outputs = {"float32": model(test), "int8": fast(test)}
                row = {"network": name, "sparsity": sparsity, "seed": seed, "int8_layers": layers}
                for kind, found in outputs.items():
                    row[kind] = float((found.argmax(1) == data.test.labels).double().mean())
                row["same"] = float((outputs["float32"].argmax(1) == outputs["int8"].argmax(1)).double().mean())
                row["seconds"] = round(time.perf_counter() - start, 1)
                rows.append(row)
                print(row)
    about = {"command": "python benchmarks/int8_accuracy.py --data DIR --out results/speed-int8/accuracy.json"}
    about |= {"commit": commit(), "cpu": cpu_name(), "versions": versions(), "epochs": arguments.epochs}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
