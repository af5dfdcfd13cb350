"""How far the sparsity of a short run predicts that of the whole run with the same λ1, on MNIST.

The whole runs are those of the table of λ1. A short run has a tenth of their epochs; its masks train from its warm-up
to its end.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gossamer.lab.batched.sweeps import Record, sweep
from gossamer.lab.recipes import find
from gossamer.lab.short_runs import short_run, trace

DECAYS = (0.0, 0.01, 0.03, 0.08, 0.1)  # of the paper's table
HEAD = ("λ1", "zeros after the short run", "zeros at the end of the whole run", "paper")


def reproduce(out: Path, *, device: torch.device, progress: Callable[[str], None] = lambda line: None) -> list[Record]:
    base = replace(find("mnist-fc-densenet-paper").run, precision="float32")
    return sweep([short_run(base, decay) for decay in DECAYS], out, device=device, progress=progress)


def rows(short: Sequence[Mapping[str, Any]], whole: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Beside the whole runs with the longest mask phase, mean over their seeds, where there are any."""
    found = []
    published = {each.decay: each.sparsity for each in find("mnist-fc-densenet-paper").published}
    by_decay = [each for each in whole if each.get("part") == "decay"]
    longest = max((_mask_epochs(each) for each in by_decay), default=0.0)
    for record in sorted(short, key=lambda each: float(each["config"]["decay"])):
        decay = record["config"]["decay"]
        ends = [
            each["sparsity"] for each in by_decay if each["config"]["decay"] == decay and _mask_epochs(each) == longest
        ]
        end, paper = statistics.mean(ends) if ends else None, published.get(decay)
        found.append([f"{decay:g}", *(_zeros(each) for each in (trace(record)[-1], end, paper))])
    return found


def _mask_epochs(record: Mapping[str, Any]) -> float:
    return float(record["config"]["settings"]["sparsify"].removesuffix("ep"))


def _zeros(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
