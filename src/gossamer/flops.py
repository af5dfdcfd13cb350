"""FLOPs: the number of multiply-adds per weight in one forward pass, tensor by tensor.

Conventions. One multiply-add is two FLOPs. The FLOPs of a tensor are those of its weights alone: no bias, norm,
activation or product of two activations. Padding counts like any other input. A look-up multiplies nothing, so an
embedding counts 0 unless it is also used as a matrix (tied weights).

The count comes from the ATen operations, not from the modules. One forward pass in evaluation mode runs under a
dispatch mode that intercepts every matrix product and convolution and identifies weights by their memory. The graph of
``gossamer.deployment`` consists of the same operations and gives the same count. The model itself is run, because many
models cannot be exported (packed sequences, caches in the output, sharded weights). So ``F.linear(x,
self.embedding.weight)``, the packed projections of attention, recurrent layers, packed sequences, casts under autocast
and weights that a module rescales first are all counted, and a shared weight gets the sum over its uses.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.forward import arguments, batch_size_at, batch_size_of, first_input, undisturbed
from gossamer.prunable import Weight
from gossamer.sharding import local

FLOPS_PER_MULTIPLY_ADD = 2

# Products of two matrices (or stacks of them): the positions of the two among the arguments.
_MATRIX_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "_grouped_mm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), (1, 2)),
}
_RECURRENT = frozenset({"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"})
_LOOK_UPS = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only", "gather", "index_select"})


def positions(
    model: nn.Module, weights: Sequence[Weight], example_input: object, *, batch_size: int | None = None
) -> dict[str, int]:
    """Multiply-adds per weight of each tensor for one sample, by ``Weight.name``.

    ``example_input`` is a tensor, a tuple of positional inputs or a mapping of keyword inputs. The batch is the first
    axis of its first tensor (time-first recurrent and attention layers override this), unless ``batch_size`` gives the
    number of samples. The value is the number of vectors for a linear layer, of output pixels for a convolution
    (transposed: input pixels), and of time steps for a recurrent layer, averaged over the samples. It is 0 for a tensor
    that the forward pass does not use.

    If parts of a tensor are used unequally (the three packed projections of attention between sequences of different
    lengths), the value is the mean over its weights. Means are rounded, but never to 0. The model is run once, in
    evaluation mode, and is not changed.
    """
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        counter = _MultiplyAdds(model, weights)
        batch = _BatchSize(example_input)
        for handle in (*counter.follow(weights), *batch.watch(model)):
            stack.callback(handle.remove)
        if "torch._dynamo" in sys.modules:  # compiled regions would hide their operations
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # The fused attention kernel of evaluation mode would hide its products.
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        positional, keyword = arguments(example_input)
        with counter:
            model(*positional, **keyword)
    samples = batch.size if batch_size is None else batch_size
    return {weight.name: _per_weight(counter.totals[weight.name], weight, samples) for weight in weights}


def _per_weight(multiply_adds: int, weight: Weight, samples: int) -> int:
    if multiply_adds == 0:
        return 0
    return max(1, round(Fraction(multiply_adds, weight.parameter.numel() * max(1, samples))))


class _BatchSize:
    """The number of samples, from the first layer whose input has the leading shape of the example."""

    def __init__(self, example_input: object) -> None:
        self._example = first_input(arguments(example_input))
        self._found: int | None = None

    @property
    def size(self) -> int:
        return batch_size_of(self._example) if self._found is None else self._found

    def watch(self, model: nn.Module) -> list[Any]:
        return [module.register_forward_pre_hook(self._observe, with_kwargs=True) for module in model.modules()]

    def _observe(self, module: nn.Module, args: object, kwargs: object) -> None:
        if self._found is not None or not isinstance(self._example, Tensor):
            return
        value = first_input((args, kwargs))
        if isinstance(value, Tensor) and value.shape[:2] == self._example.shape[:2]:
            self._found = batch_size_at(module, value)


@dataclass(frozen=True)
class _Span:
    """A range of one memory block (in entries) that holds a weight or a copy of it."""

    start: int
    end: int
    name: str


class _MultiplyAdds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up, per weight, the multiply-adds of every operation that multiplies with it.

    A memory block is *constant* if it holds parameters, buffers or values computed only from these; the others depend
    on the input. A tensor computed from a weight and other constants, of the same size, stands for that weight: a cast,
    rescaled or masked copy.
    """

    def __init__(self, model: nn.Module, weights: Sequence[Weight]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.totals = {weight.name: 0 for weight in weights}
        self._constant: dict[int, Tensor] = {}  # keeps the tensor alive, so that its block is not reused
        self._spans: dict[int, list[_Span]] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._constant[_block(tensor)] = tensor
        for weight in weights:
            self._stands_for(weight.parameter, weight.name)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler, which takes seconds and is not needed

    def follow(self, weights: Sequence[Weight]) -> list[Any]:
        """Hooks for FSDP2, which puts the gathered weight into a module while the module runs."""
        handles: list[Any] = []
        for weight in weights:
            for use in weight.uses:
                begin: Callable[..., None] = partial(self._gathered, use.attribute, weight.name)
                handles.append(use.module.register_forward_pre_hook(begin))
        return handles

    def _gathered(self, attribute: str, name: str, module: nn.Module, _: object) -> None:
        tensor = module._parameters.get(attribute)
        if tensor is not None and self._name_of(tensor) != name:
            self._constant[_block(tensor)] = tensor
            self._stands_for(tensor, name)

    def _stands_for(self, tensor: Tensor, name: str) -> None:
        part = local(tensor)
        extent = sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
        start = int(part.storage_offset())
        self._spans.setdefault(_block(tensor), []).append(_Span(start, start + int(extent) + 1, name))

    def _name_of(self, tensor: Tensor) -> str | None:
        offset = local(tensor).storage_offset()
        spans = self._spans.get(_block(tensor), ())
        return next((span.name for span in spans if span.start <= offset < span.end), None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_constant = all(_block(tensor) in self._constant for tensor in inputs)
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        operation = func._schema.name.removeprefix("aten::")
        is_product = self._count(operation, args, inputs, outputs, is_constant)
        if is_constant:
            self._note_constants(inputs, outputs, carries=not is_product and operation not in _LOOK_UPS)
        else:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._forget(value)
        return out

    def _count(
        self,
        operation: str,
        args: tuple[Any, ...],
        inputs: list[Tensor],
        outputs: list[Tensor],
        constant: bool,
    ) -> bool:
        """Adds the multiply-adds of an operation to the weights among its operands; False if it has no
        multiply-adds."""
        if operation in _MATRIX_PRODUCTS:
            left, right = (args[index] for index in _MATRIX_PRODUCTS[operation])
            amount = left.numel() * (right.shape[-1] if right.ndim > 1 else 1)
            self._add(amount, left)
            self._add(amount, right)
        elif operation == "linear":
            self._add(args[0].numel() * args[1].shape[0], args[1])
        elif operation == "convolution":
            value, weight, is_transposed = args[0], args[1], args[6]
            self._add((value if is_transposed else outputs[0]).numel() * weight[0].numel(), weight)
        elif operation == "_trilinear":
            self._add(args[0].shape[0] * args[1].numel(), args[1])
        elif operation in _RECURRENT:
            steps = args[0].numel() // args[0].shape[-1]
            for tensor in inputs[1:]:
                if tensor.ndim == 2:
                    self._add(steps * tensor.numel(), tensor)
        elif operation == "mul" and not constant:
            for tensor in inputs:
                self._add(outputs[0].numel(), tensor)
        else:
            return False
        return True

    def _add(self, multiply_adds: int, operand: Tensor) -> None:
        name = self._name_of(operand)
        if name is not None:
            self.totals[name] += multiply_adds

    def _note_constants(self, inputs: list[Tensor], outputs: list[Tensor], *, carries: bool) -> None:
        sources = [(tensor.numel(), self._name_of(tensor)) for tensor in inputs]
        for output in outputs:
            if _block(output) in self._constant:
                continue
            self._constant[_block(output)] = output
            for size, name in sources:
                if carries and name is not None and size == output.numel() and output.is_floating_point():
                    self._stands_for(output, name)
                    break

    def _forget(self, written: object) -> None:
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor):
                self._constant.pop(_block(tensor), None)
                self._spans.pop(_block(tensor), None)


def _block(tensor: Tensor) -> int:
    """An identifier of the memory block of a tensor, unique while the block is alive."""
    return int(local(tensor).untyped_storage()._cdata)
