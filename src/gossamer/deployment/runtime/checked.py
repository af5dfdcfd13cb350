"""Checks of tensors before native code reads them.

Native code gets only an address, so the memory behind it is checked first: it must be a float32 tensor on the CPU whose
storage contains every element at its strides. Other tensors (negated views, wrappers of a transform, freed storages)
are either copied into such a tensor or refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

#: Dispatch keys of a tensor that stores its values directly; gradients and autocast do not change them.
_PLAIN_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
for _key in ("ADInplaceOrView", "AutogradCPU", "AutocastCPU"):
    _PLAIN_KEYS = _PLAIN_KEYS.add(getattr(torch._C.DispatchKey, _key))

is_dynamo_compiling = torch.compiler.is_dynamo_compiling
dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
tracing_state = torch._C._get_tracing_state


def intercepted() -> bool:
    """Whether something observes or replaces torch's calls: a mode, a trace, a transform, forward-mode gradients."""
    return bool(
        dispatch_modes()
        or function_modes()
        or tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is a strided CPU tensor without a subclass, transform or lazy negation."""
    if type(x) not in (Tensor, torch.nn.Parameter):
        return False
    keys = torch._C._dispatch_keys(x)
    return bool(keys.raw_repr() & ~_PLAIN_KEYS.raw_repr() == 0 and keys.has(torch._C.DispatchKey.CPU))


def check_tensors(inputs: Sequence[Any]) -> None:
    """Raise for values that are not tensors, and for tensors without strides."""
    for x in inputs:
        if not isinstance(x, Tensor):
            raise TypeError(f"expected tensors, got a {type(x).__name__}; convert it first")
        if x.is_nested or x.layout is not torch.strided:
            kind = "a nested tensor" if x.is_nested else f"the layout {x.layout}"
            raise ValueError(f"expected a dense, strided tensor, got {kind}; convert it first, e.g. with .to_dense()")


def check_kind(x: Tensor, dtype: torch.dtype, *, devices: tuple[str, ...] = ("cpu",)) -> None:
    if x.dtype is not dtype or x.device.type not in devices:
        raise ValueError(f"expected {dtype} on the CPU, got {x.dtype} on {x.device}; convert it first")


def readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor itself, or a copy: contiguous, without lazy operations, and with every element inside its storage."""
    check_kind(x, dtype)
    _check_storage(x)
    if x.is_neg() or x._is_zerotensor() or not x.is_contiguous():
        x = x.clone(memory_format=torch.contiguous_format).resolve_neg()
    keys = torch._C._dispatch_keys(x)
    if keys.raw_repr() & ~_PLAIN_KEYS.raw_repr():
        raise ValueError(
            f"expected a tensor with its own memory, got one that torch handles by {keys}; "
            "pass a plain tensor (a copy made with .clone() outside of the transform)"
        )
    _check_storage(x)
    if x.numel() and x.data_ptr() == 0:
        raise ValueError("expected a tensor with data, got one without memory; pass a copy of its values")
    return x


def _check_storage(x: Tensor) -> None:
    if x._is_zerotensor() or not x.numel():
        return
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    needed = (x.storage_offset() + last + 1) * x.element_size()
    if (found := x.untyped_storage().nbytes()) < needed:
        raise ValueError(
            f"expected a storage of at least {needed} bytes behind a tensor of shape {tuple(x.shape)}, got {found}: "
            "it was freed or made smaller; pass a tensor that still holds its values"
        )


def empty(shape: tuple[int, ...], device: str | torch.device = "cpu") -> Tensor:
    """Memory for outputs, independent of default dtype and default device."""
    return torch.empty(shape, dtype=torch.float32, device=device, requires_grad=False)
