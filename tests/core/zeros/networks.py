"""The networks of the table: small, but between them every kind of layer that has connections.

Each maps one batch to one tensor and has no dropout, so that runs can be compared bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    """How to build a network, and its inputs and targets of one step."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Tensor]
    outputs: tuple[int, ...]  # shape of what the network gives

    def fresh(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        return self.inputs(generator), torch.randn(self.outputs, generator=generator)


class LastOf(nn.Module):
    """A recurrent layer followed by a linear one on its last output."""

    def __init__(self, layer: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Cells(nn.Module):
    """The three recurrent cells, one on top of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(5, 8), nn.GRUCell(8, 7), nn.RNNCell(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[0]
        h, c = x.new_zeros(size, 8), x.new_zeros(size, 8)
        g, r = x.new_zeros(size, 7), x.new_zeros(size, 6)
        for step in range(x.shape[1]):
            h, c = self.lstm(x[:, step], (h, c))
            g = self.gru(h, g)
            r = self.rnn(g, r)
        return r


class Tied(nn.Module):
    """A language model whose decoder is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.body = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 20)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.body(self.embedding(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 8, mode="mean", padding_idx=0)
        self.head = nn.Bilinear(8, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        value = self.bag(x)
        return self.head(value, torch.tanh(value))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 5))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def _grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(6, 6, 3, padding=1, groups=6),
        nn.ReLU(),
        nn.Conv2d(6, 12, 3, padding=1, groups=3, dilation=1),
        nn.ReLU(),
        nn.Conv2d(12, 4, 1),
    )


def _transposed() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), nn.ReLU(), nn.ConvTranspose2d(6, 3, 2), nn.Flatten(2),
        nn.Conv1d(3, 4, 3),
    )  # fmt: skip


def _turned() -> nn.Module:
    """Weights that lie in memory column by column, as after loading a transposed matrix."""
    model = _mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


def _normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator)


def _tokens(below: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(below, shape, generator=generator)


NETWORKS = (
    Network("mlp", _mlp, _normal(8, 12), (8, 5)),
    Network("columns_first", _turned, _normal(8, 12), (8, 5)),
    Network("cnn", _cnn, _normal(6, 3, 8, 8), (6, 4)),
    Network("channels_last", lambda: _cnn().to(memory_format=torch.channels_last), _normal(6, 3, 8, 8), (6, 4)),
    Network("grouped", _grouped, _normal(4, 6, 5, 5), (4, 4, 5, 5)),
    Network("transposed", _transposed, _normal(3, 4, 3, 3), (3, 4, 62)),
    Network(
        "lstm",
        lambda: LastOf(nn.LSTM(5, 8, num_layers=2, batch_first=True, bidirectional=True, proj_size=4), 8),
        _normal(4, 6, 5),
        (4, 3),
    ),
    Network("gru", lambda: LastOf(nn.GRU(5, 8, batch_first=True), 8), _normal(4, 6, 5), (4, 3)),
    Network("cells", Cells, _normal(4, 3, 5), (4, 6)),
    Network("tied", Tied, _tokens(20, 4, 6), (4, 6, 20)),
    Network("transformer", Transformer, _normal(4, 5, 8), (4, 5, 3)),
    Network("bag", Bag, _tokens(30, 6, 5), (6, 4)),
)
BY_NAME = {network.name: network for network in NETWORKS}
