"""A run killed without warning, several times, ends with the bits of one that was left alone."""

import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from safetensors.torch import load_file

from gossamer.lab.training import Run, train

RUN = Run(
    model="digits_cnn",
    model_options={"width": 4},
    data="digits",
    method="scl",
    sparsity=0.9,
    epochs=10,
    batch_size=64,
    checkpoint_steps=3,
    device="cpu",
)
SERVER = multiprocessing.get_context("forkserver")  # imports torch once, and its children begin from there


def in_child(folder: Path) -> None:
    torch.set_num_threads(1)
    train(RUN, folder)


def start(folder: Path) -> BaseProcess:
    SERVER.set_forkserver_preload(["gossamer.lab.training", "sklearn.datasets"])
    process = SERVER.Process(target=in_child, args=(folder,))
    process.start()
    return process


def newest(folder: Path) -> str:
    return max((path.name for path in folder.glob("checkpoint-*.pt")), default="")


def test_killed_twice_and_still_the_same_bits(tmp_path: Path) -> None:
    chance, torn = random.Random(0), tmp_path / "torn"
    for _ in range(2):
        before = newest(torn)
        process = start(torn)
        while newest(torn) == before and process.is_alive():
            time.sleep(0.002)
        time.sleep(chance.random() * 0.2)
        assert process.is_alive(), "the run was over before it could be killed: make it longer"
        process.kill()
        process.join()
        assert newest(torn) > before
    assert not (torn / "result.json").exists()
    last = start(torn)
    last.join()
    assert last.exitcode == 0
    torch.set_num_threads(1)
    train(RUN, tmp_path / "whole")
    left, right = load_file(torn / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors")
    assert left.keys() == right.keys()
    assert all(left[name].equal(right[name]) for name in left)
    assert sorted(path.name for path in torn.iterdir()) == sorted(path.name for path in (tmp_path / "whole").iterdir())
