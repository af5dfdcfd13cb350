"""A sweep for machines without the packages that the command line needs, as `gossamer sweep` there.

python -m gossamer.lab.batched cifar10-resnet20 --out results/a --grid seed=0,1,2 sparsity=0.5,0.7 --set epochs=50

A first SIGINT or SIGTERM (of `timeout`, say) writes a checkpoint; the same command resumes.
"""

import argparse
import sys
from pathlib import Path

from gossamer.lab.batched.grid import runs_of
from gossamer.lab.batched.sweeps import sweep
from gossamer.lab.recipes import find
from gossamer.lab.training.signals import Interrupted


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gossamer.lab.batched", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    parser.add_argument("--grid", nargs="*", default=[], metavar="KEY=VALUE,VALUE")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes to all runs")
    parser.add_argument("--together", type=int, default=32, help="runs trained at the same time")
    chosen = parser.parse_args(arguments)
    runs = runs_of(find(chosen.recipe).run.with_settings(chosen.set), chosen.grid)
    try:
        records = sweep(runs, chosen.out, device=runs[0].device, together=chosen.together, progress=tell)
    except Interrupted as stopped:
        tell(str(stopped))
        return 130
    for record in records:
        tell(f"{record['run_id']}, seed {record['seed']}: {record['accuracy']:.2%} at {record['sparsity']:.1%} zeros")
    return 0


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
