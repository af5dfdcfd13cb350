"""What every method does to a small network, step by step: the runs whose outcome `trajectories.json` freezes.

`python -m goldens.trajectories` (in tests/) writes the file anew. Do so only when a change of behaviour is intended,
and say in the commit which trajectories changed and why.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gossamer
from gossamer.methods import METHODS

FILE = Path(__file__).with_name("trajectories.json")
STEPS = 60
PHASES = {"warmup": "0.2run", "sparsify": "0.4run", "stabilise": "0.2run"}
OPTIMIZERS = ("sgd", "adamw")
SCL_VARIANTS: Mapping[str, dict[str, Any]] = {
    "scl": {"scale": "global"},  # the default under SGD; this setting makes masks learn from gradients under AdamW, too
    "scl, following, faded": {"mask_speed": 2.0, "fade": 3.0},
    "scl, faded": {"fade": 3.0, "scale": "global"},
    "scl, paper": {"preset": "paper"},
    "scl, batch scale, leaky ReLU": {"scale": "batch", "estimator": "leaky_relu"},
    "scl, raw, softplus, momentum": {"scale": "none", "estimator": "softplus", "mask_momentum": 0.5},
    "scl, L2 on masks": {"l2": 1e-3},
    "scl, fixed decay": {"decay": 0.05},
    "scl, flops": {"flops": 0.3},
    "scl, per sample": {"scale": "per_sample"},
    "scl, 1:4": {"pattern": "1:4", "sparsity": 0.75},
    "scl, blocks": {"pattern": "block:2x4"},
}
CASES = [*SCL_VARIANTS, *(name for name in METHODS if name != "scl")]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 9, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
    ).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(72, 4, generator=generator, dtype=torch.float64)
    images = [torch.randn(16, 2, 6, 6, generator=generator, dtype=torch.float64) for _ in range(STEPS)]
    return [(image, (image.flatten(1) @ teacher).argmax(1)) for image in images]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)


def sparsify(model: nn.Module, optimizer: torch.optim.Optimizer, case: str) -> Any:
    if case in SCL_VARIANTS:
        settings = {"preset": "default", **PHASES, **SCL_VARIANTS[case]}
        if not {"decay", "flops", "sparsity"} & settings.keys():
            settings["sparsity"] = 0.8
        if "flops" in settings:
            settings["example_input"] = batches()[0][0]
        return gossamer.Sparsifier(model, optimizer, total_steps=STEPS, steps_per_epoch=10, **settings)
    return gossamer.Sparsifier(
        model,
        optimizer,
        method=case,
        sparsity=0.2 if METHODS[case].structured else 0.8,
        total_steps=STEPS,
        steps_per_epoch=10,
        seed=3,
        **PHASES,
    )


def trajectory(case: str, optimizer_name: str) -> dict[str, Any]:
    """Hashes of which weights are zero after each step, and the size of all parameters at some steps."""
    model = network()
    optimizer = make_optimizer(optimizer_name, model)
    sparsifier = sparsify(model, optimizer, case)
    zeros, sizes = [], []
    for step, (images, labels) in enumerate(batches()):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        zeros.append(_hash_of_zeros(model))
        if step % 10 == 9:
            sizes.append(_size(model))
    sparsifier.finish()
    return {"zeros": [*zeros, _hash_of_zeros(model)], "sizes": [*sizes, _size(model)]}


def _hash_of_zeros(model: nn.Module) -> str:
    """Weights below 1e-9 count as zeros: a gradient that is mathematically zero may leave a rounding residue of another
    size on another processor."""
    weights = [parameter.detach().flatten() for parameter in model.parameters() if parameter.dim() > 1]
    zeros = torch.cat(weights).abs() < 1e-9
    return hashlib.sha256(zeros.numpy().tobytes()).hexdigest()[:8]


def _size(model: nn.Module) -> float:
    return sum(float(parameter.detach().abs().sum()) for parameter in model.parameters())


def main() -> None:
    found = {f"{case} | {name}": trajectory(case, name) for case in CASES for name in OPTIMIZERS}
    FILE.write_text(
        "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()) + "\n}\n"
    )


if __name__ == "__main__":
    main()
