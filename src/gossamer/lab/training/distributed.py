"""Where a run is computed: one device, or one of several processes that torchrun has started.

Every process sees the same global batch and takes its own slice of it, weighted such that the mean over processes is
the mean over the batch, so the result is that of one process up to the order in which sums are taken. Two things are
not a sum over samples: dropout draws its own numbers in each process, and batch normalisation needs statistics of the
whole batch, which torch synchronises on accelerators only.
"""

import atexit
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from gossamer.lab.training.run import Run

T = TypeVar("T")


@dataclass(frozen=True)
class DistributedContext:
    """A device, and the number of this process among all."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def slice_of(self, count: int) -> slice:
        """The samples of a global batch of `count` that this process takes."""
        return slice(self.rank * count // self.world, (self.rank + 1) * count // self.world)

    def weight_of(self, count: int) -> float:
        """What the mean loss over this process's slice is multiplied by, so that processes average to the whole."""
        first, last = self.rank * count // self.world, (self.rank + 1) * count // self.world
        return (last - first) * self.world / count

    def agree(self, flag: bool) -> bool:
        """Whether any process says so; all have to ask."""
        if self.world == 1:
            return flag
        votes = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes.item() > 0)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over the processes."""
        return value if self.world == 1 else self.total(value) / self.world

    def total(self, value: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        if self.world == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    def least(self, value: Tensor) -> Tensor:
        """The smallest of the numbers that the processes have."""
        if self.world == 1:
            return value
        smallest = value.detach().clone()
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return smallest

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, on the one that leads; an empty list elsewhere."""
        if self.world == 1:
            return [value]
        values: list[Any] | None = [None] * self.world if self.leads else None
        dist.gather_object(value, values)
        return values or []

    def share(self, value: Any) -> Any:
        """The value of the process that leads, everywhere."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def after_the_leader(self, action: Callable[[], T]) -> T:
        """What `action` gives here, done first by the process that leads: the others then find what it has fetched.

        Where it fails there, it fails everywhere with the same error, and nobody waits for somebody who is gone.
        """
        if self.world == 1:
            return action()
        done: list[T] = []
        problem: Exception | None = None
        if self.leads:
            try:
                done.append(action())
            except Exception as error:
                problem = _as_sent(error)
        problem = self.share(problem)
        if problem is not None:
            raise problem
        return done[0] if done else action()


def join(device: str) -> DistributedContext:
    """The place of this process; where torchrun has started several, join them."""
    world = _processes()
    chosen = _device(device)
    if chosen.type == "cuda":
        own = _own_gpu() if world > 1 else chosen.index
        chosen = _device(f"cuda:{torch.cuda.current_device() if own is None else own}")
        torch.cuda.set_device(chosen)  # streams, graphs and kernels of Triton are those of the current device
    if world == 1:
        return DistributedContext(chosen)
    if not dist.is_initialized():
        _check_launched(world)
        if chosen.type == "cuda":
            dist.init_process_group("nccl", device_id=chosen)
        else:
            dist.init_process_group("gloo")
        # Kept for further runs of this process: torchrun's store does not take a second group of the same name.
        atexit.register(_leave)
    return DistributedContext(chosen, dist.get_rank(), dist.get_world_size())


def check_one_process() -> None:
    """Before work that several processes would each do whole, and write to the same files."""
    if (world := _processes()) > 1:
        raise ValueError(
            f"expected one process, as batched runs share one device, got WORLD_SIZE={world}: start gossamer "
            "without torchrun; only gossamer train shares its work among several processes"
        )


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_launched(world: int) -> None:
    """Before the processes look for each other: a batch system may say how many there are, and not who is who."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"expected {', '.join(missing)} beside WORLD_SIZE={world}, as torchrun sets them, got none: start several "
            "processes with torchrun, or unset WORLD_SIZE for one"
        )


def _as_sent(error: Exception) -> Exception:
    """The error, or one with its words where another process could not be given it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _own_gpu() -> int:
    """The GPU of this process among those that share the machine."""
    local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= found:
        raise ValueError(
            f"expected a GPU for each process of this machine, but process {local} finds only {found}: start "
            f"--nproc-per-node={found}, or set device=cpu"
        )
    return local


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """Exit with this code.

    One of several processes does without the interpreter's own farewell: a thread of torch's gloo that still holds the
    last tensor it sent lets go of it then, and aborts a process whose work is done (pytorch issue 190489; seen in 2 of
    75 pairs of processes on a busy machine).
    """
    if not dist.is_initialized():
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def no_farewell_after_an_error() -> Iterator[None]:
    """Let a process that fails simply end: to close its connections properly it would wait for the others, which may be
    waiting for it in the middle of a step. Their launcher sees the end and stops them."""
    try:
        yield
    except BaseException:
        atexit.unregister(_leave)
        raise


@contextmanager
def advice_on_lost_processes() -> Iterator[None]:
    """Say what to do where the others of a run cannot be reached any more, as when one of them has died."""
    try:
        yield
    except RuntimeError as error:
        lost = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
        if not dist.is_initialized() or not any(each in str(error) for each in lost):
            raise
        first = str(error).splitlines()[0]
        raise RuntimeError(
            f"the other processes of this run cannot be reached ({first}): see whether one of them has said why it "
            "ended, and run the same command again; it goes on from the last checkpoint, where there is one"
        ) from error


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        known = device.type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise ValueError(f"expected a device such as auto, cpu, cuda or cuda:1, got {name!r}")
    if device.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found <= (device.index or 0):
            raise ValueError(
                f"device={name} was asked for, but torch {torch.__version__} finds {found} CUDA devices here: "
                "set device=cpu (or auto), or install the driver and a torch built for CUDA"
            )
    return device


@contextmanager
def fast_algorithms(context: DistributedContext) -> Iterator[None]:
    """Let cuDNN try its algorithms for shapes it has not seen, and take the fastest: here shapes never change."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or context.device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def autocast(run: Run, context: DistributedContext) -> torch.autocast:
    """The precision in which a network is computed forwards."""
    return torch.autocast(context.device.type, torch.bfloat16, enabled=run.precision == "bf16")


def synchronise_batch_norm(model: nn.Module, context: DistributedContext) -> nn.Module:
    """Let batch normalisation see the whole global batch, where torch can."""
    if context.world == 1 or not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return model
    if context.device.type == "cpu":
        if context.leads:
            warnings.warn(
                "batch normalisation sees only the slice of each process on CPU: the result is close to that of one "
                "process, but not the same",
                stacklevel=3,
            )
        return model
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


def shard_(model: nn.Module, run: Run, context: DistributedContext) -> None:
    """Spread the parameters over the processes in place, where the run asks for it."""
    if context.world > 1 and run.sharding == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh(context.device.type, (context.world,)))


def forward_of(model: nn.Module, run: Run, context: DistributedContext) -> Callable[..., Any]:
    """What the training step calls: the model, synchronised over processes and compiled where that is asked for."""
    forward: Callable[..., Any] = model
    if context.world > 1 and run.sharding == "ddp":
        forward = nn.parallel.DistributedDataParallel(
            model, device_ids=[context.device] if context.device.type == "cuda" else None
        )
    return compiled(forward, context) if run.compile else forward


def compiled(forward: Callable[..., Any], context: DistributedContext) -> Callable[..., Any]:
    """On a GPU with small kernels side by side in one: ResNet-20 trains 7 % faster (docs/lab-book.md, 39.)."""
    return torch.compile(forward, options={"combo_kernels": True} if context.device.type == "cuda" else None)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model with sharded tensors put together; all processes have to take part.

    Tied weights are one tensor here too, as whoever writes them down has to see.
    """
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    sharded = {id(each): each for each in own.values() if isinstance(each, DTensor)}
    whole = {key: each.full_tensor().detach() for key, each in sharded.items()}
    return {name: whole[id(each)] if id(each) in whole else each.detach() for name, each in own.items()}
