"""Microseconds of a deployed call at batch 1, of two source trees that take turns.

    git worktree add ../before COMMIT
    python benchmarks/call_overhead.py ../before/src src

Each tree runs in a process of its own; both live all the time and are asked for 200 calls in turn. The medians of the
ratios and their quartiles are printed, and the ratio of the minima, which a busy machine disturbs least.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import TextIO


def networks() -> dict[str, tuple[object, object]]:
    import torch
    from torch import nn

    from gossamer.deployment.runtime import Deployed, Explanation, compile_plan

    torch.set_num_threads(1)
    torch.manual_seed(0)
    linear, relu, conv = nn.Linear, nn.ReLU, nn.Conv2d
    made = {
        "MLP 100-50-10": (nn.Sequential(linear(100, 50), relu(), linear(50, 10)), (1, 100)),
        "MLP 784-300-100-10": (
            nn.Sequential(linear(784, 300), relu(), linear(300, 100), relu(), linear(100, 10)),
            (1, 784),
        ),
        "CNN of two layers": (
            nn.Sequential(
                *(conv(1, 8, 3, padding=1), relu(), nn.MaxPool2d(2), conv(8, 16, 3, padding=1), relu()),
                *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(16, 10)),
            ),
            (1, 1, 16, 16),
        ),
    }
    found: dict[str, tuple[object, object]] = {}
    for name, (model, shape) in made.items():
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(torch.rand_like(parameter) < 0.1)
        x = torch.randn(shape)
        native = compile_plan(model.eval(), x)
        found[name] = Deployed(native, Explanation("native", "", 1, {}, ()), native), x
    return found


def serve(calls: int = 200) -> None:
    """Answers each line with the microseconds of a call of each network."""
    fast = networks()
    for _ in sys.stdin:
        spent = {}
        for name, (run, x) in fast.items():
            run(x)
            start = time.perf_counter()
            for _ in range(calls):
                run(x)
            spent[name] = (time.perf_counter() - start) / calls * 1e6
        print(json.dumps(spent), flush=True)


def ask(to: TextIO, back: TextIO) -> dict[str, float]:
    to.write("\n")
    to.flush()
    return json.loads(back.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve()
    if given.after is None:
        parser.error("expected two source trees, got fewer; give the src folder of each")
    servers = [
        subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.path.abspath(tree)},
        )
        for tree in (given.before, given.after)
    ]
    samples: list[list[dict[str, float]]] = [[], []]
    for turn in range(-5, given.rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            spent = ask(servers[which].stdin, servers[which].stdout)
            if turn >= 0:
                samples[which].append(spent)
    for server in servers:
        server.stdin.close()
        server.wait()
    for name in samples[0][0]:
        before, after = ([each[name] for each in tree] for tree in samples)
        low, middle, high = statistics.quantiles([b / a for a, b in zip(before, after, strict=True)], n=4)
        print(
            f"{name}: {statistics.median(before):.2f} and {statistics.median(after):.2f} µs, "
            f"ratio {middle:.3f} ({low:.3f} to {high:.3f}); "
            f"minima {min(before):.2f} and {min(after):.2f} µs, ratio {min(after) / min(before):.3f}"
        )


if __name__ == "__main__":
    main()
