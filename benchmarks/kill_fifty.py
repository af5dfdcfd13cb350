"""Kill training without warning fifty times, and compare its end with one that was left alone.

    python benchmarks/kill_fifty.py [run] [sweep] [two] [--kills 50] [--seed 0]

`run` is one run, `sweep` a batched sweep of four runs, `two` a run in two processes, of which all are killed or one.
Each kill comes at a random moment: while the program starts, in a step, in a checkpoint being written, between two of
them. The same command then goes on. At the end every bit of the models has to agree, and the log has to have each step
once. Prints one line for each kill, and the verdicts; the exit code is 1 where something differs.
"""

import argparse
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from safetensors.torch import load_file

from gossamer.lab.batched import runs_of, sweep
from gossamer.lab.data.digits import load_digits
from gossamer.lab.training import Run, train

RUN = Run(
    model="digits_cnn",
    model_options={"width": 8},
    data="digits",
    method="scl",
    sparsity=0.95,
    validation=200,
    epochs=80,
    checkpoint_steps=2,
    log_steps=5,
    device="cpu",
)
SERVER = multiprocessing.get_context("forkserver")  # importing torch takes longer than training


@dataclass(frozen=True)
class Kind:
    """What is killed: the work of one process, how many there are, and how much of it is done."""

    work: Callable[[Path], object]
    progress: Callable[[Path], object]
    processes: int = 1


def train_one(folder: Path) -> None:
    train(RUN, folder)


def train_sweep(folder: Path) -> None:
    often = replace(RUN, epochs=40, checkpoint_minutes=0.002)
    runs = runs_of(often, ["method=scl,rigl", "seed=0,1"])
    sweep(runs, folder, device="cpu", save_models=True)


def steps_done(folder: Path) -> int:
    names = [path.stem for path in folder.glob("checkpoint-*.pt")]
    return max((int(name.rpartition("-")[2]) for name in names), default=0)


def written(folder: Path) -> int:
    """The time of the newest checkpoint of the sweep."""
    return max((path.stat().st_mtime_ns for path in folder.glob("batch-*.pt") if path.exists()), default=0)


KINDS = {"run": Kind(train_one, steps_done), "sweep": Kind(train_sweep, written), "two": Kind(train_one, steps_done, 2)}


def in_child(name: str, folder: Path, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    if KINDS[name].processes > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": KINDS[name].processes}
        os.environ |= {**{key: str(value) for key, value in places.items()}, "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(port)
    KINDS[name].work(folder)


def start(name: str, folder: Path) -> list[BaseProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = range(KINDS[name].processes)
    processes: list[BaseProcess] = [SERVER.Process(target=in_child, args=(name, folder, rank, port)) for rank in ranks]
    for process in processes:
        process.start()
    return processes


def end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join()


def kill_at_random(name: str, folder: Path, chance: random.Random, pause: float) -> bool:
    """Whether there was something left to kill. Of two processes now and then only one is killed, and the other after
    it, as a launcher would do it."""
    before = KINDS[name].progress(folder)
    processes = start(name, folder)
    if chance.random() < 0.2:
        processes[0].join(chance.random())  # while it starts, or shortly after
    else:
        while processes[0].is_alive() and KINDS[name].progress(folder) == before:
            time.sleep(0.001)
        processes[0].join(chance.random() * pause)
    alive = all(process.is_alive() for process in processes)
    chance.shuffle(processes)
    for process in processes:
        process.kill()
        if chance.random() < 0.5:
            time.sleep(chance.random() * 0.05)
    end(processes)
    return alive


def differences(whole: Path, torn: Path) -> list[str]:
    """Tensors that are not the same to the last bit, files that one has alone, and logs with other steps."""
    wrong = sorted({path.name for path in whole.iterdir()} ^ {path.name for path in torn.iterdir()})
    for path in sorted(whole.glob("*.safetensors")):
        if path.name in wrong or path.name == "model.sparse.safetensors":
            continue
        left, right = load_file(path), load_file(torn / path.name)
        wrong += [f"{path.name}: {name}" for name in left if not left[name].equal(right[name])]
    logs = [folder / "log.jsonl" for folder in (whole, torn)]
    if logs[0].exists():
        steps = [[json.loads(line)["step"] for line in log.read_text().splitlines()] for log in logs]
        wrong += ["the steps of the log"] if steps[0] != steps[1] else []
    return wrong


def fifty(name: str, kills: int, chance: random.Random) -> bool:
    with tempfile.TemporaryDirectory() as temporary:
        torn, whole = Path(temporary, "torn"), Path(temporary, "whole")
        began = time.monotonic()
        end(start(name, whole))
        seconds = time.monotonic() - began
        print(f"{name}, undisturbed: {seconds:.1f} s", flush=True)
        done = 0
        while done < kills and kill_at_random(name, torn, chance, 0.8 * seconds / kills):
            done += 1
            print(f"{name}, kill {done:2d}: {KINDS[name].progress(torn)} is written", flush=True)
        end(start(name, torn))
        wrong = differences(whole, torn)
    verdict = f"different in {', '.join(wrong)}" if wrong else "bit-identical"
    print(f"{name}, after {done} kills: {verdict}", flush=True)
    return not wrong and done == kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"out of {', '.join(KINDS)}; all unless told")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if unknown := set(options.kinds) - KINDS.keys():
        parser.error(f"expected kinds out of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    SERVER.set_forkserver_preload(["gossamer.lab.training", "gossamer.lab.batched", "sklearn.datasets"])
    warm = SERVER.Process(target=load_digits)
    warm.start()
    warm.join()
    good = [fifty(name, options.kills, random.Random(options.seed)) for name in options.kinds or KINDS]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
