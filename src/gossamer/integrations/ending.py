"""The end of a run whose loop may have exchanged the weights."""

import torch
from torch import nn

from gossamer.selectors import clean_name
from gossamer.sparsifier import Sparsifier


def finish_with_current_weights(sparsifier: Sparsifier, model: nn.Module) -> None:
    """`finish()` for a model whose weights may have been replaced by averages or by those of a checkpoint: these stay,
    under the final masks."""
    if not sparsifier.weights_changed():
        sparsifier.finish()
        return
    names = {weight.name for weight in sparsifier.weights}
    parameters = {
        clean_name(name, model): each for name, each in model.named_parameters() if clean_name(name, model) in names
    }
    with torch.no_grad():
        current = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        sparsifier.restore_weights()
        sparsifier.finish()
        for name, parameter in parameters.items():
            parameter.copy_(current[name])
    sparsifier.impose(model)
