"""The fallback for networks without a native form: torch runs them, and only sparse linear layers are replaced.

With a compiler, these layers run through the native kernels, one call per layer. Without one they use the CSR products
of torch, which are fast only in one form: 32-bit indices, the weight on the left, the batch as columns in panels of 64.
Everything else (convolutions, recurrent layers, attention) does not change.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.deployment.runtime.capture import capture
from gossamer.deployment.runtime.native import Native
from gossamer.deployment.runtime.native_model import NativeModel

PANEL = 64
SPARSE_BELOW = 0.25  # above this density, a sparse product is always slower than a dense layer
Multiply = Callable[[Tensor], Tensor]


def csr_linear(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` for a CSR weight."""
    flat = x.reshape(-1, x.shape[-1])
    panels = [(weight @ flat[i : i + PANEL].t().contiguous()).t() for i in range(0, flat.shape[0], PANEL)]
    y = torch.cat(panels) if panels else flat.new_empty(0, weight.shape[0])
    y = y if bias is None else y + bias
    return y.reshape(*x.shape[:-1], weight.shape[0])


def to_csr(weight: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks)")
        wide = weight.detach().to_sparse_csr()
        columns, rows = wide.col_indices().int(), wide.crow_indices().int()
        return torch.sparse_csr_tensor(rows, columns, wide.values(), size=weight.shape, check_invariants=True)


class _CsrProduct:
    def __init__(self, layer: nn.Linear) -> None:
        self._weight, self._bias = to_csr(layer.weight), layer.bias

    def __call__(self, x: Tensor) -> Tensor:
        return csr_linear(self._weight, x, self._bias)


class _NativeProduct:
    def __init__(self, layer: nn.Linear, native: Native) -> None:
        example = torch.zeros(1, layer.in_features, dtype=torch.float32, device="cpu")
        self._product = NativeModel(capture(layer, (example,)), native)
        self._features = layer.in_features, layer.out_features

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._product(x.reshape(-1, self._features[0]))
        return y.reshape(*x.shape[:-1], self._features[1])


def by_csr(layer: nn.Linear) -> Multiply:
    return _CsrProduct(layer)


def by_native(native: Native) -> Callable[[nn.Linear], Multiply]:
    return lambda layer: _NativeProduct(layer, native)


class _SparseLinear(nn.Module):
    """Replaces a linear layer and keeps its parameters, in case other code reads them."""

    def __init__(self, layer: nn.Linear, multiply: Multiply) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._multiply = multiply

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32 or not x.is_cpu or x.numel() == 0:
            return F.linear(x, self.weight, self.bias)
        return self._multiply(x)


class SparseLinears:
    """A copy of a model with other products for its sparse linear layers; ``sparse`` has their names."""

    def __init__(self, model: nn.Module, make: Callable[[nn.Linear], Multiply]) -> None:
        self._model = copy.deepcopy(model).eval()
        self.sparse: list[str] = []
        for name, layer in list(self._model.named_modules()):
            if _can_be_replaced(layer) and isinstance(layer, nn.Linear):
                self.sparse.append(name)
                sparse = _SparseLinear(layer, make(layer)).eval()
                if name:
                    self._model.set_submodule(name, sparse)
                else:
                    self._model = sparse

    def __call__(self, *inputs: Any) -> Any:
        with torch.no_grad():
            return self._model(*inputs)


def _can_be_replaced(layer: nn.Module) -> bool:
    """Whether a layer is sparse and plain: derived classes and hooks may compute something else."""
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    weight = layer.weight
    plain = weight.dtype == torch.float32 and weight.is_cpu
    return plain and int(torch.count_nonzero(weight)) < SPARSE_BELOW * weight.numel()
