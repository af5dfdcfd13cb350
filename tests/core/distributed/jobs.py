"""What the processes train: small networks in float64, so that the order of summation cannot flip a mask."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from gossamer.sparsifier import Sparsifier
from gossamer.zeros import keep_zeros

STEPS, BATCH = 16, 8


def build() -> nn.Sequential:
    """Layers whose rows do not divide by two: 7, 3, 1 and 5 rows on two processes, one of which may get nothing."""
    torch.manual_seed(0)
    sizes = (9, 7, 3, 1, 5)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers).double()


def build_conv() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5).eval(), nn.ReLU(), nn.ConvTranspose2d(5, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(3 * 36, 4),
    ).double()  # fmt: skip


def build_filters() -> nn.Sequential:
    """A batch norm behind the convolution, which uses its running statistics, so that processes do not differ in it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6).eval(), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 25, 4)
    ).double()  # fmt: skip


SHAPES = {"mlp": ((9,), 5), "conv": ((1, 7, 7), 4), "filters": ((1, 7, 7), 4)}
BUILDS = {"mlp": build, "conv": build_conv, "filters": build_filters}


def batch(network: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape, outputs = SHAPES[network]
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return torch.randn(BATCH, *shape, **options), torch.randn(BATCH, outputs, **options)


def part(rank: int) -> slice:
    half = BATCH // 2
    return slice(rank * half, (rank + 1) * half)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(
    model: nn.Module,
    optimizer: Optimizer,
    network: str,
    steps: range,
    *,
    rows: slice = slice(None),
) -> list[dict[str, Tensor]]:
    """Returns the weights after each step."""
    trace = []
    for step in steps:
        inputs, targets = batch(network, step)
        optimizer.zero_grad()
        (model(inputs[rows]) - targets[rows]).square().mean().backward()
        optimizer.step()
        trace.append({name.removeprefix("module."): whole(value) for name, value in model.named_parameters()})
    return trace


def options_of(network: str, options: dict[str, Any]) -> dict[str, Any]:
    needs_input = "flops" in options
    return {**options, "total_steps": STEPS, **({"example_input": batch(network, 0)[0]} if needs_input else {})}


def alone(network: str, options: dict[str, Any]) -> dict[str, Any]:
    """One process with the joint batch."""
    model = BUILDS[network]()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    sparsifier = Sparsifier(model, optimizer, **options_of(network, options))
    trace = train(model, optimizer, network, range(STEPS))
    return {"trace": trace, "connections": sparsifier.nonzeros, "health": _health(sparsifier)}


def data_parallel(rank: int, folder: Path, network: str, options: dict[str, Any]) -> dict[str, Any]:
    model = DistributedDataParallel(BUILDS[network](), gradient_as_bucket_view=True)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    sparsifier = Sparsifier(model, optimizer, **options_of(network, options))
    with counted_collectives() as collectives:
        trace = train(model, optimizer, network, range(STEPS), rows=part(rank))
    return {"trace": trace, "connections": sparsifier.nonzeros, "collectives": len(collectives)}


def shared_optimizer(rank: int, folder: Path, network: str, options: dict[str, Any]) -> dict[str, Any]:
    """Data-parallel training where each process keeps the optimizer state of a part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported, so not in the tests' process

    model = DistributedDataParallel(BUILDS[network]())
    rates = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=SGD, **rates)
    sparsifier = Sparsifier(model, optimizer, **options_of(network, options))
    trace = train(model, optimizer, network, range(STEPS), rows=part(rank))
    return {"trace": trace, "connections": sparsifier.nonzeros}


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """Names of the collectives that Python code starts. (Those of the data-parallel wrapper itself are C++.)"""
    called: list[str] = []
    with ExitStack() as stack:
        for name in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "broadcast_object_list"):
            original = getattr(dist, name)

            def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                called.append(name)
                return original(*args, **kwargs)

            stack.enter_context(patch.object(dist, name, counted))
        yield called


def _sharded(
    network: str, options: dict[str, Any], mesh_shape: tuple[int, ...] = (2,)
) -> tuple[nn.Module, Optimizer, Sparsifier]:
    model = BUILDS[network]()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")[-len(mesh_shape) :])
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    return model, optimizer, Sparsifier(model, optimizer, **options_of(network, options))


def _health(sparsifier: Sparsifier) -> dict[str, Any]:
    health = sparsifier.health()
    return {
        "connections": list(health.nonzeros),
        "flips": list(health.flips),
        "decay": list(health.decay),
        "layers": [(each.name, each.nonzeros, each.weights, each.dead_features) for each in health.layers],
        "scales": [each.gradient_scale for each in health.layers],
    }


def sharded(
    rank: int, folder: Path, network: str, options: dict[str, Any], mesh_shape: tuple[int, ...] = (2,)
) -> dict[str, Any]:
    model, optimizer, sparsifier = _sharded(network, options, mesh_shape)
    trace = train(model, optimizer, network, range(STEPS), rows=part(rank))
    connections, health = sparsifier.nonzeros, _health(sparsifier)
    masks = {name: whole(mask) for name, mask in sparsifier.masks.items()}
    sparsifier.finish()
    return {"trace": trace, "connections": connections, "health": health, "masks": masks}


def resumed(rank: int, folder: Path, network: str, cut: int, options: dict[str, Any]) -> dict[str, Any]:
    """Saved after `cut` steps, each process its own file, loaded into fresh objects, trained to the end."""
    model, optimizer, sparsifier = _sharded(network, options)
    train(model, optimizer, network, range(cut), rows=part(rank))
    torch.save((model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()), folder / f"{rank}.pt")
    fresh = _sharded(network, options)
    for each, state in zip(fresh, torch.load(folder / f"{rank}.pt", weights_only=True), strict=True):
        each.load_state_dict(state)
    return _to_the_end(rank, network, cut, *fresh)


def checkpointed(rank: int, folder: Path, network: str, cut: int, options: dict[str, Any]) -> dict[str, Any]:
    """The same through torch.distributed.checkpoint, which loads in place: into the state of a run as far as this."""
    model, optimizer, sparsifier = _sharded(network, options)
    train(model, optimizer, network, range(cut), rows=part(rank))
    other = _sharded(network, options)
    train(other[0], other[1], network, range(1, cut + 1), rows=part(rank))  # other numbers in the same places
    names = ("model", "optimizer", "sparsifier")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about inner workings of the checkpoint
        dcp.save(
            {name: each.state_dict() for name, each in zip(names, (model, optimizer, sparsifier), strict=True)},
            checkpoint_id=folder,
        )
        state = {name: each.state_dict() for name, each in zip(names, other, strict=True)}
        dcp.load(state, checkpoint_id=folder)
    for name, each in zip(names, other, strict=True):
        each.load_state_dict(state[name])
    return _to_the_end(rank, network, cut, *other)


def _to_the_end(
    rank: int, network: str, cut: int, model: nn.Module, optimizer: Optimizer, sparsifier: Sparsifier
) -> dict[str, Any]:
    trace = train(model, optimizer, network, range(cut, STEPS), rows=part(rank))
    return {"trace": trace, "connections": sparsifier.nonzeros}


def kept(rank: int, folder: Path, network: str) -> dict[str, Any]:
    """Zeros of a sharded sparse model under keep_zeros."""
    model, optimizer, sparsifier = _sharded(network, {"sparsity": 0.7})
    before = train(model, optimizer, network, range(STEPS), rows=part(rank))[-1]
    sparsifier.finish()
    with keep_zeros(model, optimizer):
        after = train(model, optimizer, network, range(4), rows=part(rank))[-1]
    return {"before": before, "after": after}


def refusals(rank: int, folder: Path, methods: list[str]) -> dict[str, Any]:
    """What is said of weights that are sharded in a way that masks cannot follow, and by methods that need them
    whole."""
    mesh = init_device_mesh("cpu", (2,))
    mixture = build()
    fully_shard(mixture[0], mesh=mesh)
    both_ways = nn.Linear(4, 4)
    plane = init_device_mesh("cpu", (1, 2))
    both_ways.weight = nn.Parameter(distribute_tensor(both_ways.weight.detach(), plane, [Shard(0), Shard(1)]))
    messages = {}
    for name, model in (("mixture", mixture), ("both ways", both_ways)):
        try:
            Sparsifier(model, SGD(model.parameters(), lr=0.1), sparsity=0.5, total_steps=10)
        except ValueError as error:
            messages[name] = str(error)
    for name, settings in {**{name: {"method": name} for name in methods}, "pattern": {"pattern": "row"}}.items():
        try:
            _sharded("mlp", {**settings, "sparsity": 0.5})
        except ValueError as error:
            messages[name] = str(error)
    return messages
