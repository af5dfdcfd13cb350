"""Hooks on an optimizer's step that survive `torch.compile(optimizer.step)`."""

from collections.abc import Callable
from typing import TypeVar

import torch

_Hook = TypeVar("_Hook", bound=Callable[..., object])


def uncompiled(hook: _Hook) -> _Hook:
    """The hook as plain Python between the graphs of a compiled step; `fullgraph=True` gets an error that says so.

    What the hooks do differs from step to step, so that a compiler would trace them anew each time.
    """
    reason = "gossamer sets the masks here: compile optimizer.step without fullgraph=True"
    wrapped: _Hook = torch.compiler.disable(hook, reason=reason)  # type: ignore[no-untyped-call]
    return wrapped
