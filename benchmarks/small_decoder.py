"""Methods on a small decoder-only transformer under AdamW: a development problem that needs no data set and no GPU.

    python benchmarks/small_decoder.py --methods dense scl feather --sparsity 0.9 0.95 --seeds 2 --out FOLDER

The text is the source code of Python's standard library, byte by byte. Each run is a plain loop of torch with a
`gossamer.Sparsifier`. Methods have the phases that suit them; METHOD:NAME=VALUE,… overrides phases and settings. Every
run writes a record; a run that has one is not repeated. The metric is bits per byte of held-out files: lower is better.
"""

import argparse
import json
import math
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import gossamer
from gossamer.lab.models.transformer import Decoder
from gossamer.methods import find
from gossamer.provenance import commit, cpu_name, versions
from gossamer.schedule import cosine

BYTES, BATCH, CONTEXT, WARMUP = 128, 8, 64, 0.05
LR, WEIGHT_DECAY, CLIP = 2e-3, 0.1, 1.0


def text(size: int = 12_000_000) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes, of different files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.rglob("*.py") if "-packages" not in str(path))
    random.Random(0).shuffle(files)
    parts, total = [], 0
    for path in files:
        content = bytes(min(each, BYTES - 1) for each in path.read_bytes())
        parts.append(content)
        total += len(content)
        if total > size:
            break
    stream = torch.tensor(list(b"".join(parts)))
    return stream[:-200_000], stream[-200_000:]


def windows(stream: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes and the bytes that follow them, (time, batch) each."""
    found = stream[starts + torch.arange(CONTEXT + 1)[:, None]]
    return found[:-1], found[1:]


def loss_of(model: Decoder, stream: Tensor, starts: Tensor) -> Tensor:
    tokens, following = windows(stream, starts)
    logits, _ = model(tokens)
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def train(method: str, sparsity: float, seed: int, steps: int, settings: dict[str, str]) -> dict[str, Any]:
    stream, held_out = text()
    torch.manual_seed(seed)
    model = Decoder(BYTES, width=96, layers=3, heads=3, context=CONTEXT, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    sparsifier = None
    if method != "dense":
        values = {**find(method).usual_phases, **settings}
        typed = {name: value if value[-1].isalpha() else float(value) for name, value in values.items()}
        sparsifier = gossamer.Sparsifier(
            model, optimizer, method=method, sparsity=sparsity, total_steps=steps, seed=seed, **typed
        )
    generator, rising, total = torch.Generator().manual_seed(seed), round(WARMUP * steps), 0.0
    started = time.perf_counter()
    for step in range(steps):
        rate = LR * min(1.0, (step + 1) / rising) * cosine(step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, stream, torch.randint(len(stream) - CONTEXT, (BATCH,), generator=generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        total += float(loss.detach()) if step >= 0.9 * steps else 0.0
    if sparsifier is not None:
        sparsifier.finish()
    model.eval()
    with torch.no_grad():
        parts = torch.arange(0, len(held_out) - CONTEXT, CONTEXT).split(64)
        losses = [float(loss_of(model, held_out, starts)) * len(starts) for starts in parts]
    return {
        "method": method,
        "sparsity": gossamer.report(model).sparsity,
        "seed": seed,
        "steps": steps,
        "settings": settings,
        "bits": sum(losses) / sum(map(len, parts)) / math.log(2),
        "train_bits": total / math.ceil(0.1 * steps) / math.log(2),
        "seconds": round(time.perf_counter() - started, 1),
        "versions": versions(),
        "commit": commit(),
        "processor": cpu_name(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["dense", "scl"], metavar="METHOD[:NAME=VALUE,…]")
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.9])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the records")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    chosen.out.mkdir(parents=True, exist_ok=True)
    for variant in chosen.methods:
        method, _, rest = variant.partition(":")
        settings = dict(each.split("=") for each in rest.split(",")) if rest else {}
        for sparsity in chosen.sparsity if method != "dense" else [0.0]:
            for seed in range(chosen.seeds):
                name = f"{variant}-{sparsity:g}-{chosen.steps}-{seed}".replace(":", "-").replace(",", "-")
                path = chosen.out / f"{name}.json"
                if not path.exists():
                    record = train(method, sparsity, seed, chosen.steps, settings)
                    path.write_text(json.dumps(record, indent=1) + "\n")
                record = json.loads(path.read_text())
                print(f"{variant} at {sparsity:.0%}, seed {seed}: {record['bits']:.4f} bits per byte", flush=True)


if __name__ == "__main__":
    main()
