"""Sweeps, comparisons and single runs for machines without the packages that the command line needs.

python -m gossamer.lab.batched sweep cifar10-resnet20 --out results/a --grid seed=0,1,2 sparsity=0.5,0.7 --set epochs=50
python -m gossamer.lab.batched compare --net resnet20 --methods scl dpf --sparsity 0.9 0.95 --out results/b
python -m gossamer.lab.batched train wikitext2-lstm --out runs/lstm

They do what `gossamer sweep`, `compare` and `train` do. A first SIGINT or SIGTERM (of `timeout`, say) writes a
checkpoint; the same command resumes.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from gossamer.lab.batched.compare import TIERS, Comparison, compare
from gossamer.lab.batched.grid import runs_of
from gossamer.lab.batched.sweeps import sweep
from gossamer.lab.recipes import find
from gossamer.lab.training import Run, train
from gossamer.lab.training.signals import Interrupted


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    action: Callable[[argparse.Namespace], None] = chosen.action
    try:
        action(chosen)
    except Interrupted as stopped:
        tell(str(stopped))
        return 130
    return 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gossamer.lab.batched", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, action in (("sweep", _sweep), ("compare", _compare), ("train", _train)):
        command = commands.add_parser(name)
        command.set_defaults(action=action)
        command.add_argument("--out", type=Path, required=True, help="folder for the records")
        if name == "compare":
            command.add_argument("--net", default="resnet20")
            command.add_argument("--data", default="cifar10")
            command.add_argument("--methods", nargs="+", default=["scl", "dpf"])
            command.add_argument("--sparsity", nargs="+", type=float, default=[0.9, 0.95, 0.98])
            command.add_argument("--seeds", type=int, default=3)
            command.add_argument("--tier", choices=sorted(TIERS), default="screening")
            command.add_argument("--epochs", type=int, help="default: those of the tier")
            command.add_argument("--device", default="auto")
        else:
            command.add_argument("recipe")
            command.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes to all runs")
        if name == "sweep":
            command.add_argument("--grid", nargs="*", default=[], metavar="KEY=VALUE,VALUE")
        if name != "train":
            command.add_argument("--together", type=int, default=32, help="runs trained at the same time")
    return parser.parse_args(arguments)


def runs_of_sweep(chosen: argparse.Namespace) -> list[Run]:
    return runs_of(find(chosen.recipe).run.with_settings(chosen.set), chosen.grid)


def _sweep(chosen: argparse.Namespace) -> None:
    runs = runs_of_sweep(chosen)
    for each in sweep(runs, chosen.out, device=runs[0].device, together=chosen.together, progress=tell):
        tell(f"{each['run_id']}, seed {each['seed']}: {each['accuracy']:.2%} at {each['sparsity']:.1%} zeros")


def comparison_of(chosen: argparse.Namespace) -> Comparison:
    tier = TIERS[chosen.tier]
    return Comparison(
        chosen.net,
        chosen.data,
        tuple(dict.fromkeys(("dense", *chosen.methods))),
        tuple(chosen.sparsity),
        chosen.seeds,
        tier.epochs if chosen.epochs is None else chosen.epochs,
        tier.validation,
        chosen.tier,
    )


def _compare(chosen: argparse.Namespace) -> None:
    comparison = comparison_of(chosen)
    records = compare(comparison, chosen.out, device=chosen.device, together=chosen.together, progress=tell)
    tell(f"{len(records)} records and their table are in {chosen.out}")


def _train(chosen: argparse.Namespace) -> None:
    result = train(find(chosen.recipe).run.with_settings(chosen.set), chosen.out)
    metric = "perplexity" if "perplexity" in result else "accuracy"
    tell(f"{metric} {result[metric]:.4f} at {result['sparsity']:.1%} zeros")


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
