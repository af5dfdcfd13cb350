"""Where there are no native kernels: torch itself, with sparse linear layers as CSR products.

torch's CSR product is fast only one way round: 32-bit indices, the weight on the left, the batch as columns
in panels of 64. Any other way is slower than a dense layer, so everything else (convolutions, recurrent
layers) stays dense.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

PANEL = 64
SPARSE_BELOW = 0.25  # density above which torch's CSR product has no chance against a dense layer


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


class CsrModel:
    """An exported network, its sparse linear layers run by torch's CSR product."""

    def __init__(self, model: nn.Module, example_inputs: tuple[Tensor, ...]) -> None:
        training = model.training
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                # The batch may differ from the example's, in every input's first dimension.
                batch = torch.export.Dim.AUTO
                shapes = tuple({0: batch} for _ in example_inputs)
                program = torch.export.export(model.eval(), example_inputs, dynamic_shapes=shapes, strict=False)
        finally:
            model.train(training)
        self._module = program.module()
        state = dict(self._module.state_dict())
        self.sparse: dict[str, Tensor] = {}
        for node in self._module.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                name = str(node.args[1].target)
                weight = state.get(name)
                if weight is not None and weight.dtype == torch.float32:
                    density = float(torch.count_nonzero(weight)) / max(1, weight.numel())
                    if density < SPARSE_BELOW:
                        self.sparse[name] = to_csr(weight)

    def __call__(self, *inputs: Tensor) -> Any:
        with torch.no_grad():
            return _Interpreter(self._module, self.sparse).run(*inputs)


class _Interpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, sparse: dict[str, Tensor]) -> None:
        super().__init__(module)
        self._sparse = sparse

    def run_node(self, n: fx.Node) -> Any:
        if n.target is torch.ops.aten.linear.default:
            name = str(cast(fx.Node, n.args[1]).target)
            if name in self._sparse:
                args, _ = self.fetch_args_kwargs_from_env(n)
                x, _, *bias = args
                return csr_linear(self._sparse[name], cast(Tensor, x), cast(Tensor, bias[0]) if bias else None)
            args, _ = self.fetch_args_kwargs_from_env(n)
            return F.linear(*cast(tuple[Tensor, Tensor], args))
        return super().run_node(n)
