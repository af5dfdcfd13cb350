"""From a module to the graph of the runtime: ``torch.export`` traces it, each ATen call is translated.

A call that has no translation is no failure of the program: it raises ``UnsupportedError`` with the name of
the call, and the caller keeps the model as it is. Everything is for inference: dropout is left out,
normalisation uses its running statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gossamer._forward import quiet_export
from gossamer.deployment.runtime.fusing import fuse
from gossamer.deployment.runtime.graph import Graph, UnsupportedError
from gossamer.deployment.runtime.translations import TRANSLATIONS
from gossamer.deployment.runtime.translator import Translator


def capture(model: nn.Module, example_inputs: Sequence[Any]) -> Graph:
    """The fused graph of a model in evaluation mode, for inputs shaped like the examples except for their
    batch."""
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with quiet_export():
            program = torch.export.export(model, tuple(example_inputs), strict=False)
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        raise UnsupportedError(f"torch.export cannot trace {type(model).__name__}: {said[:300]}") from error
    finally:
        for module, mode in training.items():
            module.training = mode
    return fuse(Translator(program, TRANSLATIONS).translate())
