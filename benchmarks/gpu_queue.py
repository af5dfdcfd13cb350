"""Work through the runs that wait for a GPU (gpu_queue.toml), the most urgent first, for a number of minutes.

    python benchmarks/gpu_queue.py --list
    python benchmarks/gpu_queue.py --minutes 25 --out results/queue

A run starts only if its expected minutes are left. A run that `resumes` starts anyway: it is stopped in time, writes a
checkpoint, and resumes when the same command is run again. The output of a run goes to NAME.log in the folder, and
queue.json lists the exit status of each. The same command continues with the runs that have not succeeded. `--only NAME
…` selects some. Data sets are searched where gossamer does, first in the folder that GOSSAMER_DATA names.
"""

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import IO, Any

INTERRUPTED = 130
STOPPING = 45.0  # seconds in which a run that resumes writes its checkpoint
QUEUE = Path(__file__).with_name("gpu_queue.toml")


def read(path: Path = QUEUE) -> list[dict[str, Any]]:
    runs = tomllib.loads(path.read_text())["run"]
    for run in runs:
        if lacking := {"name", "why", "command", "minutes"} - run.keys():
            raise ValueError(f"expected {', '.join(sorted(lacking))} of every run in {path.name}, got {run}")
    return list(runs)


def work(runs: list[dict[str, Any]], out: Path, minutes: float) -> dict[str, Any]:
    """Returns the exit status and the seconds of each run by name, and writes them after each run."""
    out.mkdir(parents=True, exist_ok=True)
    record, end = out / "queue.json", time.monotonic() + 60 * minutes
    ended: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    for run in runs:
        left = end - time.monotonic()
        if ended.get(run["name"], {}).get("status") == 0:
            print(f"{run['name']}: done before")
            continue
        resumes = run.get("resumes", False)
        if left < (2 * STOPPING if resumes else 60 * run["minutes"]):
            print(f"{run['name']}: needs {run['minutes']} minutes, {left / 60:.1f} are left")
            continue
        print(f"{run['name']}: {run['why']}", flush=True)
        started = time.monotonic()
        command = shlex.split(run["command"].format(out=out))
        with (out / f"{run['name']}.log").open("a" if resumes else "w") as log:
            status = _run(command, log, left - STOPPING if resumes else left)
        ended[run["name"]] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
        record.write_text(json.dumps(ended, indent=1) + "\n")
        verdict = {0: "succeeded", INTERRUPTED: "was interrupted"}.get(status, f"failed with {status}")
        print(f"{run['name']}: {verdict} after {ended[run['name']]['seconds']} s")
    return ended


def _run(command: list[str], log: IO[str], seconds: float) -> int:
    """The exit status of a command; one that takes longer is asked to stop, and killed if it does not."""
    try:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    except FileNotFoundError as error:
        log.write(f"\n{error}\n")
        return 1
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        return process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        log.write(f"\nkilled after {seconds + STOPPING:.0f} s\n")
        return process.wait() or 1


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
        with contextlib.suppress(BrokenPipeError):  # the reader has seen enough, as in `| head`
            for run in runs:
                needs = f" (needs {', '.join(run['needs'])})" if run.get("needs") else ""
                print(f"{run['name']}, {run['minutes']} min: {run['why']}{needs}", flush=True)
        return
    if chosen.out is None:
        parser.error("expected --out DIR, the folder for logs and records")
    ended = work(runs, chosen.out, chosen.minutes)
    sys.exit(any(each["status"] for each in ended.values()))


if __name__ == "__main__":
    main()
