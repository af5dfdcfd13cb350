"""Two processes that share every batch come to the result of one: on a CPU, and where there are two GPUs on these."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_run import KINDS, all_of_them
from safetensors.torch import load_file

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_two_gpus)])
def folders(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """The run in this process, and in two that torchrun starts; sharding means nothing to a process alone."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    all_of_them(one, ("ddp",), request.param)
    program = str(Path(__file__).with_name("distributed_run.py"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with open(two / "log.txt", "w") as log:
        process = subprocess.Popen(
            [*launcher, program, str(two), request.param], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout=300)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its processes too: they would wait for each other forever
    assert process.returncode == 0, (two / "log.txt").read_text()
    return one, two


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_equal_one(folders: tuple[Path, Path], kind: str, sharding: str) -> None:
    alone, together = folders[0] / f"{kind}-ddp", folders[1] / f"{kind}-{sharding}"
    one, two = load_file(alone / "model.safetensors"), load_file(together / "model.safetensors")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(one[name] == 0, two[name] == 0)
    results = [json.loads((folder / "result.json").read_text()) for folder in (alone, together)]
    for key in ("nonzeros", "sparsity", "flops"):
        assert results[0][key] == results[1][key]
    metric = "perplexity" if kind in ("words", "by-file") else "accuracy"
    assert results[0][metric] == pytest.approx(results[1][metric], rel=1e-5)
    assert results[1]["hardware"]["processes"] == 2


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_go_on_from_a_checkpoint_to_the_same_bits(
    folders: tuple[Path, Path], kind: str, sharding: str
) -> None:
    whole, again = folders[1] / f"{kind}-{sharding}", folders[1] / f"{kind}-{sharding}-again"
    assert list(whole.glob("checkpoint-*.pt"))
    assert not list(again.glob("checkpoint-*.pt"))  # complete, so they are gone
    one, two = load_file(whole / "model.safetensors"), load_file(again / "model.safetensors")
    assert all(one[name].equal(two[name]) for name in one)


def test_two_processes_share_an_evaluation(folders: tuple[Path, Path]) -> None:
    """Six images in batches of five: of the last batch, of one image, the first process has none."""
    alone = (folders[0] / "evaluated-0.txt").read_text().split()
    first, second = ((folders[1] / f"evaluated-{rank}.txt").read_text().split() for rank in (0, 1))
    assert alone == ["5", "1"] * 2
    assert first == ["2", "0"] * 4  # of both shardings
    assert second == ["3", "1"] * 4


def test_what_stops_one_process_stops_all_with_the_same_words(folders: tuple[Path, Path]) -> None:
    expected = {
        "nan": "the loss is not finite (infinite or NaN) at step 1:",
        "missing": "the leader found nothing",
        "another": "choose another folder, or delete this one",
    }
    for kind, words in expected.items():
        said = [(folders[1] / f"{kind}-{rank}.txt").read_text() for rank in (0, 1)]
        assert said[0] == said[1]
        assert words in said[0]
