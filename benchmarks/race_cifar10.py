"""ResNet-20 on CIFAR-10, many runs side by side on one GPU: a screening of settings, then longer runs of the best.

    python benchmarks/race_cifar10.py --out results/race-resnet20 [--stage screening final]

Settings are chosen on 5,000 images held out of the training set; the test set is looked at once a run, at the last
epoch. One JSON record a run.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gossamer.lab import data, models
from gossamer.lab.batched import Member, Outcome, Race, run_race
from gossamer.lab.batched.compare import record
from gossamer.lab.data.sets import ImageSet
from gossamer.lab.training.result import write_json
from gossamer.methods import find

SEEDS = (0, 1, 2)
SCREENING = Race(warmup=12, sparsify=18, stabilise=8, finetune=12)
FINAL = Race(warmup=50, sparsify=70, stabilise=30, finetune=50)

CANDIDATES = {
    "dense": {"method": "dense"},
    "dense wd": {"method": "dense", "weight_decay": 5e-4},
    "magnitude": {"method": "magnitude"},
    "magnitude wd": {"method": "magnitude", "weight_decay": 5e-4},
    "scl .003": {"mask_lr": 0.003},
    "scl .01": {"mask_lr": 0.01},
    "scl .03": {"mask_lr": 0.03},
    "scl .1": {"mask_lr": 0.1},
    "scl raw": {"mask_lr": 30.0, "global_power": 0.0},
    "scl feature half": {"mask_lr": 0.3, "global_power": 0.0, "feature_power": 0.5},
    "scl .01 wd": {"mask_lr": 0.01, "weight_decay": 5e-4},
}


def members(options: Sequence[dict[str, object]], **common: object) -> list[Member]:
    return [Member.of(**{**each, **common, "seed": seed}) for each in options for seed in SEEDS]  # type: ignore[arg-type]


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def write_records(
    runs: list[Member], outcomes: list[Outcome], race: Race, tier: str, seconds: float, out: Path, commit: str
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for number, (member, outcome) in enumerate(zip(runs, outcomes, strict=True)):
        about = {"tier": tier, "net": "resnet20", "data": "cifar10", "commit": commit}
        content = {**about, **record(member, outcome, race, seconds, len(outcomes))}
        write_json(out / f"{tier}-{number:03d}.json", content)


def race_and_record(
    race: Race, runs: list[Member], images: ImageSet, tier: str, out: Path, device: torch.device, commit: str
) -> None:
    start = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    say(f"{tier}: {len(runs)} runs of {race.epochs} epochs")
    outcomes = run_race(race, runs, images, lambda: models.create("resnet20"), device=device, dtype=dtype, progress=say)
    write_records(runs, outcomes, race, tier, time.perf_counter() - start, out, commit)
    for first in range(0, len(outcomes), len(SEEDS)):
        group = outcomes[first : first + len(SEEDS)]
        test = [outcome.accuracy for outcome in group]
        held_out = [outcome.validation_accuracy or 0.0 for outcome in group]
        loss = statistics.mean(outcome.train_loss for outcome in group)
        options = {key: value for key, value in runs[first].to_dict().items() if key != "seed"}
        say(
            f"  test {statistics.mean(test):.2f} ± {statistics.pstdev(test):.2f} "
            f"validation {statistics.mean(held_out):.2f} loss {loss:.4f} sparsity {group[0].sparsity:.4f} {options}"
        )


def chosen_before(out: Path, method: str) -> dict[str, object]:
    """The best settings of a screening whose records are in `out`."""
    records = [json.loads(path.read_text()) for path in sorted(out.glob("screening-*.json"))]
    groups: dict[str, list[float]] = {}
    for each in records:
        if find(each["method"]).name == find(method).name:
            own = [field.name for field in dataclasses.fields(find(method).options)]
            known = ["method", "sparsity", "weight_decay", *own]
            options = {key: value for key, value in each["settings"].items() if key in known}
            groups.setdefault(json.dumps(options), []).append(each["validation_accuracy"])
    return json.loads(max(groups, key=lambda key: statistics.mean(groups[key])))  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", nargs="+", default=["screening", "final", "phases"])
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.95, 0.98])
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that everything works")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    images = data.load("cifar10")
    screening, final = SCREENING, FINAL
    if arguments.tiny:
        few = dataclasses.replace(images.train, images=images.train.images[:256], labels=images.train.labels[:256])
        images = dataclasses.replace(images, train=few, test=few)
        screening = final = Race(warmup=1, sparsify=1, stabilise=1, finetune=1)
    split = images.split(64 if arguments.tiny else 5000)
    common = {"out": arguments.out, "device": device, "commit": arguments.commit}
    chosen = {"scl": {"mask_lr": 0.01}, "magnitude": {"method": "magnitude"}, "dense": {"method": "dense"}}
    if "screening" in arguments.stage:
        candidates = list(CANDIDATES.values())[:: 5 if arguments.tiny else 1]
        runs = members(candidates)
        race_and_record(screening, runs, split, "screening", **common)
        chosen |= {method: chosen_before(arguments.out, method) for method in {member.method for member in runs}}
    if "final" in arguments.stage:
        if "screening" not in arguments.stage:
            chosen = {method: chosen_before(arguments.out, method) for method in chosen}
        say(f"chosen on validation: {chosen}")
        runs = [member for sparsity in arguments.sparsity for member in members([chosen["scl"]], sparsity=sparsity)]
        runs += members([chosen["magnitude"]], sparsity=0.95)
        race_and_record(final, runs + members([chosen["dense"]]), images, "final", **common)
    if "phases" in arguments.stage:
        options = [chosen["scl"], chosen["magnitude"]]
        for name, race in {
            "long-masks": dataclasses.replace(screening, warmup=8, sparsify=26, stabilise=8, finetune=8),
            "staged": dataclasses.replace(screening, schedule="staged"),
        }.items():
            race_and_record(race, members(options), split, f"phases-{name}", **common)


if __name__ == "__main__":
    main()
