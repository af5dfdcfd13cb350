"""Settings that runs side by side cannot have: the small race of peers_small.py, each run in a plain loop by itself.

    python benchmarks/plain_loop.py --settings scale=global scale=per_sample,mask_lr=0.03 --sparsity 0.95 --seeds 3

`--settings` are those of `gossamer.Sparsifier`, several with commas between them. Network, images, epochs and learning
rate (a cosine from 0.1, momentum 0.9, weight decay 1e-4, batches of 64) are those of peers_small.py; batches come in
another order. One JSON record a run; runs that have one are not trained again.
"""

import argparse
import json
import math
import statistics
import time
from typing import Any

import torch
from peers_small import NETWORKS, file_name, parser_of, prepare
from torch import nn
from torch.nn import functional

import gossamer
from gossamer import Sparsifier
from gossamer.lab.data.batches import Batches
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.training.result import write_json
from gossamer.lab.training.values import guess
from gossamer.provenance import commit

RATE, BATCH = 0.1, 64


def train(network: nn.Module, images: ImageSet, sparsity: float, seed: int, epochs: int, **settings: object) -> float:
    """Train in place; returns the mean loss of the last epoch."""
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)
    batches = Batches.training(images, BATCH, seed=seed)
    steps = epochs * len(batches)
    sparsifier = Sparsifier(network, optimizer, total_steps=steps, sparsity=sparsity, **settings)
    step = 0
    for _ in range(epochs):
        losses = []
        for x, y in batches:
            optimizer.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * step / steps)) / 2
            loss = functional.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
    sparsifier.finish()
    return statistics.mean(losses)


@torch.no_grad()
def accuracy(network: nn.Module, images: ImageSet) -> float:
    network.eval()
    batches = Batches.evaluation(images, images.test, 500)
    return 100 * sum(int((network(x).argmax(1) == y).sum()) for x, y in batches) / len(images.test)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "results/peers-small/plain-loop")
    parser.add_argument("--settings", nargs="+", default=["scale=global"])
    told = parser.parse_args(arguments)
    images = prepare(told.out, told.images)
    for text in told.settings:
        settings = {name: guess(value) for name, _, value in (each.partition("=") for each in text.split(","))}
        for sparsity in told.sparsity:
            found = [run(told, text, settings, sparsity, seed, images) for seed in range(told.seeds)]
            means = [statistics.mean(record[key] for record in found) for key in ("accuracy", "train_loss")]
            spread = statistics.pstdev(record["accuracy"] for record in found)
            print(f"{text} at {sparsity:g}: {means[0]:.2f} ± {spread:.2f}, loss {means[1]:.3f}", flush=True)


def run(
    told: argparse.Namespace, text: str, settings: dict[str, Any], sparsity: float, seed: int, images: ImageSet
) -> dict[str, Any]:
    """The record of a run, which is trained if it has none."""
    path = told.out / file_name(text, sparsity, told.epochs, seed)
    if not path.exists():
        name, make_network = NETWORKS[told.net]
        torch.manual_seed(seed)
        network, start = make_network(), time.perf_counter()
        loss = train(network, images, sparsity, seed, told.epochs, **settings)
        record = {
            "net": name,
            "data": images.name,
            "images": len(images.train),
            "accuracy_on": f"{len(images.test)} images held out of the training set",
            "settings": settings,
            "asked_sparsity": sparsity,
            "sparsity": gossamer.report(network).sparsity,
            "seed": seed,
            "epochs": told.epochs,
            "accuracy": accuracy(network, images),
            "train_loss": loss,
            "seconds": time.perf_counter() - start,
            "torch": torch.__version__,
            "commit": commit(),
        }
        write_json(path, record)
    return json.loads(path.read_text())  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
