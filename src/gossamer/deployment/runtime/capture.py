"""From a module to the network of the runtime: the shared graph is traced, and each of its ATen calls is translated.

A call without a translation raises ``UnsupportedError`` with the name of the call, and the caller falls back to the
model. Everything is for inference: dropout is removed, and normalisation uses its running statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from gossamer.deployment import graph
from gossamer.deployment.runtime import patterns
from gossamer.deployment.runtime.fusing import fuse
from gossamer.deployment.runtime.network import Network, UnsupportedError
from gossamer.deployment.runtime.translations import OF_LAZY, OF_VIEWS, TRANSLATIONS
from gossamer.deployment.runtime.translator import Translator


def capture(model: nn.Module, example_inputs: Sequence[Any]) -> Network:
    """The fused network of a model in evaluation mode, for inputs with the shapes of the examples except for the
    batch."""
    try:
        traced = graph.trace(model, tuple(example_inputs))
        module = traced.module
    except graph.UntraceableError as error:
        raise UnsupportedError(str(error)) from error
    patterns.recognise(module)
    structure = traced.program.call_spec.out_spec
    return fuse(Translator(module, TRANSLATIONS, OF_VIEWS, OF_LAZY).translate(structure))
