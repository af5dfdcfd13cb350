"""The general suite where tyro is not installed: `gossamer compare --suite general`, and `gossamer tune`.

    python benchmarks/general.py --problem vit-cifar10 --methods scl feather --seeds 1 --jobs 12 --out results/general
    python benchmarks/general.py --out results/general --jobs 12          # the whole report
    python benchmarks/general.py --list
    python benchmarks/general.py --tune 16 --out results/tuning --jobs 12    # trials of each method
    python benchmarks/general.py --problem vit-cifar10 --jobs 12 --minutes 9 --archive records.tar.gz   # a part of it

The same command resumes what it has not finished: runs that have their record are not trained again.
"""

import argparse
import sys
import tarfile
from pathlib import Path

from gossamer.lab.recipes.general import PROBLEMS
from gossamer.lab.suite import REPORTED, SuiteComparison, Tuning, compare_suite, tune, unstructured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the problems, and how many minutes each may take")
    parser.add_argument("--problem", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--methods", nargs="+", default=REPORTED, metavar="METHOD", help="all: every unstructured one")
    parser.add_argument("--sparsity", nargs="+", type=float, default=[], help="default: those of each problem")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="default: those of each problem")
    parser.add_argument("--tune", type=int, metavar="TRIALS", help="tune the methods instead of comparing them")
    parser.add_argument("--jobs", type=int, default=1, help="processes of problems that are not trained in batches")
    parser.add_argument(
        "--alone", action="store_true", help="a process for each run, even where a batch could train it"
    )
    parser.add_argument("--together", type=int, default=32, help="runs of a batch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run that would end later")
    parser.add_argument("--archive", type=Path, help="write all records into one file, too: NAME.tar.gz")
    parser.add_argument("--out", type=Path, default=Path("results/general"))
    options = parser.parse_args()
    if options.list:
        for problem in PROBLEMS:
            kind = "development" if problem.development else "report only"
            print(f"{problem.name}: {problem.about}, {problem.minutes:g} min, {kind}")
        return
    methods = tuple(name for each in options.methods for name in (unstructured() if each == "all" else [each]))
    how = {"device": options.device, "together": options.together, "jobs": options.jobs, "minutes": options.minutes}
    try:
        if options.tune:
            problems = tuple(options.problem) or Tuning.problems
            tuning = Tuning(methods, options.tune, problems, *options.sparsity[:1], seeds=options.seeds)
            found, left = tune(tuning, options.out, progress=say, **how), 0
            for name, each in found.items():
                print(f"{name}: {each['trials']} trials, best with {' '.join(each['settings']) or 'its defaults'}")
                left += options.tune - each["trials"]
            left += options.tune * len([name for name in methods if name not in found])
            sys.exit(f"{left} trials are left: run the same command again" if left else 0)
        comparison = SuiteComparison(
            tuple(options.problem), methods, tuple(options.sparsity), options.seeds, options.epochs
        )
        for row in compare_suite(comparison, options.out, alone=options.alone, progress=say, **how):
            spread = "" if row["stderr"] is None else f" ± {row['stderr']:.4f}"
            print(f"{row['problem']} {row['sparsity']:.0%} {row['method']}: {row['mean']}{spread}, n = {row['n']}")
        if left := comparison.missing(options.out):
            sys.exit(f"{left} runs are left: run the same command again")
    except (ValueError, RuntimeError) as error:
        sys.exit(f"general.py: {error}")
    finally:
        if options.archive is not None and options.out.is_dir():
            with tarfile.open(options.archive, "w:gz") as archive:
                for path in sorted([*options.out.glob("*.json"), *options.out.glob("*/*.json")]):
                    archive.add(path, path.relative_to(options.out))


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
