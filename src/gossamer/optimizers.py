"""Facts about optimizers: the weights they own, compiled steps, loss scaling, CUDA graphs and nested calls."""

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.prunable import Weight

_Hook = TypeVar("_Hook", bound=Callable[..., object])


def uncompiled(hook: _Hook) -> _Hook:
    """The hook as plain Python between the graphs of a compiled step; with `fullgraph=True`, compilation fails.

    The hooks do different things in different steps, so a compiler would recompile them every time.
    """
    reason = "gossamer sets the masks here: compile optimizer.step without fullgraph=True"
    wrapped: _Hook = torch.compiler.disable(hook, reason=reason)  # type: ignore[no-untyped-call]
    return wrapped


def unscaling(optimizer: Optimizer) -> Tensor | None:
    """The factor that unscales gradients, if a GradScaler leaves that to a fused optimizer; otherwise None."""
    scale = getattr(optimizer, "grad_scale", None)
    return None if scale is None else scale.double().reciprocal().float()


# Wrappers that delegate the step to the optimizer inside, and have no hooks.
_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that takes the steps, inside the wrappers of accelerate and Lightning."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer or a list of them, got a {type(optimizer).__name__}: pass the optimizer "
            "itself. If the wrapper changes the weights after its step, use an optimizer that needs no wrapper, such "
            "as schedulefree.SGDScheduleFree instead of ScheduleFreeWrapper"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"expected an optimizer that runs the hooks of torch.optim.Optimizer, got a {type(optimizer).__name__}, "
            "whose class does not call super().__init__(): add that call, or give the optimizer inside if its step() "
            "is the last to change the weights"
        )
    if not getattr(type(optimizer).step, "hooked", False):
        optimizer._patch_step_function()  # Optimizer.__init__ does this; Lookahead of timm does not call it
    return optimizer


def learning_rate(group: dict[str, Any]) -> float | Tensor | None:
    """The learning rate of a parameter group. None: the optimizer finds its own rate (Adafactor)."""
    rate: float | Tensor | None = group.get("lr")
    return rate


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether steps do not grow with the gradient (Adam, Lion, Muon, …), as those of SGD and its relatives do."""
    if "sgd" in type(optimizer).__name__.lower():
        return False
    return any(not {"betas", "eps"}.isdisjoint(group) for group in optimizer.param_groups)


def differentiates_gradients(optimizer: Optimizer) -> bool:
    """Whether gradients have a graph (`backward(create_graph=True)`), for an optimizer of second order."""
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return any(gradient is not None and gradient.requires_grad for gradient in gradients)


class follow_modes:
    """Calls `changed` after each `train()` and `eval()` of an optimizer that has them, as schedule-free ones do."""

    def __init__(self, optimizer: Optimizer, changed: Callable[[Optimizer], None]) -> None:
        self._optimizer, self._names = optimizer, list[str]()
        for name in ("train", "eval"):
            original = getattr(optimizer, name, None)
            if callable(original) and name not in vars(optimizer):
                setattr(optimizer, name, self._followed(original, changed))
                self._names.append(name)

    def _followed(self, original: Callable[..., object], changed: Callable[[Optimizer], None]) -> Callable[..., object]:
        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            result = original(*args, **kwargs)
            changed(self._optimizer)
            return result

        return call

    def remove(self) -> None:
        for name in self._names:
            vars(self._optimizer).pop(name, None)


def evaluates(optimizer: Optimizer) -> bool:
    """Whether a schedule-free optimizer has put its evaluation weights into the parameters."""
    return any(group.get("train_mode") is False for group in optimizer.param_groups) and hasattr(optimizer, "eval")


def capturing() -> bool:
    """Whether a CUDA graph is being captured, so that Python runs once for many steps."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_nested(optimizer: Optimizer) -> bool:
    """Whether the hook runs inside another step of the same optimizer.

    torch wraps the `step` of a class when the class is first instantiated, so a subclass whose `step` calls
    `super().step()` runs all hooks twice per step if its parent was instantiated before: once around its own step and
    once around its parent's.
    """
    wrapped = [vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind)]
    if sum(getattr(step, "hooked", False) for step in wrapped) < 2:
        return False
    calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        calls += _is_step_of(frame, optimizer)
        frame = frame.f_back
    return calls > 1


def _is_step_of(frame: FrameType, optimizer: Optimizer) -> bool:
    """Whether the frame is torch's wrapper around a step of the optimizer."""
    code = frame.f_code
    if code.co_name != "wrapper" or frame.f_globals.get("__name__") != "torch.optim.optimizer":
        return False
    arguments = frame.f_locals.get("args", ())
    return len(arguments) > 0 and arguments[0] is optimizer


def owned_by(optimizers: Sequence[Optimizer], weights: Sequence[Weight]) -> list[tuple[Optimizer, list[int]]]:
    """The indices of the weights that each optimizer updates. Raises unless exactly one optimizer updates each."""
    owners: list[list[int]] = [[] for _ in weights]
    for number, optimizer in enumerate(optimizers):
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for index, weight in enumerate(weights):
            if id(weight.parameter) in held:
                owners[index].append(number)
    problems = []
    for weight, numbers in zip(weights, owners, strict=True):
        if not numbers:
            problems.append(
                f"{weight.name} is not in the optimizer: pass the optimizer that updates it (a list if there are "
                "several), or exclude it. An engine that flattens parameters, such as DeepSpeed ZeRO, is not supported"
            )
        if len(numbers) > 1:
            problems.append(f"{weight.name} is in {len(numbers)} optimizers: keep it in one of them, or exclude it")
    if problems:
        raise ValueError("weights that cannot be made sparse:\n  " + "\n  ".join(problems))
    return [
        (optimizer, [index for index, numbers in enumerate(owners) if numbers == [number]])
        for number, optimizer in enumerate(optimizers)
    ]
