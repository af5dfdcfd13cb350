"""Hypotheses about learned masks, screened side by side on CIFAR-10, one changed setting each.

    python benchmarks/screen.py --stage screening --budget-seconds 1400 --chosen chosen.json
    python benchmarks/screen.py --stage final --settings chosen.json --epochs 350
    python benchmarks/screen.py --stage normalisation
    python benchmarks/screen.py --stage damping --sparsity 0.95 0.98
    python benchmarks/screen.py --stage plain --net vgg16_cifar --epochs 20
    python benchmarks/screen.py --stage decay --sparsity 0.5 0.7 0.9 0.95 --epochs 100
    python benchmarks/screen.py --stage sinking --sparsity 0.5 0.95 0.98 --epochs 60
    python benchmarks/screen.py --stage share --sparsity 0.5 0.7 0.95 0.98 --epochs 60
    python benchmarks/screen.py --stage ending --sparsity 0.7 0.95 0.98 --epochs 60
    python benchmarks/screen.py --stage whole-decay --sparsity 0.5 0.7 0.95 0.98 --epochs 60

Screening: 50 epochs, 5,000 images held out, three seeds each; the table is by accuracy on those images, with the
difference to the default in runs of the same seed (same trunk, same batches). The test accuracy is in the records and
is not looked at. Normalisation: the same for the paper's scale of mask gradients, with the exact budget and with fixed
λ1, in which the sparsity is what comes out. Damping: less gradient for removed weights, alone and with what may go with
it. Sinking: what keeps masks of noisy layers from going down in long runs. Share: of their gradient that removed
weights follow. Ending, whole decay: weight decay, anchor and phases once they follow less. Final: the chosen settings
at 50 to 98 % zeros with the dense network and two peers, on all training images. One JSON record a run; a run that has
one is not trained again, and a race that was cut short goes on.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypotheses import FORMER, HYPOTHESES, STAGES, Hypothesis
from torch import nn

from gossamer.io.sparse_file import save
from gossamer.lab import data, models
from gossamer.lab.batched import Member, Race, run_race
from gossamer.lab.batched.compare import Comparison, record
from gossamer.lab.batched.entries import teachers_of
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.training.result import write_json

VALIDATION = 5000
SECONDS = 0.17  # an epoch and run of ResNet-20 on an H200; the measured figure takes its place after the first race
SPARSITIES = (0.5, 0.7, 0.9, 0.95, 0.98)
PEER_SPARSITIES = (0.9, 0.95, 0.98)


@dataclass(frozen=True)
class Run:
    """A member with the name under which it is told, and the file of its record."""

    name: str
    member: Member
    race: Race
    path: Path


def plan_screening(hypotheses: Sequence[Hypothesis], base: Race, out: Path, *sparsities: float) -> list[Run]:
    """All runs, the ones to be tried first in front, as changes to the default from before removed weights rested."""
    found = [
        make_run(each.name, member, dataclasses.replace(base, **each.race), "hypotheses", out)
        for each in hypotheses
        for sparsity in sparsities
        if not each.sparsities or sparsity in each.sparsities
        for member in each.members(sparsity, **FORMER)
    ]
    return list({run.path: run for run in found}.values())  # dense ones are the same at all sparsities


def plan_final(chosen: dict[str, dict[str, Any]], peers: Sequence[str], race: Race, out: Path) -> list[Run]:
    """`chosen` by name: learned masks at all sparsities, other methods with settings of their own as the peers.

    Where the settings name `sparsities`, it is those."""
    chosen = {"dense": {"method": "dense"}, **chosen, **{peer: {"method": peer} for peer in peers}}
    usual = {"dense": (0.0,), "scl": SPARSITIES}
    wanted = []
    for name, told in chosen.items():
        own = {key: value for key, value in told.items() if key != "sparsities"}
        for sparsity in told.get("sparsities", usual.get(own.get("method", "scl"), PEER_SPARSITIES)):
            wanted.append((name, Hypothesis(name, own).members(sparsity)))
    return [make_run(name, member, race, "final", out) for name, members in wanted for member in members]


def make_run(name: str, member: Member, race: Race, tier: str, out: Path) -> Run:
    default = Member(member.seed, member.method).to_dict()
    default |= {key: value for key, value in FORMER.items() if key in default}  # so names stay as they were
    changed = {key: value for key, value in member.to_dict().items() if value != default.get(key) or key == "sparsity"}
    slug = "-".join("".join(letter if letter.isalnum() else " " for letter in name).split())
    shared = dataclasses.asdict(race)
    before_restarts = {key: value for key, value in shared.items() if key != "restart"}
    paths = []
    for told in (shared, before_restarts) if race.restart is None else (shared,):
        content = json.dumps([told, member.method, changed], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        paths.append(out / f"{tier}-{slug}-{digest}-s{member.seed}.json")
    return Run(name, member, race, next((path for path in paths if path.exists()), paths[0]))


def chunks(runs: Sequence[Run], together: int) -> list[list[Run]]:
    """Runs that can be trained side by side, in the order of their first ones; the seeds of one name stay together."""
    open_: dict[Race, list[Run]] = {}
    found: list[list[Run]] = []
    for run in runs:
        chunk = open_.get(run.race)
        if chunk is None or (len(chunk) >= together and chunk[-1].name != run.name):
            chunk = open_[run.race] = []
            found.append(chunk)
        chunk.append(run)
    return found


def teachers(runs: Sequence[Run]) -> list[Member]:
    """Dense runs that others learn from and that are not among them: they are trained, and get no record."""
    return teachers_of([run.member for run in runs])


class Budget:
    """Decides what fits the time that there is, from what an epoch of a run has taken so far."""

    def __init__(self, seconds: float) -> None:
        self._left, self._each = seconds, SECONDS

    def fitting(self, runs: list[Run]) -> list[Run]:
        """As many of them as fit, whole hypotheses only."""
        names = list(dict.fromkeys(run.name for run in runs))
        for count in range(len(names), 0, -1):
            fits = [run for run in runs if run.name in names[:count]]
            if self.estimate(fits) <= self._left:
                return fits
        return []

    def estimate(self, runs: Sequence[Run]) -> float:
        return self._each * runs[0].race.epochs * (len(runs) + len(teachers(runs)))

    def spend(self, seconds: float, runs: Sequence[Run]) -> None:
        self._left -= seconds
        self._each = seconds / (runs[0].race.epochs * (len(runs) + len(teachers(runs))))


def train(
    runs: list[Run],
    images: ImageSet,
    tier: str,
    commit: str,
    device: torch.device,
    net: str = "resnet20",
    save_models: bool = False,
) -> float:
    """Train runs of one race and write their records; returns the seconds it took."""
    race, members = runs[0].race, [run.member for run in runs] + teachers(runs)
    start, dtype = time.perf_counter(), torch.bfloat16 if device.type == "cuda" else torch.float32
    identity = hashlib.sha256("".join(run.path.name for run in runs).encode()).hexdigest()[:12]
    checkpoint = runs[0].path.parent / f"{tier}-{identity}.race.safetensors"
    say(f"{len(members)} runs of {race.epochs} epochs: {', '.join(dict.fromkeys(run.name for run in runs))}")

    def keep(number: int, network: nn.Module) -> None:
        if number < len(runs):  # teachers come last
            save(network, runs[number].path.with_suffix(".safetensors"))

    outcomes = run_race(
        race,
        members,
        images,
        lambda: models.create(net),
        device=device,
        dtype=dtype,
        progress=say,
        checkpoint=checkpoint,
        keep=keep if save_models else None,
    )
    seconds = time.perf_counter() - start
    held_out = 0 if images.validation is None else len(images.validation)
    for run, outcome in zip(runs, outcomes, strict=False):  # teachers come last
        about = {"tier": tier, "hypothesis": run.name, "net": net, "data": images.name, "commit": commit}
        content = {**about, "validation_images": held_out, **record(run.member, outcome, race, seconds, len(members))}
        write_json(run.path, content)
    checkpoint.unlink(missing_ok=True)
    return seconds


def race_all(
    runs: Sequence[Run],
    images: ImageSet,
    tier: str,
    commit: str,
    device: torch.device,
    together: int,
    seconds: float,
    net: str = "resnet20",
    save_models: bool = False,
) -> None:
    budget = Budget(seconds)
    for chunk in chunks([run for run in runs if not run.path.exists()], together):
        fits = budget.fitting(chunk)
        if len(fits) < len(chunk):
            left_out = dict.fromkeys(run.name for run in chunk if run not in fits)
            say(f"no time for {', '.join(left_out)}: run the same command again")
        if fits:
            say(f"about {budget.estimate(fits):.0f} s")
            budget.spend(train(fits, images, tier, commit, device, net, save_models), fits)


def table(runs: Sequence[Run], key: str) -> list[str]:
    """One line a name and sparsity, best first, from the records; differences are to the default of the same seed."""
    groups: dict[tuple[str, float], dict[int, dict[str, Any]]] = {}
    for run in runs:
        if run.path.exists():
            told = json.loads(run.path.read_text())
            groups.setdefault((run.name, told["asked_sparsity"]), {})[run.member.seed] = told
    lines = []
    for (name, sparsity), by_seed in groups.items():
        values = [each[key] for each in by_seed.values()]
        base = groups.get(("default", sparsity), {})
        gains = [each[key] - base[seed][key] for seed, each in by_seed.items() if seed in base]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
        against = f"{statistics.mean(gains):+.2f} ± {error:.2f}" if gains else "–"
        plain = [each.get("of_the_last_weights", {}).get(key) for each in by_seed.values()]
        beside = f" (last weights {statistics.mean(plain):.2f})" if None not in plain else ""
        loss = statistics.mean(each["train_loss"] or math.nan for each in by_seed.values())
        row = f"{name:<36} {100 * sparsity:5.1f} %  {statistics.mean(values):.2f} ± {spread:.2f}  {against:>14}"
        lines.append((sparsity, -statistics.mean(values), f"{row}  loss {loss:.3f}  seeds {len(values)}{beside}"))
    head = f"{'hypothesis':<36}   zeros  {key.replace('_', ' ')}, to the default ± standard error"
    return [head, *(line for _, _, line in sorted(lines))]


def choose(runs: Sequence[Run], count: int) -> dict[str, dict[str, Any]]:
    """The settings of learned masks with the best accuracy on held-out images, all of one race."""
    means: dict[str, list[float]] = {}
    for run in runs:
        if run.path.exists() and run.member.method == "scl" and run.race == runs[0].race:
            means.setdefault(run.name, []).append(json.loads(run.path.read_text())["validation_accuracy"])
    known = {each.name: each.settings for each in HYPOTHESES}
    best = sorted(means, key=lambda name: -statistics.mean(means[name]))[:count]
    return {name: known[name] for name in best}


def tiny_images() -> ImageSet:
    """A few random images, to see that everything works without a data set."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (96, 3, 32, 32), dtype=torch.uint8, generator=generator)
    part = Labelled(images, torch.randint(0, 10, (96,), generator=generator))
    return ImageSet("random", part, part, tuple("0123456789"), (0.5,) * 3, (0.25,) * 3, padding=4, flip=True)


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results/race-NET")
    parser.add_argument("--net", default="resnet20", choices=models.names(), metavar="NAME")
    parser.add_argument("--stage", choices=[*STAGES, "final"], default="screening")
    parser.add_argument("--only", nargs="+", help="names of hypotheses; the default is always among them")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.95], help="of the screening")
    parser.add_argument("--epochs", type=int, help="50 for the screening, 350 for the final")
    parser.add_argument("--settings", type=Path, help="of the final: JSON, {name: {setting: value}}")
    parser.add_argument("--chosen", type=Path, help="where the screening writes the best settings, for --settings")
    parser.add_argument("--peers", nargs="*", default=["dpf", "gradual"], help="of the final")
    parser.add_argument("--together", type=int, default=48, help="runs side by side")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="train what fits, first things first")
    parser.add_argument("--save-models", action="store_true", help="leave each network beside its record")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--tiny", action="store_true", help="a few steps on random images")
    told = parser.parse_args(arguments)
    told.out = told.out or Path(f"results/race-{told.net}")
    told.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    screening, listed = told.stage != "final", STAGES.get(told.stage, ())
    race = Comparison(told.net, "cifar10", epochs=told.epochs or (50 if screening else 350)).race()
    if told.tiny:
        race = Race(1, 1, 1, 1, batch_size=16)
    if screening:
        known = {each.name for each in listed}
        if told.only and set(told.only) - known:
            parser.error(f"unknown: {', '.join(sorted(set(told.only) - known))}; known: {', '.join(sorted(known))}")
        tried = [each for each in listed if not told.only or each.name in {"default", *told.only}]
        runs = plan_screening(tried, race, told.out, *told.sparsity)
    else:
        if told.settings is None:
            parser.error("--stage final needs --settings FILE: JSON with a name and settings for each choice")
        runs = plan_final(json.loads(told.settings.read_text()), told.peers, race, told.out)
    if any(not run.path.exists() for run in runs):
        images = tiny_images() if told.tiny else data.load("cifar10")
        assert isinstance(images, ImageSet)
        images = images.split(32 if told.tiny else VALIDATION) if screening else images
        tier = "hypotheses" if screening else "final"
        race_all(
            runs, images, tier, told.commit, device, told.together, told.budget_seconds, told.net, told.save_models
        )
    for line in table(runs, "validation_accuracy" if screening else "accuracy"):
        print(line)
    if screening and told.chosen is not None:
        told.chosen.write_text(json.dumps(choose(runs, 1), indent=1))


if __name__ == "__main__":
    main()
