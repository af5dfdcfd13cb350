"""Kill a training run without warning fifty times, and compare its end with a run that was left alone.

    python benchmarks/kill_fifty.py [--kills 50] [--seed 0]

Each kill comes at a random moment: while the program starts, in a step, in a checkpoint being written, between two of
them. The same command then goes on. At the end every bit of the model has to agree, and the log has to have each step
once. Prints one line a kill, and the verdict; the exit code is 1 where the models differ.
"""

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

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
)


def in_child(folder: Path) -> None:
    torch.set_num_threads(1)
    train(RUN, folder)


def steps_done(folder: Path) -> int:
    names = [path.stem for path in folder.glob("checkpoint-*.pt")]
    return max((int(name.rpartition("-")[2]) for name in names), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a run fifty times and compare its end with an undisturbed one.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["gossamer.lab.training", "sklearn.datasets"])

    with tempfile.TemporaryDirectory() as temporary:
        torn, whole = Path(temporary, "torn"), Path(temporary, "whole")
        warm = server.Process(target=load_digits)  # importing torch takes longer than training
        warm.start()
        warm.join()
        began = time.monotonic()
        alone = server.Process(target=in_child, args=(whole,))
        alone.start()
        alone.join()
        seconds = time.monotonic() - began
        print(f"undisturbed: {seconds:.1f} s")

        kills = 0
        while kills < options.kills and not (torn / "result.json").exists():
            before = steps_done(torn)
            process = server.Process(target=in_child, args=(torn,))
            process.start()
            if chance.random() < 0.2:
                process.join(chance.random())  # while it starts, or shortly after
            else:
                while process.is_alive() and steps_done(torn) == before:
                    time.sleep(0.001)
                process.join(chance.random() * 0.8 * seconds / options.kills)
            if process.is_alive():
                process.kill()
                process.join()
                kills += 1
                print(f"kill {kills:2d}: a checkpoint at step {steps_done(torn)}", flush=True)
        last = server.Process(target=in_child, args=(torn,))
        last.start()
        last.join()

        left, right = load_file(whole / "model.safetensors"), load_file(torn / "model.safetensors")
        wrong = [name for name in left if not left[name].equal(right[name])]
        logs = [
            [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]
            for folder in (whole, torn)
        ]
        same_log = logs[0] == logs[1]
        verdict = "bit-identical" if not wrong else f"different in {', '.join(wrong)}"
        print(f"after {kills} kills: the model is {verdict}; the log has {'each step once' if same_log else 'gaps'}")
        return 0 if not wrong and same_log and kills == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
