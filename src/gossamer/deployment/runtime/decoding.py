"""Generation of text, token by token, with a cache of keys and values.

A causal language model that runs natively for a sequence of tokens is turned into the network of one token: everything
but attention treats tokens alone, positions become columns of their planes, and attention recalls the keys and values
of earlier tokens. No code of the model about caches is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.deployment.runtime.native_model import NativeModel
from gossamer.deployment.runtime.network import (
    Affine,
    Attention,
    Cache,
    Column,
    Constant,
    Embed,
    Network,
    Normalise,
    Operation,
    Pointwise,
    Product,
    Recall,
    Source,
    UnsupportedError,
    Value,
)
from gossamer.deployment.runtime.plan_attention import memory_size
from gossamer.deployment.runtime.tuning import tune

_TOKENS, _POSITIONS, _MEMORY = range(3)  # inputs of the network of one token


class Decoder:
    """Generates sequences of a causal language model: call it with the next tokens, (batch, count), and it returns the
    outputs for the last of them, (batch, vocabulary). ``length`` is the maximum number of tokens, that of the example
    with which the model was deployed."""

    def __init__(self, model: NativeModel, *, batch: int = 1, seconds: float = 0.5) -> None:
        if batch < 1:
            raise ValueError(f"expected a batch size of at least 1, got {batch}")
        graph, self.length, size = one_token(model.graph)
        self.native = NativeModel(graph, model.native)
        self.batch = batch
        self._memory = torch.zeros(batch, size, dtype=torch.float32)
        self._positions = torch.zeros(batch, 1, dtype=torch.int64)
        if seconds > 0:
            example = torch.zeros(batch, 1, dtype=torch.int64), self._positions, self._memory
            self.native.choose(batch, tune(self.native, example, 1, seconds).setting)
        self.reset()

    @property
    def position(self) -> int:
        """The number of tokens so far."""
        return int(self._positions[0, 0])

    def reset(self) -> None:
        """Forget all tokens."""
        self._positions.zero_()

    def __call__(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2 or tokens.shape[0] != self.batch or tokens.shape[1] < 1:
            raise ValueError(f"expected tokens of shape ({self.batch}, 1 or more), got {tuple(tokens.shape)}")
        if self.position + tokens.shape[1] > self.length:
            raise ValueError(
                f"expected at most {self.length} tokens, got {self.position} and {tokens.shape[1]} more; "
                "deploy the model with a longer example, or call reset()"
            )
        for each in torch.split(tokens, 1, 1):
            logits: Tensor = self.native(each.contiguous(), self._positions, self._memory)
            self._positions += 1
        return logits


def one_token(graph: Network) -> tuple[Network, int, int]:
    """The network of one token, the maximum number of tokens, and the floats of its memory.

    Raises ``UnsupportedError`` unless every operation but causal attention treats the tokens alone.
    """
    length = graph.values[graph.outputs[0]].width
    if (
        len(graph.outputs) != 1
        or [source.form for source in graph.inputs] != ["tokens"]
        or graph.forms[0] != "sequence"
    ):
        raise UnsupportedError("a decoder needs one input, of tokens, and one output, for each of them")
    values = [Value(value.channels, 1, 1) for value in graph.values]
    operations: list[Operation] = []
    size = 0
    for operation in graph.operations:
        if graph.values[operation.y].pixels != length:
            raise UnsupportedError(f"a decoder with {operation.name}, which does not treat each token alone")
        if isinstance(operation, Attention):
            operations.append(_recall(operation, length, size))
            size += memory_size(operation.heads, length)
        elif isinstance(operation, Constant):
            operations.append(Column(operation.y, operation.planes, _POSITIONS, operation.name))
        elif _is_alone(operation):
            operations.append(operation)
        else:
            raise UnsupportedError(f"a decoder with {operation.name}, which does not treat each token alone")
    y = graph.outputs[0]
    inputs = Source("tokens", (1, 1)), Source("tokens", (1, 1)), Source("vector", (1, size))
    shape = (1, values[y].channels)
    return Network(values, operations, (y,), ("vector",), (shape,), inputs, False), length, size


def _is_alone(operation: Operation) -> bool:
    """Whether an operation computes each pixel from that pixel."""
    if isinstance(operation, Product):
        taps = operation.taps
        return operation.stride == (1, 1) and operation.padding == (0, 0) and not (taps.dx.any() or taps.dy.any())
    return isinstance(operation, Embed | Affine | Pointwise) or (
        isinstance(operation, Normalise) and operation.each_pixel
    )


def _recall(attention: Attention, length: int, first: int) -> Recall:
    plain = attention.causal and attention.mask is None and attention.hidden is None
    if not plain or attention.lengths != (length, length) or any(heads.pixel for heads in attention.heads):
        raise UnsupportedError(f"a decoder with attention {attention.name} that is not causal, or has another mask")
    return Recall(
        *(attention.x, attention.keys, attention.source, attention.y),
        heads=attention.heads,
        scale=attention.scale,
        cache=Cache(_POSITIONS, _MEMORY, first, length),
        name=attention.name,
    )
