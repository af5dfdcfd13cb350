"""Large networks: what a step costs with thousands of small layers, and the memory of half a billion weights.

    python benchmarks/scale.py layers                       # 5,000 layers of 8 × 8: a step over that of plain SGD
    python benchmarks/scale.py memory [--weights 540000000] # peak memory of a run, phase by phase (Linux)

`layers` times the optimizer's step alone, without the forward and the backward pass, dense and sparse in turn; the
ratio is the median over rounds of a sparse step over the dense one before it. `memory` runs in a fresh process, and
gives the peak in bytes per weight, above what Python and torch take before the network is built.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import gossamer

WIDTH = 8192
GIB = 1 << 30


def many_layers(count: int, *, bias: bool, sparse: bool, momentum: float) -> Callable[[], None]:
    """A step of the optimizer in the sparsify phase."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=bias) for _ in range(count)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    if sparse:
        phases = {"warmup": "0it", "sparsify": "90000it", "stabilise": "0it"}
        gossamer.Sparsifier(model, optimizer, sparsity=0.9, total_steps=100_000, **phases)
    for parameter in model.parameters():
        parameter.grad = 0.001 * torch.randn_like(parameter)
    return lambda: optimizer.step()


def layers(count: int, rounds: int) -> None:
    torch.set_num_threads(1)
    for bias in (True, False):
        for momentum in (0.0, 0.9):
            dense, sparse = (many_layers(count, bias=bias, sparse=each, momentum=momentum) for each in (False, True))
            times: list[tuple[float, float]] = []
            for _ in range(rounds + 3):
                started = time.perf_counter()
                dense()
                between = time.perf_counter()
                sparse()
                times.append((between - started, time.perf_counter() - between))
            times = times[3:]
            ratio = statistics.median(second / first for first, second in times)
            first, second = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
            what = f"{count:,} layers of 8 × 8, {'with' if bias else 'without'} biases, momentum {momentum}"
            print(f"{what}: dense {first:.1f} ms, sparse {second:.1f} ms, ratio {ratio:.2f}", flush=True)


def peak() -> int:
    """The highest resident size since it was last asked for."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(status.partition("VmHWM:")[2].partition("kB")[0])


def train(weights: int, momentum: float) -> None:
    """One run with each phase, on one sample."""
    depth = max(1, round(weights / WIDTH**2))
    before = peak()
    stack = [module for _ in range(depth) for module in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    model = nn.Sequential(*stack)
    total = depth * WIDTH**2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=momentum)
    phases = {"warmup": "2it", "sparsify": "3it", "stabilise": "2it"}
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.9, total_steps=9, **phases)
    sample = torch.randn(1, WIDTH)

    def tell(what: str) -> None:
        most = peak()
        print(f"{what:28s} {most / GIB:6.2f} GiB, {(most - before) / total:5.2f} bytes per weight", flush=True)

    print(f"{total:,} weights, momentum {momentum}; {before / GIB:.2f} GiB before them")
    for step in range(9):
        model(sample).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        tell(f"step {step + 1}, {sparsifier.phase}")
    sparsifier.finish()
    tell("finish")
    found = gossamer.report(model)
    tell("report")
    assert found.nonzeros == total - round(0.9 * total), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["layers", "memory"])
    parser.add_argument("--count", type=int, default=5000, help="layers")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--weights", type=int, default=540_000_000)
    parser.add_argument("--momentum", type=float, default=0.0)
    asked = parser.parse_args()
    if asked.what == "layers":
        layers(asked.count, asked.rounds)
        return
    process = multiprocessing.get_context("spawn").Process(target=train, args=(asked.weights, asked.momentum))
    process.start()
    process.join()
    raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
