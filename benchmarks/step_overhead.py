"""What a sparse training step costs over a dense one, and how much memory it takes.

    python benchmarks/step_overhead.py                    # CPU: ResNet-20 at batch 64, LSTM of 650 units
    python benchmarks/step_overhead.py --device cuda      # ResNet-50 at batch 256, ResNet-20 at 64 as a CUDA graph

Dense and sparse steps are interleaved in one run; the ratio is the median over rounds of a sparse step over the dense
one next to it, which a machine that is slower for a while does not change. The sparse step is one of the
sparsify phase, where masks learn and the budget is solved in every step; fine-tuning costs less.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer
from gossamer.lab import models
from gossamer.lab.training.capture import Captured
from gossamer.provenance import commit

Step = Callable[[], None]


def language_model() -> nn.Module:
    return models.create("lstm_lm", num_classes=10_000, hidden=650, dropout=0.0)


def image_batch(size: int, pixels: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    images = torch.randn(size, 3, pixels, pixels, device=device).to(memory_format=torch.channels_last)
    return images, torch.randint(0, classes, (size,), device=device)


def make_step(
    model: nn.Module, inputs: Tensor, targets: Tensor, *, scale: str | None, autocast: bool
) -> tuple[Step, gossamer.Sparsifier | None]:
    """A training step, dense for `scale` None."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    sparsifier = None
    if scale is not None:
        sparsifier = gossamer.Sparsifier(
            model,
            optimizer,
            sparsity=0.95,
            total_steps=100_000,
            warmup="0it",
            sparsify="90000it",
            stabilise="0it",
            scale=scale,
        )

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=autocast):
            output = model(inputs)
            output = output[0] if isinstance(output, tuple) else output
            loss = F.cross_entropy(output.flatten(0, -2).float(), targets.flatten())
        loss.backward()
        optimizer.step()

    return step, sparsifier


def timed(step: Step, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(steps: dict[str, Step], device: torch.device, rounds: int, inner: int = 1) -> dict[str, list[float]]:
    """Seconds of each step, round by round."""

    def several(step: Step) -> Step:
        def run() -> None:
            for _ in range(inner):
                step()

        return run

    loops = {name: several(step) for name, step in steps.items()}
    for loop in loops.values():
        for _ in range(max(2, 6 // inner)):
            loop()
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            times[name].append(timed(loop, device) / inner)
    return times


def eager(name: str, build: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], scales: list[str], rounds: int,
          *, autocast: bool = False) -> dict[str, object]:  # fmt: skip
    device = batch[0].device
    steps: dict[str, Step] = {}
    for scale in [None, *scales]:
        torch.manual_seed(0)
        model = build().to(device)
        if device.type == "cuda":
            model = model.to(memory_format=torch.channels_last)
        steps[scale or "dense"], _ = make_step(model, *batch, scale=scale, autocast=autocast)
    return summary(name, compare(steps, device, rounds))


def captured(name: str, build: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], rounds: int) -> dict[str, object]:
    """The whole step replayed from a CUDA graph; the sparse one calls advance() before each replay."""
    device = batch[0].device
    steps: dict[str, Step] = {}
    for scale in (None, "global"):
        torch.manual_seed(0)
        model = build().to(device, memory_format=torch.channels_last)
        step, sparsifier = make_step(model, *batch, scale=scale, autocast=True)
        graph = Captured(step, device)
        steps[scale or "dense"] = graph if sparsifier is None else advancing(graph, sparsifier)
        for _ in range(6):
            steps[scale or "dense"]()
    return summary(name, compare(steps, device, rounds, inner=50))


def advancing(graph: Captured, sparsifier: gossamer.Sparsifier) -> Step:
    def step() -> None:
        if graph.replays:
            sparsifier.advance()  # a step that runs for real advances by itself
        graph()

    return step


def summary(name: str, times: dict[str, list[float]]) -> dict[str, object]:
    ratios = {
        scale: round(statistics.median(one / other for one, other in zip(values, times["dense"], strict=True)), 3)
        for scale, values in times.items()
        if scale != "dense"
    }
    seconds = {scale: statistics.median(values) for scale, values in times.items()}
    print(f"{name:40s} dense {1e3 * seconds['dense']:8.2f} ms   sparse / dense: {ratios}")
    return {"case": name, "seconds": seconds, "ratios": ratios}


def extra_memory(build: Callable[[], nn.Module]) -> dict[str, float]:
    """Bytes that the sparsifier holds, over the bytes of the weights it masks."""
    model = build()
    _, sparsifier = make_step(model, torch.zeros(1), torch.zeros(1), scale="global", autocast=False)
    assert sparsifier is not None
    driver = sparsifier._begin()
    tensors = (driver.state.dense, driver.training.state()["mask_variable"], driver.mask)
    held, weights = sum(t.numel() * t.element_size() for t in tensors), driver.state.count * 4
    return {"weights": float(weights), "held": float(held), "ratio": held / weights}


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, rounds = torch.device(arguments.device), arguments.rounds
    rows: list[dict[str, object]] = []
    if device.type == "cpu":
        batch = image_batch(64, 32, 10, device)
        rows.append(eager("ResNet-20, batch 64", lambda: models.create("resnet20"), batch,
                          ["global", "batch", "per_sample"], arguments.rounds))  # fmt: skip
        tokens = torch.randint(0, 10_000, (35, 20))
        rows.append(
            eager("LSTM 650, batch 20, 35 steps", language_model, (tokens, tokens), ["global"], arguments.rounds)
        )
    else:
        batch = image_batch(64, 32, 10, device)
        rows.append(captured("ResNet-20, batch 64, graph", lambda: models.create("resnet20"), batch, arguments.rounds))
        rows.append(eager("ResNet-50, batch 256, bf16", lambda: models.create("resnet50"),
                          image_batch(256, 224, 1000, device), ["global"], rounds, autocast=True))  # fmt: skip
    memory = extra_memory(lambda: models.create("resnet20"))
    print(f"extra memory: {memory['ratio']:.2f} × the bytes of the weights")
    if arguments.out:
        about = {"torch": torch.__version__, "hardware": hardware(device), "commit": commit()}
        arguments.out.write_text(json.dumps({"rows": rows, "memory": memory, **about}, indent=1))


if __name__ == "__main__":
    main()
