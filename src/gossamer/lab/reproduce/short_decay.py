"""How far the sparsity of a short run predicts that of the whole run with the same λ1, on MNIST.

The whole runs are those of the table of λ1. A short run has a tenth of their epochs; its masks train from its warm-up
to its end.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from gossamer.lab.batched.sweeps import Record, sweep
from gossamer.lab.recipes import find
from gossamer.lab.short_runs import short_run

DECAYS = (0.0, 0.01, 0.03, 0.08, 0.1)  # of the paper's table


def reproduce(
    out: Path,
    *,
    device: torch.device,
    progress: Callable[[str], None] = lambda line: None,
    moved: Callable[[float], None] = lambda share: None,
) -> list[Record]:
    base = replace(find("mnist-fc-densenet-paper").run, precision="float32")
    runs = [short_run(base, decay) for decay in DECAYS]
    return sweep(runs, out, device=device, progress=progress, moved=moved)
