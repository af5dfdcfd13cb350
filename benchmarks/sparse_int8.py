"""Sparse int8 with blocks of 1x4 against dense int8 of onnxruntime (dynamic and static) and OpenVINO, layer by layer.

    python benchmarks/sparse_int8.py --out results/speed-int8/layers.json

Masks are random blocks of four consecutive inputs, the same number in every layer. Engines take turns in one process
with one thread; times are medians of the processor time of a call, which other programs change less than the time of
day. The ratio of a row is over the fastest dense int8 engine of its run. Calls include the conversion of inputs and
outputs that each engine needs.
"""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.deployment.runtime import NativeModel, Setting, compile_plan, torch_threads
from gossamer.deployment.runtime.native_model import possible_lanes
from gossamer.deployment.runtime.plan import choices
from gossamer.deployment.runtime.quantise import calibrated
from gossamer.deployment.runtime.tuning import tune
from gossamer.deployment.speed.engines import ENGINES, Job
from gossamer.provenance import commit, cpu_name, versions

RIVALS = ("onnxruntime", "onnxruntime int8", "onnxruntime static int8", "openvino int8")
SAMPLE = 3e-3  # seconds of calls in a sample


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1500, 1500)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(384, 1536), nn.ReLU(), nn.Linear(1536, 384))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1))


#: Title, network, input for a batch size, batch sizes.
CASES: dict[str, tuple[str, Callable[[], nn.Module], Callable[[int], Tensor], tuple[int, ...]]] = {
    "attention": ("MiniLM 384 → 384", lambda: nn.Linear(384, 384), lambda b: torch.randn(b, 384), (1, 64)),
    "in": ("MiniLM 384 → 1536", lambda: nn.Linear(384, 1536), lambda b: torch.randn(b, 384), (1, 64)),
    "out": ("MiniLM 1536 → 384", lambda: nn.Linear(1536, 384), lambda b: torch.randn(b, 1536), (1, 64)),
    "both": ("MiniLM 384 → 1536 → 384, ReLU", feed_forward, lambda b: torch.randn(b, 384), (1, 64)),
    "gates": ("LSTM gates 1500 → 6000", lambda: nn.Linear(1500, 6000), lambda b: torch.randn(b, 1500), (1, 20, 64)),
    "lstm": ("LSTM 1500, 35 steps", Lstm, lambda b: torch.randn(35, b, 1500), (1, 20)),
    "mlp": ("MLP 784-300-100-10", mlp, lambda b: torch.randn(b, 784), (1, 64)),
    "conv": ("2 convolutions 128, 16 × 16", convolutions, lambda b: torch.randn(b, 128, 16, 16), (1, 16)),
}


def mask_blocks_(model: nn.Module, sparsity: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                inputs_last = parameter.movedim(1, -1).contiguous()
                groups = inputs_last.view(-1, 4)
                groups[torch.randperm(len(groups))[: round(sparsity * len(groups))]] = 0
                parameter.copy_(inputs_last.movedim(-1, 1))


def in_turns(candidates: Mapping[str, Callable[..., Any]], x: Tensor, rounds: int) -> dict[str, float]:
    """The median processor time of a call of each candidate."""
    repeats: dict[str, int] = {}
    for name, run in candidates.items():
        run(x)
        start = time.process_time()
        run(x)
        repeats[name] = max(1, int(SAMPLE / max(1e-6, time.process_time() - start)))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in list(candidates) if number % 2 else list(candidates)[::-1]:
            run = candidates[name]
            run(x)
            start = time.process_time()
            for _ in range(repeats[name]):
                run(x)
            samples[name].append((time.process_time() - start) / repeats[name])
    return {name: median(each) for name, each in samples.items()}


def ours(model: nn.Module, x: Tensor) -> dict[str, Callable[..., Any]]:
    """Our float32 kernels, chosen by time, and int8 in every layer, with each number of lanes."""
    native = compile_plan(model, x)
    lanes = possible_lanes(native.graph, native.example_batch)
    found: dict[str, Callable[..., Any]] = {
        "gossamer": NativeModel(native.graph, native.native, tune(native, [x], lanes[0], 0.1).setting)
    }
    graph = calibrated(native, [x])
    for each in lanes:
        given = tuple(
            (number, kernel) for number, of in choices(graph, each).items() for kernel in of if kernel == "int8"
        )
        found[f"gossamer int8, {each} lanes"] = NativeModel(graph, native.native, Setting(each, 1, given))
    return found


def measure(case: str, batch: int, sparsities: list[float], rounds: int) -> list[dict[str, Any]]:
    title, make, example, _ = CASES[case]
    torch.manual_seed(0)
    x, rows = example(batch), []
    with tempfile.TemporaryDirectory() as folder, torch_threads(1):
        job = Job(make().eval(), (x,), 1, Path(folder), 0.1)
        candidates: dict[str, Callable[..., Any]] = {}
        for name in RIVALS:
            candidates[name] = ENGINES[name].prepare(job).run
        for sparsity in sparsities:
            model = make().eval()
            mask_blocks_(model, sparsity)
            candidates |= {f"{name} at {sparsity:g}": run for name, run in ours(model, x).items()}
        times = in_turns(candidates, x, rounds)
    rivals = {name: 1e6 * times[name] for name in RIVALS}
    dense = min(value for name, value in rivals.items() if "int8" in name)
    for sparsity in sparsities:
        int8 = min(v for n, v in times.items() if n.startswith("gossamer int8") and n.endswith(f"at {sparsity:g}"))
        mine = {"gossamer": 1e6 * times[f"gossamer at {sparsity:g}"], "gossamer int8": 1e6 * int8}
        row = {"case": title, "batch": batch, "sparsity": sparsity, "microseconds": rivals | mine}
        row["ratio"] = round(dense / mine["gossamer int8"], 2)
        print(f"{title}, batch {batch}, {sparsity:.0%}: {row['ratio']} times", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.75, 0.9, 0.95])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for case in arguments.cases:
        for batch in CASES[case][3]:
            rows += measure(case, batch, arguments.sparsity, arguments.rounds)
            about = {"command": "python benchmarks/sparse_int8.py --out results/speed-int8/layers.json"}
            about |= {"commit": commit(), "cpu": cpu_name(), "versions": versions()}
            arguments.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
