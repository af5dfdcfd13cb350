"""The devices and processes of a run: one device, or one of several processes started by torchrun.

Every process takes its slice of the same global batch, weighted such that the mean over processes is the mean over the
batch. So the result equals that of one process up to the order of sums. Two things are not sums over samples: dropout
draws its own numbers in each process, and batch normalisation needs statistics of the whole batch, which torch
synchronises on accelerators only.
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
    """The device of this process, its rank and the number of processes."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the main process, which writes files and shows progress."""
        return self.rank == 0

    def slice_of(self, count: int) -> slice:
        """The slice of this process of a global batch of `count` samples."""
        return slice(self.rank * count // self.world, (self.rank + 1) * count // self.world)

    def weight_of(self, count: int) -> float:
        """The factor on the mean loss of this slice with which the mean over processes is that of the global batch."""
        first, last = self.rank * count // self.world, (self.rank + 1) * count // self.world
        return (last - first) * self.world / count

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; all have to call it."""
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

    def minimum(self, value: Tensor) -> Tensor:
        """The minimum over the processes."""
        if self.world == 1:
            return value
        smallest = value.detach().clone()
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return smallest

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes on the main process; an empty list on the others."""
        if self.world == 1:
            return [value]
        values: list[Any] | None = [None] * self.world if self.leads else None
        dist.gather_object(value, values)
        return values or []

    def broadcast(self, value: Any) -> Any:
        """Broadcast the value of the main process."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def main_process_first(self, action: Callable[[], T]) -> T:
        """The result of `action`, run first by the main process, so that the others find what it has downloaded.

        If it fails there, it raises the same error in all processes, so that none waits for another.
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
        problem = self.broadcast(problem)
        if problem is not None:
            raise problem
        return done[0] if done else action()


def join(device: str) -> DistributedContext:
    """The context of this process; joins the others if torchrun has started several."""
    world = _processes()
    chosen = _device(device)
    if chosen.type == "cuda":
        own = _own_gpu() if world > 1 else chosen.index
        chosen = _device(f"cuda:{torch.cuda.current_device() if own is None else own}")
        torch.cuda.set_device(chosen)  # streams, graphs and Triton kernels use the current device
    if world == 1:
        return DistributedContext(chosen)
    if not dist.is_initialized():
        _check_launched(world)
        if chosen.type == "cuda":
            dist.init_process_group("nccl", device_id=chosen)
        else:
            dist.init_process_group("gloo")
        # Kept for later runs of this process: the store of torchrun does not accept a second group of the same name.
        atexit.register(_leave)
    return DistributedContext(chosen, dist.get_rank(), dist.get_world_size())


def check_one_process() -> None:
    """Refuse several processes for work that is not distributed: each would do all of it and write the same files."""
    if (world := _processes()) > 1:
        raise ValueError(
            f"expected one process, as batched runs share one device, got WORLD_SIZE={world}: start gossamer "
            "without torchrun; only gossamer train distributes its work among several processes"
        )


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_launched(world: int) -> None:
    """Check the environment before joining: a batch system may set the number of processes but not their ranks."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"expected {', '.join(missing)} with WORLD_SIZE={world}, as torchrun sets them, got none: start several "
            "processes with torchrun, or unset WORLD_SIZE for one"
        )


def _as_sent(error: Exception) -> Exception:
    """The error, or one with the same message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _own_gpu() -> int:
    """The GPU of this process on its machine."""
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

    One of several processes skips the finalization of the interpreter: a gloo thread of torch that still holds the last
    tensor it sent would release it then and abort the process (pytorch issue 190489; seen in 2 of 75 pairs of processes
    on a busy machine).
    """
    if not dist.is_initialized():
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def exit_at_once_after_an_error() -> Iterator[None]:
    """Exit at once after an error. Closing connections would wait for the other processes, which may be waiting for
    this one in the middle of a step. Their launcher notices the exit and stops them."""
    try:
        yield
    except BaseException:
        atexit.unregister(_leave)
        raise


@contextmanager
def advice_on_lost_processes() -> Iterator[None]:
    """Explain what to do if other processes of a run cannot be reached, for example because one of them died."""
    try:
        yield
    except RuntimeError as error:
        lost = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
        if not dist.is_initialized() or not any(each in str(error) for each in lost):
            raise
        first = str(error).splitlines()[0]
        raise RuntimeError(
            f"the other processes of this run cannot be reached ({first}): check whether one of them has logged why it "
            "ended, and run the same command again; it resumes from the last checkpoint, if there is one"
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
                f"device={name} was requested, but torch {torch.__version__} finds {found} CUDA devices here: "
                "set device=cpu (or auto), or install the driver and a torch built for CUDA"
            )
    return device


@contextmanager
def fast_algorithms(context: DistributedContext) -> Iterator[None]:
    """Let cuDNN time its algorithms for new shapes and use the fastest: here shapes never change."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or context.device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def autocast(run: Run, context: DistributedContext) -> torch.autocast:
    """The precision of the forward pass."""
    return torch.autocast(context.device.type, torch.bfloat16, enabled=run.precision == "bf16")


def synchronise_batch_norm(model: nn.Module, context: DistributedContext) -> nn.Module:
    """Compute the statistics of batch normalisation over the global batch, where torch supports it."""
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
    """Shard the parameters over the processes in place, if the run requests it."""
    if context.world > 1 and run.sharding == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh(context.device.type, (context.world,)))


def forward_of(model: nn.Module, run: Run, context: DistributedContext) -> Callable[..., Any]:
    """The model as called in a training step: synchronised over processes and compiled, if requested."""
    forward: Callable[..., Any] = model
    if context.world > 1 and run.sharding == "ddp":
        forward = nn.parallel.DistributedDataParallel(
            model, device_ids=[context.device] if context.device.type == "cuda" else None
        )
    return compiled(forward, context) if run.compile else forward


def compiled(forward: Callable[..., Any], context: DistributedContext) -> Callable[..., Any]:
    """Compiled, on a GPU with small kernels combined into one: ResNet-20 trains 7 % faster (docs/lab-book.md, 39.)."""
    return torch.compile(forward, options={"combo_kernels": True} if context.device.type == "cuda" else None)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model with sharded tensors gathered; all processes have to take part.

    Tied weights remain one tensor, so that they are saved once.
    """
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    sharded = {id(each): each for each in own.values() if isinstance(each, DTensor)}
    whole = {key: each.full_tensor().detach() for key, each in sharded.items()}
    return {name: whole[id(each)] if id(each) in whole else each.detach() for name, each in own.items()}
