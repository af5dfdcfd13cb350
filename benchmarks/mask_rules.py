"""Rules for masks against each other, all rows of a problem in one batch on a GPU (docs/lab-book.md, 48).

    python benchmarks/mask_rules.py decoder --variants "scl" "feather F" "probe:rho=2,fade=1 L" --out FILE.json
    python benchmarks/mask_rules.py vit-cifar10 --epochs 10 --batch 128 --variants … --out FILE.json
    python benchmarks/mask_rules.py resnet20-cifar10 --epochs 30 --sparsity 0.9 0.95 0.98 --variants … --out FILE.json

A variant is METHOD:NAME=VALUE,… and, after a space, its phases: F (no warm-up, ramp over half the run, masks learn to
the end), L (a tenth, half, the rest), M (5, 45, 25 %), or those of the method. `probe` is a family of rules, below. The
decoder is trained byte by byte on the Python source code of this machine under AdamW; its metric is bits per byte of
held-out files. The others are problems of the general suite, judged on 10,000 training images that are held out.
"""

import argparse
import json
import math
import random
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.lab import data
from gossamer.lab.batched import training
from gossamer.lab.batched.compare import parse_variant
from gossamer.lab.batched.supported import batched_run, images_of
from gossamer.lab.models.transformer import Decoder
from gossamer.lab.recipes.general import problem_named
from gossamer.lab.training import networks
from gossamer.lab.training.run import Run
from gossamer.methods import GlobalBudget, GlobalThreshold, register
from gossamer.methods.base import Context, Options, Step
from gossamer.methods.budgets import magnitude
from gossamer.methods.scl import faded_weight
from gossamer.provenance import commit, versions

PROBLEMS = ("decoder", "vit-cifar10", "resnet20-cifar10", "fc-mnist-sgd", "fc-mnist-adam")
BYTES, STEPS = 128, 100  # of the decoder: its vocabulary, and the steps of an "epoch"
PHASES = {
    "F": ("0it", "0.5run", "0.5run"),
    "M": ("0.05run", "0.45run", "0.25run"),
    "L": ("0.1run", "0.5run", "0.4run"),
}


# --- a family of rules ---


@dataclass(frozen=True)
class ProbeOptions(Options):
    source: str = "update"  # of mask increments: update (the step of the optimizer) or gradient
    rho: float = 1.0  # speed relative to the weights, or the rate of a gradient that is scaled to one
    power: float = 0.0  # the direction is sgn(w)·(|w| / usual)^power
    theta: float = 1.0  # share of the optimizer's step that pruned weights take
    gtheta: float = 1.0  # factor on the gradient of pruned weights
    fade: float = 0.0  # 0: masks switch, 1: weights fade in and out, 2: they fade less and less
    pull: float = 0.0  # of the mask variable towards |w|
    curve: float = 3.0


@register
class Probe(GlobalThreshold[ProbeOptions]):
    name, title, options = "probe", "a family of rules", ProbeOptions
    shared = ("source", "curve")
    masked_forward = False

    def __init__(self, context: Context[ProbeOptions]) -> None:
        self._context, self._options, weights = context, context.options[0], context.weights
        self._columns = {name: context.column(name) for name in ("rho", "power", "theta", "gtheta", "fade", "pull")}
        self._decline = context.timeline.annealed([1.0] * len(weights))
        self._usual = context.mean_squares(weights).sqrt()
        self._learned, self._before = magnitude(weights), weights.clone()
        self._level, self._share = torch.zeros_like(weights[:, :1]), torch.ones_like(weights[:, :1])
        self._begin(GlobalBudget(context, self._learned.clone()))

    def _direction(self, weights: Tensor) -> Tensor:
        return weights.sign() * (weights.abs() / self._usual).clamp_max(10.0) ** self._columns["power"]

    def update_masks(self, step: Step) -> None:
        self._share.copy_(self._context.timeline.now(self._decline))
        if self._options.source == "gradient":
            gradient = step.gradient * self._direction(step.weights)
            size = self._context.mean_squares(gradient).sqrt() + 1e-12
            self._learned.sub_(gradient / size * (self._columns["rho"] * self._share))
        self._before.copy_(step.weights)
        step.gradient.mul_(torch.where(self.mask, 1.0, self._columns["gtheta"]))

    def project(self, weights: Tensor) -> None:
        change = weights - self._before
        along = change * self._direction(self._before)
        if self._options.source == "update":
            self._learned.addcmul_(along, self._columns["rho"])
        weights.copy_(self._before + torch.where(self.mask, change, change * self._columns["theta"]))
        self._learned.add_((weights.abs() - self._learned) * self._columns["pull"])
        self._budget.score.copy_(self._learned)
        self._level.copy_(self._budget.meet_().threshold[:, None].clamp_min(0.0))

    def apply_masks(self, weights: Tensor, out: Tensor) -> None:
        faded = faded_weight(weights, self._budget.score, self._level, power=self._options.curve)
        kind = self._columns["fade"]
        share = torch.where(kind == 2, self._share, (kind == 1).to(weights.dtype))
        torch.mul(weights + (faded - weights) * share, self.mask, out=out)

    def finalize(self, weights: Tensor) -> Tensor:
        self._budget.score.copy_(self._learned)
        self._level.copy_(self._budget.cut_().threshold[:, None].clamp_min(0.0))
        self._share.zero_()
        used = torch.empty_like(weights)
        self.apply_masks(weights, used)
        weights.copy_(used)
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "learned": self._learned, "level": self._level, "share": self._share}


# --- the decoder ---


class ByteDecoder(nn.Module):
    """(batch, time) to the logits of all following bytes, (batch · time, bytes)."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.inner = Decoder(BYTES, width=256, layers=4, heads=4, context=context, dropout=0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        logits, _ = self.inner(tokens.t())
        return logits.transpose(0, 1).reshape(-1, BYTES)


class TextLoader:
    """Random windows of the text, in the interface of the `BatchLoader` of batched training."""

    context = 128

    def __init__(self, text: Any, seeds: list[int], batch_size: int, *, device: Any, dtype: Any) -> None:
        self._seeds, self._batch, self.steps = list(seeds), batch_size, STEPS
        stream = text.stream.to(device)
        self._text, self.held_out = stream[:-400_000], stream[-400_000:]
        self._starts = torch.zeros(len(seeds), STEPS, batch_size, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._time = torch.arange(self.context + 1, device=device)

    def begin_epoch(self, epoch: int, step: int = 0) -> None:
        for starts, seed in zip(self._starts, self._seeds, strict=True):
            generator, most = torch.Generator().manual_seed(1000 * seed + epoch), len(self._text) - self.context - 1
            starts.copy_(torch.randint(most, starts.shape, generator=generator))
        self._position.fill_(step)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        starts = self._starts.index_select(1, self._position)[:, 0]
        self._position += 1
        windows = self._text[starts[..., None] + self._time].long()
        return windows[..., :-1].contiguous(), windows[..., 1:].reshape(len(self._seeds), -1)


class Text:
    test = validation = None

    def __init__(self, size: int = 40_000_000) -> None:
        folders = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent]
        files = {path for folder in folders for path in folder.rglob("*.py") if path.stat().st_size <= 300_000}
        ordered = sorted(files, key=lambda path: path.name + str(path.stat().st_size))
        random.Random(0).shuffle(ordered)
        parts, total = [], 0
        for path in ordered:
            parts.append(path.read_bytes())
            total += len(parts[-1])
            if total > size:
                break
        self.stream = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).clamp_max(BYTES - 1)


def bits_per_byte(stack: Any, loader: TextLoader, part: None) -> list[float]:
    count = min((len(loader.held_out) - 1) // loader.context, 3000)
    tokens = loader.held_out[: count * loader.context + 1].long()
    inputs, following = tokens[:-1].view(count, -1), tokens[1:].view(count, -1)
    stack.template.eval()
    total = torch.zeros(len(stack), device=stack.device)
    with torch.no_grad():
        for here, there in zip(inputs.split(50), following.split(50), strict=True):
            logits = stack.on_same_images(here).float()
            total += torch.stack([F.cross_entropy(each, there.reshape(-1), reduction="sum") for each in logits])
    stack.template.train()
    return [each / following.numel() / math.log(2) for each in total.tolist()]


# --- the comparison ---


def runs_of(base: Run, variants: list[str], sparsities: list[float], seeds: int) -> list[tuple[str, Run]]:
    found = []
    for variant in variants:
        name, _, phases = variant.partition(" ")
        method, changes = parse_variant(name)
        if phases:
            changes += [
                f"settings.{key}={value}"
                for key, value in zip(("warmup", "sparsify", "stabilise"), PHASES[phases], strict=True)
            ]
        for sparsity in sparsities[:1] if method == "dense" else sparsities:
            target = [] if method == "dense" else [f"sparsity={sparsity}"]
            run = base.with_settings([f"method={method}", *target, *changes])
            found += [(variant, replace(run, seed=seed)) for seed in range(seeds)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "problem", choices=["decoder", "vit-cifar10", "resnet20-cifar10", "fc-mnist-sgd", "fc-mnist-adam"]
    )
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.9, 0.95])
    parser.add_argument("--epochs", type=int, default=40, help="of the decoder: hundreds of steps")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.problem == "decoder":
        base = Run(optimizer="adamw", lr=1e-3, lr_warmup="0.05run", clip=1.0, weight_decay=0.1, batch_size=32)
        training.BatchLoader, training.evaluate = TextLoader, bits_per_byte  # type: ignore[assignment, misc]
    else:
        base = replace(problem_named(chosen.problem).run, validation=10_000)
    base = replace(base, epochs=chosen.epochs, batch_size=chosen.batch or base.batch_size)
    runs = runs_of(base, chosen.variants, chosen.sparsity, chosen.seeds)
    content: Any = Text() if chosen.problem == "decoder" else images_of(base, data.load(base.data, base.data_root))
    steps = STEPS if chosen.problem == "decoder" else len(content.train) // base.batch_size

    def network() -> nn.Module:
        if chosen.problem == "decoder":
            return ByteDecoder(TextLoader.context)
        return networks.create(base, content.num_classes)

    started = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch = training.BatchedTraining(
        [batched_run(run, steps) for _, run in runs], content, network, device=device, dtype=dtype
    )
    for epoch in range(batch.epochs):
        batch.train_epoch(epoch)
        if epoch % max(1, batch.epochs // 10) == 0:
            took = time.perf_counter() - started
            print(f"epoch {epoch + 1} of {batch.epochs}, {batch.phases(epoch)}, {took:.0f} s", flush=True)
    rows = [
        {
            "variant": variant,
            "sparsity": run.sparsity,
            "seed": run.seed,
            "value": each.accuracy if each.validation_accuracy is None else each.validation_accuracy,
            "train_loss": each.train_loss,
        }
        for (variant, run), each in zip(runs, batch.outcomes(), strict=True)
    ]
    about = {"problem": chosen.problem, "epochs": batch.epochs, "seconds": time.perf_counter() - started}
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    about |= {"hardware": hardware, "commit": commit(), "versions": versions()}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(f"{row['variant']:60s} {row['sparsity']}: {row['value']:.4f}, training loss {row['train_loss']:.4f}")


if __name__ == "__main__":
    main()
