"""A plain training loop with a sparsifier, and comparison of everything in it bit for bit."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gossamer.sparsifier import Sparsifier
from zeros.networks import Network

TOTAL = 24  # optimizer steps: 6 of warm-up, 8 to sparsify, 4 to stabilise, 6 of fine-tuning
SPARSITY = 0.8

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


@dataclass
class Run:
    """A network in training."""

    network: Network
    model: nn.Module
    optimizer: Optimizer
    sparsifier: Sparsifier
    forward: Callable[[Tensor], Tensor]

    def loss(self, step: int) -> Tensor:
        inputs, targets = self.network.batch(step)
        dtype = next(self.model.parameters()).dtype
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        return (self.forward(inputs) - targets.to(dtype)).square().mean()

    def train(self, until: int = TOTAL) -> "Run":
        for step in range(self.sparsifier.step, until):
            self.optimizer.zero_grad()
            self.loss(step).backward()
            self.optimizer.step()
        return self


def start(network: Network, make_optimizer: MakeOptimizer = sgd, **options: Any) -> Run:
    model = network.fresh(options.pop("seed", 0)).to(options.pop("dtype", torch.float32))
    optimizer = make_optimizer(model.parameters())
    if options.keys().isdisjoint({"sparsity", "flops", "decay"}):
        options["sparsity"] = SPARSITY
    sparsifier = Sparsifier(model, optimizer, **{"total_steps": TOTAL, **options})
    return Run(network, model, optimizer, sparsifier, model)


def through_file(value: Any) -> Any:
    """What `torch.load` gives back of what `torch.save` wrote."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def everything(run: Run) -> dict[str, Any]:
    """The whole state of a run."""
    return {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "sparsifier": run.sparsifier.state_dict(),
    }


def restore(run: Run, state: dict[str, Any]) -> Run:
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.sparsifier.load_state_dict(state["sparsifier"])
    return run


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two nested states are not equal bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if torch.equal(one, other) else [where]
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{where}: keys {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [found for key in one for found in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{where}: lengths {len(one)} and {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, f"{where}/{index}")]
    return [] if one == other else [f"{where}: {one} and {other}"]


def assert_zeros(model: nn.Module, sparsifier: Sparsifier) -> None:
    """The weights are zero exactly where the masks say so, and nowhere else."""
    parameters = dict(model.named_parameters())
    for name, mask in sparsifier.masks.items():
        assert torch.equal(parameters[name] != 0, mask), name


def zeros(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter == 0 for name, parameter in model.named_parameters()}
