"""Large networks: a billion weights without memory, thousands of layers without thousands of calls.

``python benchmarks/scale.py`` measures time and memory.
"""

import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gossamer
from gossamer.prunable import select

PHASES = {"warmup": "1it", "sparsify": "4it", "stabilise": "2it"}


def billion() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(16_384, 16_384) for _ in range(4))), torch.empty(8, 16_384)


def test_a_billion_weights_are_selected_reported_and_budgeted_without_values() -> None:
    model, example = billion()
    weights = 4 * 16_384**2
    assert sum(weight.parameter.numel() for weight in select(model)) == weights > 10**9
    found = gossamer.report(model, example)
    assert (found.weights, found.nonzeros, found.total.flops_dense) == (weights, weights, 2 * weights)
    for asked in ({"sparsity": 0.9}, {"flops": 0.1, "example_input": example}):
        model, _ = billion()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparsifier = gossamer.Sparsifier(model, optimizer, total_steps=10, **PHASES, **asked)
        kept = {"sparsity": weights - round(0.9 * weights), "flops": weights // 10}[next(iter(asked))]
        assert f"{kept:,} of {weights:,}" in repr(sparsifier)


@pytest.mark.parametrize("warmup", ["0it", "1it"])
def test_training_without_values_is_refused_with_a_sentence(warmup: str) -> None:
    model, example = billion()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.9, total_steps=10, **{**PHASES, "warmup": warmup})
    state = sparsifier.state_dict()
    model(example).sum().backward()
    for attempt in (optimizer.step, sparsifier.finish, lambda: sparsifier.load_state_dict(state)):
        with pytest.raises(RuntimeError, match=r"weight is on the meta device, .* give the model values"):
            attempt()


def _peak() -> int:
    """The highest resident size since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(status.partition("VmHWM:")[2].partition("kB")[0])


def peaks_of_a_run(found: Any) -> None:
    """Bytes per weight at the peak of each step, beside weights and gradients."""
    torch.set_num_threads(1)
    model = nn.Linear(4096, 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phases = {"warmup": "2it", "sparsify": "3it", "stabilise": "2it"}
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.9, total_steps=9, **phases)
    model.weight.grad = 0.1 * torch.randn(4096, 4096)
    _peak()
    before = _peak()
    for step in (*[optimizer.step] * 9, sparsifier.finish):
        step()
        found.put((_peak() - before) / model.weight.numel())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel keeps the highest resident size on Linux")
def test_no_phase_takes_memory_for_more_than_dense_weights_mask_variables_and_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed is returned at once
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    process = context.Process(target=peaks_of_a_run, args=(found,))
    process.start()
    peaks = [found.get(timeout=100) for _ in range(10)]
    process.join()
    assert max(peaks) > 8.9  # 4 bytes, 4 and 1
    assert max(peaks[2:]) < 9 + 1.5  # and pieces of temporary memory
    assert peaks[1] < 9 + 4.5  # where masks begin, squares of up to 64 MiB


class Calls(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_calls_of_a_step_do_not_grow_with_the_number_of_small_layers() -> None:
    counts: dict[int, list[int]] = {}
    for layers in (100, 300):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        gossamer.Sparsifier(model, optimizer, sparsity=0.9, total_steps=20, **PHASES)
        counts[layers] = []
        for _ in range(12):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.01)
            with Calls() as calls:
                optimizer.step()
            counts[layers].append(calls.count)
    # Not where masks begin or become final, which happens once.
    steps = slice(2, 6), slice(8, None)
    for part in steps:
        assert counts[100][part] == counts[300][part]
