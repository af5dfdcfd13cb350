"""Every method at every sparsity, each with the settings that suit it: the screening of docs/results.md.

    python benchmarks/all_methods.py --out results/compare-resnet20
    python benchmarks/all_methods.py --out DIR --seconds 1500         # begins nothing that would take longer
    python benchmarks/all_methods.py --out DIR --net digits_cnn --data digits --epochs 8 --seeds 2   # a check on a CPU

At 95 % zeros, methods of whole filters at 70 %, each method is trained with the weight decay of our recipes, with one
that falls with the square root of the density and in the variants below; the best on held-out images is trained at the
other sparsities too. Methods follow in the order of that accuracy, a few at a time, those of whole filters last. One
record per run, as of `gossamer compare`: the same command resumes where it was stopped.
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from gossamer.lab.batched.compare import TIERS, Comparison, compare, possible_runs
from gossamer.lab.batched.sweeps import missing_in, read_record_of
from gossamer.methods import METHODS, find

FIRST, WHOLE_FIRST = 0.95, 0.7  # of unstructured methods, of whole filters
OTHERS = (0.5, 0.7, 0.9, 0.98)
FALLING = "weight_decay_power=0.5"
SINGLE = [name for name in METHODS if name != "dense" and not find(name).structured]
WHOLE = [name for name, method in METHODS.items() if method.structured and not method.observes]
VARIANTS = {  # with FALLING
    "autoprune": (
        "mask_lr=0.001",
        "mask_lr=0.003",
        "mask_lr=0.03",
        "pruned_grad_scale=1",
        "estimator=leaky_relu",
        "two_pass=True",
    ),
    "hyperflux": ("pruned_grad_scale=1",),
    "l0": ("gate_lr=0.05", "gate_lr=0.02", "gate_lr=0.01"),
    "lottery": ("rewind=weights",),
    "str": ("rate=30", "rate=300"),
}
WHOLE_DECAY = {  # without FALLING
    "autoprune": ("mask_lr=0.003",),
    "rigl": ("fraction=0.5", "every=400", "distribution=uniform"),
    "slimming": ("penalty=0.001", "penalty=1e-05"),
}
SECONDS = 0.17  # an epoch and run of ResNet-20 on an H200, until the first comparison has shown it

Record = dict[str, Any]


def variants(method: str) -> list[str]:
    """What a method is tried with."""
    found = [f"{method}:{FALLING},{variant}" for variant in VARIANTS.get(method, ())]
    found += [f"{method}:{variant}" for variant in WHOLE_DECAY.get(method, ())]
    return [method, f"{method}:{FALLING}", *found]


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--net", default="resnet20")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=TIERS["screening"].epochs)
    parser.add_argument("--methods", nargs="+", default=SINGLE + WHOLE)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--at-a-time", type=int, default=5, help="methods; the others wait")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(options.seconds)
    base = Comparison(options.net, options.data, seeds=options.seeds, epochs=options.epochs)

    def compared(methods: list[str], *sparsity: float) -> list[Record]:
        """The records; none if there is no time for those that are missing."""
        asked = dataclasses.replace(base, methods=tuple(methods), sparsity=sparsity)
        missing = len(missing_in(options.out, possible_runs(asked)))
        if missing and not clock.has(missing, options.epochs):
            print(f"left for another time: {', '.join(methods)} at {sparsity}")
            return []
        start = time.monotonic()
        records = compare(
            asked, options.out, device=device, together=max(1, missing), progress=lambda line: print(line, flush=True)
        )
        if missing:
            clock.learn(missing, options.epochs, time.monotonic() - start)
        return records

    def held_out(variant: str, sparsity: float) -> float:
        """The mean accuracy of a variant on held-out images, in percent."""
        runs = possible_runs(dataclasses.replace(base, methods=(variant,), sparsity=(sparsity,)))
        mean = 100 * statistics.mean(read_record_of(run, options.out)["validation_accuracy"] for run in runs)
        print(f"{variant}: {mean:.2f} held out", flush=True)
        return mean

    def best_of(methods: list[str], sparsity: float) -> list[str] | None:
        """Each method with the settings that suit it, the best method first; nothing if there is no time."""
        tried = {name: variants(name) for name in methods}
        if not compared(["dense", *(variant for own in tried.values() for variant in own)], sparsity):
            return None
        found = {variant: held_out(variant, sparsity) for own in tried.values() for variant in own}
        best = [max(own, key=found.__getitem__) for own in tried.values()]  # of equal ones the nearest to the defaults
        chosen = sorted(best, key=found.__getitem__, reverse=True)
        print("chosen:", *chosen, flush=True)
        return chosen

    single, whole = ([name for name in options.methods if name in kind] for kind in (SINGLE, WHOLE))
    every, chosen, done = sorted({*OTHERS, FIRST}), [], []
    for methods, first in ((single, FIRST), (whole, WHOLE_FIRST)):
        if not methods:
            continue
        suited = best_of(methods, first)
        if suited is None:
            return
        others = [sparsity for sparsity in every if sparsity != first]
        groups = [suited[begin : begin + options.at_a_time] for begin in range(0, len(suited), options.at_a_time)]
        done += [bool(compared(group, *others)) for group in groups]
        chosen += suited
    if all(done):  # the table and the plot of all
        compared(["dense", *chosen], *every)


if __name__ == "__main__":
    main()
