"""Work through the runs that wait for a GPU (gpu_queue.toml), the most urgent first, for a number of minutes.

    python benchmarks/gpu_queue.py --list
    python benchmarks/gpu_queue.py --minutes 25 --out results/queue

A run begins only if its expected minutes are left. Its output goes to NAME.log in the folder, and queue.json there says
what has ended how. The same command goes on with the runs that have not succeeded. `--only NAME …` chooses some.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

QUEUE = Path(__file__).with_name("gpu_queue.toml")


def read(path: Path = QUEUE) -> list[dict[str, Any]]:
    runs = tomllib.loads(path.read_text())["run"]
    for run in runs:
        if lacking := {"name", "why", "command", "minutes"} - run.keys():
            raise ValueError(f"expected {', '.join(sorted(lacking))} of every run in {path.name}, got {run}")
    return list(runs)


def work(runs: list[dict[str, Any]], out: Path, minutes: float) -> dict[str, Any]:
    """Returns, and writes after each run, what has ended how: the exit status and the seconds by name."""
    out.mkdir(parents=True, exist_ok=True)
    record, end = out / "queue.json", time.monotonic() + 60 * minutes
    ended: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    for run in runs:
        left = end - time.monotonic()
        if ended.get(run["name"], {}).get("status") == 0:
            print(f"{run['name']}: done before")
            continue
        if left < 60 * run["minutes"]:
            print(f"{run['name']}: needs {run['minutes']} minutes, {left / 60:.1f} are left")
            continue
        print(f"{run['name']}: {run['why']}", flush=True)
        started = time.monotonic()
        command = shlex.split(run["command"].format(out=out))
        with (out / f"{run['name']}.log").open("w") as log:
            try:
                status = subprocess.run(
                    command, stdout=log, stderr=subprocess.STDOUT, timeout=left, check=False
                ).returncode
            except (subprocess.TimeoutExpired, FileNotFoundError) as error:
                status = 1
                log.write(f"\n{error}\n")
        ended[run["name"]] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
        record.write_text(json.dumps(ended, indent=1) + "\n")
        verdict = "succeeded" if status == 0 else f"failed with {status}"
        print(f"{run['name']}: {verdict} after {ended[run['name']]['seconds']} s")
    return ended


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the queue")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--queue", type=Path, default=QUEUE)
    chosen = parser.parse_args(arguments)
    runs = read(chosen.queue)
    if unknown := set(chosen.only or ()) - {run["name"] for run in runs}:
        parser.error(
            f"unknown runs {', '.join(sorted(unknown))}: the queue has {', '.join(run['name'] for run in runs)}"
        )
    runs = [run for run in runs if not chosen.only or run["name"] in chosen.only]
    if chosen.list:
        for run in runs:
            needs = f" (needs {', '.join(run['needs'])})" if run.get("needs") else ""
            print(f"{run['name']}, {run['minutes']} min: {run['why']}{needs}")
        return
    if chosen.out is None:
        parser.error("expected --out DIR, the folder for logs and records")
    ended = work(runs, chosen.out, chosen.minutes)
    sys.exit(any(each["status"] for each in ended.values()))


if __name__ == "__main__":
    main()
