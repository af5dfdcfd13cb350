"""Every method at every sparsity, each with the weight decay that suits it better: the screening of docs/results.md.

    python benchmarks/all_methods.py --out results/race-resnet20
    python benchmarks/all_methods.py --out DIR --seconds 1500         # begins nothing that would take longer
    python benchmarks/all_methods.py --out DIR --net digits_cnn --data digits --epochs 8 --seeds 2   # a check on a CPU

At 95 % zeros each method is trained with the weight decay of our recipes and with one that falls with the square root
of the connections that are left; the better one on held-out images it has at the other sparsities too. Methods go on in
the order of that accuracy, a few at a time, those of whole filters (with the whole weight decay) last. One record a
run, as of `gossamer compare`: the same command goes on where it was stopped.
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from gossamer.methods import METHODS, find
from gossamer.side_by_side.compare import TIERS, Comparison, compare, paths_of
from gossamer.training.result import commit

FIRST = 0.95
OTHERS = (0.5, 0.7, 0.9, 0.98)
FALLING = "weight_decay_power=0.5"
SINGLE = [name for name in METHODS if name != "dense" and not find(name).structured]
WHOLE = [name for name in METHODS if find(name).structured]
SECONDS = 0.17  # an epoch and run of ResNet-20 on an H200, until the first race has told

Record = dict[str, Any]


def better_decay(records: list[Record]) -> list[str]:
    """Each method as it is entered at the other sparsities, the best on held-out images first."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in records:
        if record["method"] in SINGLE:
            falls = bool(record["settings"].get("weight_decay_power"))
            held_out = found.setdefault(record["method"], {}).setdefault(FALLING if falls else "", [])
            held_out.append(record["validation_accuracy"])
    means = {method: {each: statistics.mean(of) for each, of in both.items()} for method, both in found.items()}
    for method, both in means.items():
        print(f"{method}: held out {both.get('', 0):.2f}, {FALLING} {both.get(FALLING, 0):.2f}", flush=True)
    order = sorted(means, key=lambda method: -max(means[method].values()))
    return [f"{method}:{max(means[method], key=means[method].__getitem__)}".rstrip(":") for method in order]


class Clock:
    """Knows what a run takes, and what is left."""

    def __init__(self, seconds: float) -> None:
        self._end, self._each = time.monotonic() + seconds, SECONDS

    def has(self, runs: int, epochs: int) -> bool:
        needed, left = runs * epochs * self._each, self._end - time.monotonic()
        print(f"{runs} runs would take {needed:.0f} s of {left:.0f} s", flush=True)
        return needed < left

    def learn(self, runs: int, epochs: int, took: float) -> None:
        self._each = took / (runs * epochs)
        print(f"{runs} runs of {epochs} epochs took {took:.0f} s, {self._each:.3f} s each and epoch", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--net", default="resnet20")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=TIERS["screening"].epochs)
    parser.add_argument("--methods", nargs="+", default=SINGLE + WHOLE)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--at-a-time", type=int, default=5, help="methods; the others wait")
    parser.add_argument("--commit", help="where it is not that of a checkout")
    told = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(told.seconds)
    base = Comparison(
        told.net, told.data, seeds=told.seeds, epochs=told.epochs, commit=told.commit or commit() or "unknown"
    )

    def raced(methods: list[str], *sparsity: float) -> list[Record]:
        """The records; none where there is no time for those that are missing."""
        asked = dataclasses.replace(base, methods=tuple(methods), sparsity=sparsity)
        missing = sum(not path.exists() for path in paths_of(asked, told.out).values())
        if missing and not clock.has(missing, told.epochs):
            print(f"left for another time: {', '.join(methods)} at {sparsity}")
            return []
        start = time.monotonic()
        records = compare(
            asked, told.out, device=device, together=max(1, missing), progress=lambda line: print(line, flush=True)
        )
        if missing:
            clock.learn(missing, told.epochs, time.monotonic() - start)
        return records

    single, whole = ([name for name in told.methods if name in kind] for kind in (SINGLE, WHOLE))
    first = raced(["dense", *single, *(f"{name}:{FALLING}" for name in single)], FIRST)
    if not first:
        return
    chosen = better_decay(first)
    groups = [chosen[begin : begin + told.at_a_time] for begin in range(0, len(chosen), told.at_a_time)]
    done = [bool(raced(group, *OTHERS)) for group in groups]
    every = sorted({*OTHERS, FIRST})
    if whole:
        done.append(bool(raced(whole, *every)))
    if all(done):  # the table and the plot of all
        raced(["dense", *chosen, *whole], *every)


if __name__ == "__main__":
    main()
