"""Interrupt a comparison again and again, and check that it says so, resumes and ends.

    python benchmarks/interrupt_compare.py [--interrupts 6] [--seed 0] -- --net digits_cnn --data digits --epochs 60
    python benchmarks/interrupt_compare.py --group --twice -- --net resnet20 --epochs 8      # as a batch system does it

What follows `--` goes to `gossamer compare`. Each interrupt (SIGINT) comes at a random moment after the first epoch of
that start, also while graphs are captured and kernels compiled; with `--group` compilers and other children get it as
well, with `--twice` there are two at once. The command has to end with code 130 and a line that says how to resume. At
the end the records are compared with those of an uninterrupted comparison: on a CPU they have to agree to the last bit.
The exit code is 1 if anything is wrong; `--keep DIR` keeps the logs.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SECONDS = 600  # for a command that does not end


def start(asked: list[str], folder: Path, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-X", "faulthandler", "-m", "gossamer", "compare", *asked, "--out", str(folder)]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def wait_for_epoch(process: "subprocess.Popen[bytes]", log: Path) -> None:
    while process.poll() is None and b"\nepoch " not in log.read_bytes():
        time.sleep(0.02)


def interrupt(process: "subprocess.Popen[bytes]", *, group: bool, twice: bool) -> None:
    for _ in range(1 + twice):
        if group:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)


def accuracies(folder: Path) -> dict[str, float]:
    return {path.stem: json.loads(path.read_text())["accuracy"] for path in sorted(folder.glob("*.json"))}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interrupts", type=int, default=6)
    parser.add_argument("--within", type=float, default=5.0, help="seconds after the first epoch of a start")
    parser.add_argument("--group", action="store_true", help="to all processes that the command has started")
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("asked", nargs="*", help="of gossamer compare, behind --")
    told = parser.parse_args(arguments)
    chance, wrong, interrupts = random.Random(told.seed), 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        place = told.keep or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        while interrupts < told.interrupts:
            log = place / f"{interrupts}.log"
            process = start(told.asked, place / "torn", log)
            wait_for_epoch(process, log)
            time.sleep(chance.random() * told.within)
            if process.poll() is None:
                interrupt(process, group=told.group, twice=told.twice)
            code = process.wait(SECONDS)
            if code == 0:
                break  # it was done before
            interrupts += 1
            last = (log.read_text(errors="replace").splitlines() or [""])[-1]
            good = code == 130 and "run the same command again" in last
            wrong += not good
            print(f"{interrupts}: code {code}, {last}{'' if good else '   <- not as it should be'}", flush=True)
        codes = [start(told.asked, place / name, place / f"{name}.log").wait(SECONDS) for name in ("torn", "whole")]
        left, right = (accuracies(place / name) for name in ("torn", "whole"))
    same = "the same records" if left == right and left else f"other records: {left} and {right}"
    print(f"after {interrupts} interrupts, {wrong} of them wrong: codes {codes}, {same}")
    agree = left.keys() == right.keys() if torch.cuda.is_available() else left == right
    return 0 if not wrong and codes == [0, 0] and agree and left else 1


if __name__ == "__main__":
    sys.exit(main())
