"""Small networks of each kind, and ways to kill features in them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 4))


def convolutions() -> nn.Module:
    """Padded and unpadded convolutions, normalisation, both pools, flattening."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(10, 7, 1), nn.SiLU(), nn.Flatten(), nn.Linear(28, 9), nn.ReLU(), nn.Linear(9, 4)),
    )


def mobile() -> nn.Module:
    """Depth-wise and grouped convolutions."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
        *(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
        *(nn.Conv2d(8, 12, 1), nn.Conv2d(12, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 16, 3, groups=8)),
        *(nn.Conv2d(16, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )


class ResNeXt(nn.Module):
    """Grouped convolutions of several channels a group: on the input, padded inside a residual block, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 12, 3, padding=1, groups=3), nn.BatchNorm2d(12)
        self.narrow, self.norm1 = nn.Conv2d(12, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.grouped, self.norm2 = nn.Conv2d(16, 24, 3, padding=1, groups=4, bias=False), nn.BatchNorm2d(24)
        self.wide = nn.Conv2d(24, 12, 1)
        self.down, self.up = nn.Conv2d(12, 8, 2, 2, groups=2), nn.ConvTranspose2d(8, 12, 2, 2, groups=4)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        y = F.relu(self.norm2(self.grouped(F.relu(self.norm1(self.narrow(x))))))
        x = F.relu(x + self.wide(y))
        return self.head(F.relu(self.up(F.relu(self.down(x)))).mean((2, 3)))


class Residual(nn.Module):
    """Two blocks with a shortcut that subsamples and pads channels, one with a convolution, a gate, a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.a1, self.a2 = nn.Conv2d(6, 7, 3, padding=1), nn.Conv2d(7, 6, 3, padding=1)
        self.norm_a = nn.BatchNorm2d(6)
        self.b1, self.b2 = nn.Conv2d(6, 5, 3, stride=2, padding=1), nn.Conv2d(5, 10, 1)
        self.c1, self.shortcut = nn.Conv2d(10, 8, 1), nn.Conv2d(10, 8, 1, bias=False)
        self.squeeze, self.excite = nn.Linear(8, 4), nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.norm_a(self.a2(F.relu(self.a1(x)))) + x)
        x = self.b2(F.relu(self.b1(x))) + F.pad(F.avg_pool2d(x, 2), (0, 0, 0, 0, 1, 3))
        y = self.c1(F.relu(x)) * self.scale
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        y = y * gate.view(gate.size(0), 8, 1, 1) + self.shortcut(x)
        return self.head(F.relu(y).mean((2, 3)))


class Concatenated(nn.Module):
    """A dense block, a U-shaped detour and a view with sizes written out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(9, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(9)
        self.down, self.up = nn.Conv2d(14, 6, 2, stride=2), nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last, self.head = nn.Conv2d(18, 3, 1), nn.Linear(3 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((x, self.one(x)), 1)
        x = torch.cat((x, self.two(F.relu(self.norm(x)))), dim=1)
        x = torch.cat([self.up(F.relu(self.down(x))), x], 1)
        return self.head(F.relu(self.last(x)).view(-1, 3 * 64))


class Tagger(nn.Module):
    """Embedding, recurrent layers, a linear layer at every step."""

    def __init__(self, kind: type[nn.RNNBase], layers: int = 2, bidirectional: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.recurrent = kind(6, 8, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(16 if bidirectional else 8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.recurrent(self.embedding(tokens))
        return self.head(outputs)


def tagger(kind: type[nn.RNNBase], layers: int = 2, bidirectional: bool = True) -> nn.Module:
    return Tagger(kind, layers, bidirectional)


class Attentive(nn.Module):
    """Embedding, two transformer layers of torch, attention by hand with a gate, a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        layer = nn.TransformerEncoderLayer(12, 4, 10, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.qkv, self.out = nn.Linear(12, 24), nn.Linear(8, 12)
        self.gate, self.head = nn.Linear(12, 14), nn.Linear(7, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.embedding(tokens))
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (each.view(each.size(0), -1, 4, 2).transpose(1, 2) for each in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        value, gate = self.gate(x).split(7, dim=-1)
        return self.head((value * torch.sigmoid(gate)).mean(1))


def prepare(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Evaluation mode, with biases and statistics that are not the trivial ones."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.copy_(torch.randn(module.num_features, generator=generator))
            module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
            nn.init.normal_(module.weight, 1, 0.3, generator=generator)
            nn.init.normal_(module.bias, 0, 0.5, generator=generator)
    return model.eval()


@torch.no_grad()
def sparsify_(model: nn.Module, sparsity: float, generator: torch.Generator, *, features: float = 0.3) -> None:
    """Random zeros; besides, whole rows and columns of each weight, and the biases of half of those rows."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim < 2 or min(weight.shape[:2]) < 1 or name == "scale":
                continue
            weight *= torch.rand(weight.shape, generator=generator) >= sparsity
            rows = torch.rand(weight.shape[0], generator=generator) < features
            weight[rows] = 0
            weight[:, torch.rand(weight.shape[1], generator=generator) < features] = 0
            bias = dict(module.named_parameters(recurse=False)).get(name.replace("weight", "bias"))
            if bias is not None and bias.shape[0] == weight.shape[0]:
                bias[rows & (torch.rand(weight.shape[0], generator=generator) < 0.5)] = 0
