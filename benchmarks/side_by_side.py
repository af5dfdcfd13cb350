"""Seconds an epoch and a run, for many ResNet-20 runs trained side by side on one GPU (random images, CIFAR's sizes).

python benchmarks/side_by_side.py --runs 1 16 32 --steps 300
"""

import argparse
import time

import torch

from gossamer import models
from gossamer.data.sets import ImageSet, Labelled
from gossamer.schedule import Phase, Plan
from gossamer.side_by_side import Member, Race
from gossamer.side_by_side.capture import Captured
from gossamer.side_by_side.feed import Feed
from gossamer.side_by_side.learner import StackedLearner
from gossamer.side_by_side.race import _columns, _step, _tables
from gossamer.side_by_side.stack import NetworkStack


def random_images(count: int) -> ImageSet:
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
    part = Labelled(images, torch.randint(0, 10, (count,)))
    return ImageSet("random", part, part, tuple("abcdefghij"), (0.5,) * 3, (0.25,) * 3, padding=4, flip=True)


def seconds_a_step(name: str, runs: int, steps: int, phase: Phase, device: torch.device) -> tuple[float, float]:
    data = random_images(50_000)
    torch.manual_seed(0)
    members = [Member(seed=run % 3) for run in range(runs)]
    stack = NetworkStack([models.create(name) for _ in members], device=device, dtype=torch.bfloat16)
    feed = Feed(data, [0, 1, 2], 64, device=device, dtype=torch.bfloat16)
    feed.begin_epoch(0)
    race = Race(warmup=1, sparsify=2, stabilise=0, finetune=1)
    plan = Plan(*(epochs * feed.steps for epochs in (1, 2, 0, 1)))
    learner = StackedLearner(stack, _columns(members, device), momentum=0.9, floor=0.001)
    learner.begin_masks()
    tables = _tables(race, plan, members, stack, feed.steps)
    which = torch.tensor([member.seed for member in members], device=device)
    losses = torch.zeros(runs, device=device)
    step = Captured(_step(phase, learner, feed, tables, which, losses, race), device)
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
    arguments = parser.parse_args()
    device = torch.device("cuda")
    torch.backends.cudnn.benchmark = True
    for runs in arguments.runs:
        torch.cuda.reset_peak_memory_stats()
        dense, _ = seconds_a_step(arguments.network, runs, arguments.steps, Phase.WARMUP, device)
        sparse, memory = seconds_a_step(arguments.network, runs, arguments.steps, Phase.SPARSIFY, device)
        epoch = 781
        print(
            f"{arguments.network} × {runs}: "
            f"dense {dense * 1e3:.2f} ms a step, {dense * epoch / runs:.3f} s an epoch and run; "
            f"sparse {sparse * 1e3:.2f} ms, {sparse * epoch / runs:.3f} s (sparsifier {1 - dense / sparse:.0%}); "
            f"peak {memory:.1f} GiB"
        )


if __name__ == "__main__":
    main()
