"""How far one gradient takes a weight in all, as the optimizer has it: what `halfway` masks need to know.

An optimizer moves a weight by −η·g at once or, with momentum μ, by that much over the next steps until it is
−η·g/(1 − μ) in all; one that divides by the size of past gradients divides this too. The factor before −g is the reach.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.sharding import local

# The mean square of past gradients by the name it has in an optimizer's state, the best first.
_SQUARES = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")


def reaches(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """For each parameter one number, or one for each weight. Parameters of one group share the tensor of a number."""
    chosen = {id(parameter) for parameter in parameters}
    found: dict[int, Tensor] = {}
    for group in optimizer.param_groups:
        plain: Tensor | None = None
        for parameter in group["params"]:
            if id(parameter) not in chosen:
                continue
            if plain is None:
                plain = _plain(group, local(parameter))
            found[id(parameter)] = _reach(plain, group, optimizer.state.get(parameter, {}))
    return [found[id(parameter)] for parameter in parameters]


def _plain(group: Mapping[str, Any], like: Tensor) -> Tensor:
    """η/(1 − μ). The running mean of Adam weighs a gradient by 1 − β1 first, so that in all it is 1."""
    factor = (1.0 - group.get("dampening", 0.0)) / (1.0 - group.get("momentum", 0.0))
    rate: Tensor | float = group["lr"]
    if isinstance(rate, Tensor):  # that of a captured step, which is set before each replay
        moved: Tensor = (rate * factor).to(like.device)
        return moved
    return torch.full((), rate * factor, dtype=like.dtype, device=like.device)


def _reach(plain: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    name = next((each for each in _SQUARES if each in state), None)
    if name is None:
        return plain
    squares: Tensor = local(state[name])
    if "betas" in group:
        squares = squares / (1.0 - group["betas"][1] ** state["step"])
    reach: Tensor = plain / (squares.sqrt() + group.get("eps", 0.0))
    return reach
