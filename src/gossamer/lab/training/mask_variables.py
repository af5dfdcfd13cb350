"""The mask variables and the dense weights of a run, kept for `gossamer frontier`: the order of all its weights."""

from pathlib import Path

import safetensors.torch
from torch import Tensor, nn

from gossamer.io.sparse_file import load
from gossamer.lab.checkpoint import write_atomically
from gossamer.sparsifier import Sparsifier

MASK_VARIABLES = "mask_variables.safetensors"
_STATE, _VARIABLE = "state:", "mask_variable:"


def are_final_after(sparsifier: Sparsifier, step: int) -> bool:
    """Whether the masks train in this step for the last time."""
    plan = sparsifier.plan
    return plan.at(step).phase.masks_train and not plan.at(step + 1).phase.masks_train


def write(folder: Path, model: nn.Module, sparsifier: Sparsifier) -> None:
    """Write the state of the model with dense weights, and the mask variables of methods that have them."""
    state = sparsifier.state_dict()
    tensors = {f"{_STATE}{name}": tensor for name, tensor in {**model.state_dict(), **state["dense"]}.items()}
    tensors |= {f"{_VARIABLE}{name}": tensor for name, tensor in state.get("mask_variable", {}).items()}
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / MASK_VARIABLES, lambda file: file.write(safetensors.torch.save(plain)))


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state of the model, and the mask variables."""
    tensors = load(folder / MASK_VARIABLES)

    def those(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    return those(_STATE), those(_VARIABLE)
