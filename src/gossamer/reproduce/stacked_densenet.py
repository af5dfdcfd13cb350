"""Many fully connected DenseNets as one: their parameters are the rows of one matrix, their layers batched products.

Concatenation is never done on the pixels. Every layer reads them directly, so what the pixels contribute to all layers
is one product with all the pixel columns of all the weights; what is left for each layer in turn is its few hidden
columns. The gradient of a row is that of the network alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.models.fc_densenet import FullyConnectedDenseNet, FullyConnectedLayer
from gossamer.select import select


class DenseNetStack:
    """Networks of one shape. Columns of `variables` are the connections, tensor by tensor, then all other parameters.

    The forward pass reads `shown`, where masked weights are put; autograd leaves one matrix of gradients there.
    """

    def __init__(self, networks: Sequence[FullyConnectedDenseNet], device: torch.device) -> None:
        first = networks[0]
        self._layers = [layer for layer in first.features if isinstance(layer, FullyConnectedLayer)]
        self._pixels = self._layers[0].linear.in_features
        connections = [weight.name for weight in select(first)]
        others = [name for name, _ in first.named_parameters() if name not in connections]
        self.names = connections + others
        self.shapes = [first.get_parameter(name).shape for name in self.names]
        self._sizes = [shape.numel() for shape in self.shapes]
        self.connection_shapes = self.shapes[: len(connections)]
        self.connection_sizes = self._sizes[: len(connections)]
        self.connections = sum(self.connection_sizes)
        rows = [torch.cat([net.get_parameter(name).detach().flatten() for name in self.names]) for net in networks]
        self.variables = torch.stack(rows).to(device)
        self.shown = self.variables.clone().requires_grad_()
        statistics = [name for name, buffer in first.named_buffers() if buffer.is_floating_point()]
        self.buffers = {name: torch.stack([net.get_buffer(name) for net in networks]).to(device) for name in statistics}

    def __len__(self) -> int:
        return len(self.variables)

    def __call__(self, images: Tensor, *, training: bool) -> Tensor:
        """Logits (networks, batch, classes) for images (networks, batch, …), or (1, batch, …) for all the same."""
        pixels = images.flatten(2).expand(len(self), -1, -1)
        values = dict(zip(self.names, self._parts(self.shown), strict=True))
        weights = [values[name] for name in self.names[: len(self.connection_shapes)]]
        widths = [weight.shape[2] - self._pixels for weight in weights]
        parts = [
            torch.split(weight, [self._pixels, width], dim=2) for weight, width in zip(weights, widths, strict=True)
        ]
        from_pixels = torch.bmm(pixels, torch.cat([part[0] for part in parts], dim=1).transpose(1, 2))
        # The classifier is the last of the weights, so its share of the product is the last one too.
        *inputs, logits = torch.split(from_pixels, [weight.shape[1] for weight in weights], dim=2)
        hidden = pixels[:, :, :0]
        for index, (layer, x) in enumerate(zip(self._layers, inputs, strict=True)):
            if index:
                x = torch.baddbmm(x, hidden, parts[index][1].transpose(1, 2))
            normal = self._normalise(x, f"features.{index}.bn", layer, values, training=training)
            hidden = torch.cat((hidden, normal.relu()), dim=2) if index else normal.relu()
        logits = torch.baddbmm(logits, hidden, parts[-1][1].transpose(1, 2))
        return logits + values["classifier.bias"][:, None, :]

    def fill_(self, network: FullyConnectedDenseNet, row: int) -> FullyConnectedDenseNet:
        """Put what the forward pass of one of the networks uses into a plain one."""
        with torch.no_grad():
            for name, part in zip(self.names, self._parts(self.shown), strict=True):
                network.get_parameter(name).copy_(part[row])
            for name, buffer in self.buffers.items():
                network.get_buffer(name).copy_(buffer[row])
        return network

    def _parts(self, matrix: Tensor) -> list[Tensor]:
        parts = torch.split(matrix, self._sizes, dim=1)
        return [part.view(len(part), *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _normalise(
        self, x: Tensor, name: str, layer: FullyConnectedLayer, values: dict[str, Tensor], *, training: bool
    ) -> Tensor:
        """Batch normalisation with the units of all networks side by side."""
        networks, batch, units = x.shape
        result = F.batch_norm(
            x.transpose(0, 1).reshape(batch, networks * units),
            self.buffers[f"{name}.running_mean"].view(-1),
            self.buffers[f"{name}.running_var"].view(-1),
            values[f"{name}.weight"].reshape(-1),
            values[f"{name}.bias"].reshape(-1),
            training,
            layer.bn.momentum or 0.0,
            layer.bn.eps,
        )
        return result.view(batch, networks, units).transpose(0, 1)
