"""What hooks on an optimizer's step have to know: compilers, loss scaling, CUDA graphs."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

_Hook = TypeVar("_Hook", bound=Callable[..., object])


def uncompiled(hook: _Hook) -> _Hook:
    """The hook as plain Python between the graphs of a compiled step; `fullgraph=True` gets an error that says so.

    What the hooks do differs from step to step, so that a compiler would trace them anew each time.
    """
    reason = "gossamer sets the masks here: compile optimizer.step without fullgraph=True"
    wrapped: _Hook = torch.compiler.disable(hook, reason=reason)  # type: ignore[no-untyped-call]
    return wrapped


def unscaling(optimizer: Optimizer) -> Tensor | None:
    """What gradients have to be multiplied by where a GradScaler leaves their un-scaling to a fused optimizer."""
    scale = getattr(optimizer, "grad_scale", None)
    return None if scale is None else scale.double().reciprocal().float()


def capturing() -> bool:
    """Whether a CUDA graph is being captured, so that Python runs once for many steps."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
