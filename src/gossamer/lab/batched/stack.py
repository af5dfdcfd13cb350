"""Several networks of one architecture as one: their parameters stacked, the forward pass mapped over them."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from gossamer.lab.batched.blocks import plain, stackable
from gossamer.methods.base import Layout
from gossamer.methods.filters import norms_of
from gossamer.prunable import select


class NetworkStack:
    """The parameters of all networks, as one matrix with a row for each network, and a forward pass over all of them.

    The columns of `variables` are the prunable weights, then all other parameters. The forward pass reads copies,
    `leaves`, which may have lower precision: `update_leaves` fills them from `masked` and the other parameters.
    """

    def __init__(self, networks: Sequence[nn.Module], *, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.precise = torch.promote_types(dtype, torch.float32)
        self.template = stackable(copy.deepcopy(networks[0]).to(device))
        prunable = [weight.name for weight in select(self.template)]
        everything = [name for name, _ in self.template.named_parameters()]
        self.names = prunable + [name for name in everything if name not in prunable]
        shapes = [self.template.get_parameter(name).shape for name in self.names]
        self.shapes = dict(zip(self.names, shapes, strict=True))
        self.sizes = [shape.numel() for shape in shapes]
        self.prunable_sizes = self.sizes[: len(prunable)]
        self.prunable = sum(self.prunable_sizes)
        self.layout = self._lay_out()
        self.variables = torch.stack([self._row(network) for network in networks]).to(device, self.precise)
        self.buffers = {
            name: torch.stack([self._buffer(network.get_buffer(name)) for network in networks])
            for name, _ in self.template.named_buffers()
        }
        self._make_leaves()

    def __len__(self) -> int:
        return len(self.variables)

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of each network for its own images: (networks, batch, …) → (networks, batch, classes)."""
        return self.with_values(self.leaves, self.buffers, images)

    def with_values(self, leaves: dict[str, Tensor], buffers: dict[str, Tensor], images: Tensor) -> Tensor:
        """Logits of networks with other values, one for each row of these, for its own images."""
        return vmap(self._forward, randomness="different")(leaves, buffers, images)

    def on_same_images(self, images: Tensor) -> Tensor:
        """Logits of each network for the same images."""
        mapped = vmap(self._forward, in_dims=(0, 0, None), randomness="different")
        return mapped(self.leaves, self.buffers, images)

    def _forward(self, leaves: dict[str, Tensor], buffers: dict[str, Tensor], images: Tensor) -> Tensor:
        return functional_call(self.template, (leaves, buffers), (images,))  # type: ignore[no-any-return]

    def branch(self, rows: Sequence[int]) -> None:
        """Become a stack of copies: network i of the new stack is a copy of network rows[i] of this one."""
        index = torch.tensor(rows, device=self.device)
        self.variables = self.variables.index_select(0, index)
        self.buffers = {name: buffer.index_select(0, index) for name, buffer in self.buffers.items()}
        self._make_leaves()

    def gradients(self, loss: Tensor) -> Tensor:
        """The gradients of all parameters as a matrix like `variables`, until the next call."""
        # backward() would rearrange each gradient in memory before it stores it in a leaf.
        leaves = [self.leaves[name] for name in self.names]
        found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        columns = [_storage_order(gradient).reshape(len(self), -1) for gradient in found]
        if self.dtype is self.precise:
            return torch.cat(columns, dim=1, out=self._gradients)
        count = len(self.prunable_sizes)
        parts = [torch.cat(part, dim=1).to(self.precise) for part in (columns[:count], columns[count:]) if part]
        return torch.cat(parts, dim=1)

    def update_leaves(self) -> None:
        """Let the forward pass read `masked` and, of the other parameters, the variables."""
        if self.masked is not self._read:
            self._read.copy_(self.masked)
        self._read_others.copy_(self.variables[:, self.prunable :])

    def network(self, row: int, variables: Tensor) -> nn.Module:
        """One of the networks as a plain module, with these variables."""
        network = plain(copy.deepcopy(self.template))
        parts = variables[row].split(self.sizes)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, part in zip(self.names, parts, strict=True):
                parameter = network.get_parameter(name)
                _storage_order(parameter[None])[0].copy_(part.view(_storage_order(parameter[None]).shape[1:]))
            for name, buffer in self.buffers.items():
                network.get_buffer(name).copy_(buffer[row])
        return network

    def _lay_out(self) -> Layout:
        """Which columns are which tensor. Shapes are those in memory: inputs last."""
        tensors = len(self.prunable_sizes)
        names, others = self.names[:tensors], zip(self.names[tensors:], self.sizes[tensors:], strict=True)
        whole = (torch.empty((1, *self.shapes[name]), device="meta") for name in names)
        shapes = tuple(tuple(_storage_order(each).shape[1:]) for each in whole)
        return Layout(tuple(names), shapes, norms_of(self.template, names, list(others)))

    def _make_leaves(self) -> None:
        """The leaves are views into two matrices, so that all can be filled at once.

        `masked` is where methods write the weights of the forward pass, in full precision: the first of the two
        matrices, where it has that.
        """
        count = self.prunable
        self._read = self.variables[:, :count].to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        self.masked = self._read if self.dtype is self.precise else self.variables[:, :count].contiguous()
        self._read_others = self.variables[:, count:].clone()
        self._gradients = torch.empty_like(self.variables)  # memory that is touched already, which counts on a CPU
        columns = [
            *torch.split(self._read, self.prunable_sizes, dim=1),
            *torch.split(self._read_others, self.sizes[len(self.prunable_sizes) :], dim=1),
        ]
        self.leaves = {
            name: self._leaf(part, self.shapes[name]) for name, part in zip(self.names, columns, strict=True)
        }

    def _leaf(self, columns: Tensor, shape: torch.Size) -> Tensor:
        if len(shape) != 4:
            return columns.view(len(self), *shape).detach().requires_grad_()
        out, into, height, width = shape
        channels_last = columns.view(len(self), out, height, width, into)
        return channels_last.permute(0, 1, 4, 2, 3).detach().requires_grad_()

    def _row(self, network: nn.Module) -> Tensor:
        tensors = [network.get_parameter(name).detach()[None] for name in self.names]
        return torch.cat([_storage_order(tensor).reshape(-1) for tensor in tensors])

    def _buffer(self, buffer: Tensor) -> Tensor:
        return buffer.to(self.device, self.precise if buffer.is_floating_point() else buffer.dtype)


def _storage_order(stacked: Tensor) -> Tensor:
    """The axes in the order in which memory holds them: filters are kept channels-last, which GPUs prefer."""
    return stacked.detach().permute(0, 1, 3, 4, 2) if stacked.dim() == 5 else stacked.detach()
