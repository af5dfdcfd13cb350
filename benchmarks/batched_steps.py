"""Seconds per epoch and run, for many runs of a network trained in one batch on one GPU (random images of CIFAR's or
MNIST's size and number, whichever the network is for).

python benchmarks/batched_steps.py --runs 1 16 32 --steps 300
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from gossamer.lab import models
from gossamer.lab.batched.supported import batched_run
from gossamer.lab.batched.training import BatchedTraining
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.training.run import Run
from gossamer.provenance import commit
from gossamer.schedule import Phase

IMAGES = {"cifar10": 50_000, "mnist": 60_000}


def steps_an_epoch(name: str) -> int:
    return IMAGES[models.entry(name).data] // Run.batch_size


def random_images(name: str) -> ImageSet:
    entry = models.entry(name)
    count, shape, augmented = IMAGES[entry.data], entry.input_shape, entry.data == "cifar10"
    images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8)
    part, middle = Labelled(images, torch.randint(0, 10, (count,))), (0.5,) * shape[0]
    return ImageSet("random", part, part, tuple("abcdefghij"), middle, middle, padding=4 * augmented, flip=augmented)


def seconds_a_step(name: str, runs: int, steps: int, phase: Phase, device: torch.device) -> tuple[float, float]:
    data = random_images(name)
    torch.manual_seed(0)
    base = Run(model=name, epochs=4)
    if phase is not Phase.WARMUP:
        phases = {"warmup": "1ep", "sparsify": "2ep", "stabilise": "0ep"}
        base = replace(base, method="scl", sparsity=0.95, settings=phases)
    # All different, as dense runs that are the same would share a row.
    all_runs = [replace(base, seed=number % 3, weight_decay=1e-4 * (1 + number / 1000)) for number in range(runs)]
    steps_per_epoch = len(data.train) // base.batch_size
    batched = [batched_run(run, steps_per_epoch) for run in all_runs]
    training = BatchedTraining(batched, data, lambda: models.create(name), device=device, dtype=torch.bfloat16)
    training.arrange_rows(steps_per_epoch)
    training.loader.begin_epoch(0)
    step = training.captured
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps, torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="file for the figures, such as results/batched/h200.json")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    torch.backends.cudnn.benchmark = True
    rows = []
    for runs in arguments.runs:
        torch.cuda.reset_peak_memory_stats()
        dense, _ = seconds_a_step(arguments.network, runs, arguments.steps, Phase.WARMUP, device)
        sparse, memory = seconds_a_step(arguments.network, runs, arguments.steps, Phase.SPARSIFY, device)
        epoch = steps_an_epoch(arguments.network)
        each = {"dense_epoch_s": dense * epoch / runs, "sparse_epoch_s": sparse * epoch / runs}
        row = {"runs": runs, "dense_ms": 1e3 * dense, "sparse_ms": 1e3 * sparse, **each, "peak_gib": memory}
        rows.append({name: round(value, 4) for name, value in row.items()})
        print(arguments.network, rows[-1], flush=True)
    if arguments.out:
        about = {"network": arguments.network, "hardware": torch.cuda.get_device_name(), "torch": torch.__version__}
        told = (
            f"python benchmarks/batched_steps.py --runs {' '.join(map(str, arguments.runs))} --steps {arguments.steps}"
        )
        record = {**about, "command": told, "commit": commit(), "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
