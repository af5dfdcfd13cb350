"""Exhibits of the paper for machines without the packages that the command line needs.

python -m gossamer.lab.reproduce resnet20 --out results/paper-resnet20 --data-root DIR

A first SIGINT or SIGTERM (of `timeout`, say) writes a checkpoint; the same command resumes.
"""

import argparse
import sys
from pathlib import Path

from gossamer.lab.batched.__main__ import tell
from gossamer.lab.reproduce import paper_settings
from gossamer.lab.training import Interrupted
from gossamer.lab.training.distributed import join


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gossamer.lab.reproduce", description=__doc__)
    parser.add_argument("exhibit", choices=sorted(paper_settings.RECIPES))
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    parser.add_argument("--seeds", type=int, default=3, help="runs of the paper's own method per sparsity")
    parser.add_argument("--data-root", type=Path, help="folder with the data sets")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes to all runs")
    parser.add_argument("--short-epochs", type=int, help="epochs of the short runs that find λ1 (default: a tenth)")
    chosen = parser.parse_args(arguments)
    changes = [*chosen.set, *([f"data_root={chosen.data_root}"] if chosen.data_root else [])]
    try:
        records = paper_settings.reproduce(
            paper_settings.RECIPES[chosen.exhibit],
            chosen.out,
            seeds=chosen.seeds,
            epochs=chosen.short_epochs,
            device=join(chosen.device).device,
            changes=changes,
            progress=tell,
        )
    except Interrupted as stopped:
        tell(str(stopped))
        return 130
    head, found = paper_settings.rows(records)
    for row in (head, *found):
        tell("  ".join(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
