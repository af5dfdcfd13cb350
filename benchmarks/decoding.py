"""How fast a sparse decoder generates text on a CPU with a cache of keys and values, against dense engines.

    python benchmarks/decoding.py --sparsity 0.9 0.95 --out results/decoding

The model has the shape of GPT-2 (12 layers of 768, a vocabulary of 50,257) and random weights, of which the same share
is zero in every linear layer, also in the tied layer of the logits. A dense engine gets one step of the same model as
an ONNX file: token, position, and the keys and values of all earlier positions, of which a mask hides those that are
still to come; it returns logits, keys and values of the token, which are written to the cache in place. One thread,
batch 1, one step at a time, engines taking turns at the same position, medians.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer
from gossamer.deployment.runtime.memory import processor
from gossamer.provenance import commit

VOCABULARY, WIDTH, HEADS = 50_257, 768, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.inputs(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return query, key, value

    def rest(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Gpt2(nn.Module):
    """Whole sequences: (batch, tokens) to (batch, tokens, vocabulary)."""

    def __init__(self, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(length, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            assert isinstance(block, Block)
            x = block.rest(x, F.scaled_dot_product_attention(*block.heads(x), is_causal=True))
        result: Tensor = self.logits(self.norm(x))
        return result


class Step(nn.Module):
    """One token of it, with the keys and values before."""

    def __init__(self, model: Gpt2) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, token: Tensor, position: Tensor, hidden: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, ...]:
        x = self.model.embedding(token) + F.embedding(position, self.model.positions)
        new = []
        for number, block in enumerate(self.model.blocks):
            assert isinstance(block, Block)
            query, key, value = block.heads(x)
            new += [key, value]
            all_keys, all_values = torch.cat([keys[number], key], 2), torch.cat([values[number], value], 2)
            x = block.rest(x, F.scaled_dot_product_attention(query, all_keys, all_values, hidden))
        return self.model.logits(self.model.norm(x))[:, 0], torch.stack(new[::2]), torch.stack(new[1::2])


def prune_(model: nn.Module, sparsity: float) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                keep = torch.rand(layer.weight.shape) >= sparsity
                layer.weight.mul_(keep)


class Dense:
    """A dense engine, and its cache."""

    def __init__(self, run: Callable[[list[np.ndarray]], list[np.ndarray]], layers: int, length: int) -> None:
        self.run = run
        self.keys = np.zeros((layers, 1, HEADS, length, WIDTH // HEADS), np.float32)
        self.values = np.zeros_like(self.keys)
        self.hidden = np.full((1, 1, 1, length + 1), -math.inf, np.float32)
        self.hidden[..., -1] = 0  # the token itself

    def __call__(self, token: int, position: int) -> np.ndarray:
        ids, at = np.array([[token]], np.int64), np.array([position], np.int64)
        logits, keys, values = self.run([ids, at, self.hidden, self.keys, self.values])
        self.keys[:, :, :, position], self.values[:, :, :, position] = keys[:, :, :, 0], values[:, :, :, 0]
        self.hidden[..., position] = 0
        return logits


def by_onnxruntime(path: Path) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return lambda inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def by_openvino(path: Path) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.compile_model(str(path), "CPU", settings).create_infer_request()
    return lambda inputs: list(request.infer(inputs, share_inputs=True).values())


def engines(model: Gpt2, layers: int, length: int, folder: Path) -> dict[str, Dense]:
    keys, values = torch.zeros(2, layers, 1, HEADS, length, WIDTH // HEADS)  # one tensor for both would be one input
    example = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    path = folder / "step.onnx"
    torch.onnx.export(Step(model).eval(), (*example, torch.zeros(1, 1, 1, length + 1), keys, values), dynamo=True,
                      verbose=False).save(str(path))  # fmt: skip
    found = {"onnxruntime": Dense(by_onnxruntime(path), layers, length)}
    try:
        found["openvino"] = Dense(by_openvino(path), layers, length)
    except ImportError:
        print("openvino is not installed, and is left out")
    return found


def measure(sparsity: float, layers: int, length: int, steps: int, clock: Callable[[], float]) -> dict[str, object]:
    torch.manual_seed(0)
    model = Gpt2(layers, length).eval()
    prune_(model, sparsity)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        dense = engines(model, layers, length, Path(folder))
        native = gossamer.deployment.runtime.compile_plan(model, torch.zeros(1, length, dtype=torch.int64))
        decoder = gossamer.deployment.runtime.Decoder(native, seconds=2.0)
        if max(steps, 1) > length:
            raise ValueError(f"expected at most {length} steps, the length of the cache, got {steps}")
        seconds: dict[str, list[float]] = {name: [] for name in (*dense, "gossamer")}
        difference = 0.0
        for position in range(steps):
            token = int(torch.randint(VOCABULARY, ()))
            logits = {}
            for name, run in dense.items():
                start = clock()
                logits[name] = run(token, position)
                seconds[name].append(clock() - start)
            tokens = torch.tensor([[token]])
            start = clock()
            ours = decoder(tokens)
            seconds["gossamer"].append(clock() - start)
            expected = torch.from_numpy(logits["onnxruntime"])
            difference = max(difference, float((ours - expected).abs().max() / expected.abs().max()))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    best = min(dense, key=lambda name: medians[name])
    return {
        "model": f"GPT-2-shaped, {layers} layers",
        "sparsity": sparsity,
        "length": length,
        "steps": steps,
        "milliseconds": {name: round(1e3 * value, 3) for name, value in medians.items()},
        "best_dense": best,
        "speed_up": round(medians[best] / medians["gossamer"], 2),
        "largest_relative_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.9, 0.95])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=256, help="of the cache")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of this process, for a busy machine")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if given.cpu_time else time.perf_counter
    given.out.mkdir(parents=True, exist_ok=True)
    for sparsity in given.sparsity:
        record = measure(sparsity, given.layers, given.length, given.steps, clock)
        flags = " --cpu-time" if given.cpu_time else ""
        record |= {
            "command": f"python benchmarks/decoding.py --sparsity {sparsity:g}{flags} --out results/decoding",
            "clock": "process time" if given.cpu_time else "wall time",
            "processor": processor(),
            "torch": torch.__version__,
            "onnxruntime": onnxruntime.__version__,
            "commit": commit(),
        }
        text = json.dumps(record, indent=1)
        (given.out / f"gpt2-random-{100 * sparsity:g}.json").write_text(text + "\n")
        print(text)


if __name__ == "__main__":
    main()
